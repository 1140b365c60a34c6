"""Timelines of DataLoaders: ours with its workers, and PyTorch's, of which only the loop shows."""

import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch's DataLoader")

import torch.utils.data

from headrace.measure.watching.trace import trace
from headrace.torch import DataLoader
from tests.measure.squares import Squares
from tests.measure.timelines import count, read, stages_by_lane


def test_worker_processes_have_lanes_and_every_stage_shows(tmp_path: Path) -> None:
    loader = DataLoader(Squares(), batch_size=4, num_workers=2)
    begun = time.perf_counter()
    with trace(loader, tmp_path / "trace.json") as traced:
        assert len(list(traced)) == 16
    events = read(tmp_path / "trace.json", time.perf_counter() - begun)
    assert stages_by_lane(events) == {
        "loop (MainThread)": {"start", "wait", "step", "transport"},
        "worker 0": {"read", "collate", "transport"},
        "worker 1": {"read", "collate", "transport"},
    }
    assert count(events, "read") == count(events, "collate") == 16
    assert count(events, "wait") == 17
    depths = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in depths} == {"queue: ready"}
    assert all(set(event["args"]) == {"batches"} for event in depths)


def test_threads_of_the_dataloader_have_lanes(tmp_path: Path) -> None:
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, worker_kind="thread")
    with trace(loader, tmp_path / "trace.json"):
        for _ in range(2):
            assert len(list(loader)) == 16
    events = read(tmp_path / "trace.json")
    lanes = stages_by_lane(events)
    assert {"loop (MainThread)", "DataLoader-0", "DataLoader-1"} <= set(lanes)
    assert lanes["DataLoader-0"] == {"read", "collate"}
    assert count(events, "collate") == 32


def test_in_the_loop_stages_lie_inside_the_wait(tmp_path: Path) -> None:
    loader = DataLoader(Squares(), batch_size=4)
    with trace(loader, tmp_path / "trace.json"):
        list(loader)
    events = read(tmp_path / "trace.json")
    assert stages_by_lane(events) == {"loop (MainThread)": {"start", "wait", "step", "read", "collate"}}
    waits = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "wait"]
    for event in events:
        if event["name"] in ("read", "collate"):
            assert any(first <= event["ts"] <= last for first, last in waits)


@pytest.mark.parametrize("workers", [0, 2])
def test_any_loader_shows_its_loop(workers: int, tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=workers)
    with trace(loader, tmp_path / "trace.json") as traced:
        assert len(traced) == 16
        assert sum(len(batch) for batch in traced) == 64
    events = read(tmp_path / "trace.json")
    assert stages_by_lane(events) == {"loop (MainThread)": {"start", "wait", "step"}}
    assert count(events, "step") == 16


def test_two_iterations_at_once_do_not_overlap_in_a_lane(tmp_path: Path) -> None:
    loader = DataLoader(Squares(), batch_size=4, num_workers=2)
    with trace(loader, tmp_path / "trace.json"):
        for _ in zip(loader, loader, strict=True):
            pass
    events = read(tmp_path / "trace.json")
    assert count(events, "read") == 32
