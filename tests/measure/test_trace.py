"""Timelines: files that the Perfetto viewer and chrome://tracing open, and that show what happened."""

import itertools
import json
import logging
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import penstock
from penstock.errors import SettingsError
from penstock.load.counting import Span
from penstock.measure.monitor import monitor
from penstock.measure.trace import Recording, trace, trace_events
from penstock.torch import DataLoader

Events = list[dict[str, Any]]


def read(path: Path, seconds: float | None = None) -> Events:
    """The events, after checking all that the viewers ask for. Times are compared in whole nanoseconds."""
    document = json.loads(path.read_text())
    assert set(document) <= {"traceEvents", "displayTimeUnit"}
    events: Events = document["traceEvents"]
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    named = set()
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        lane = event["pid"], event["tid"]
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
                if event["name"] == "thread_name":
                    assert lane not in named
                    named.add(lane)
            case "X":
                begun, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
                assert begun >= 0
                assert length >= 0
                if seconds is not None:
                    assert begun + length <= seconds * 1e9
                assert 0 <= event["args"]["own_ms"] <= event["dur"] / 1e3 + 1e-9
                lanes[lane].append((begun, begun + length))
            case "C":
                assert event["ts"] >= 0
                assert all(type(each) is int and each >= 0 for each in event["args"].values())
            case other:
                pytest.fail(f"an event of kind {other!r}")
    assert set(lanes) <= named
    for spans in lanes.values():
        check_nested(spans)
    return events


def check_nested(spans: list[tuple[int, int]]) -> None:
    """One after the other, or one inside the other."""
    under_way: list[int] = []
    for begun, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
        while under_way and under_way[-1] <= begun:
            under_way.pop()
        assert not under_way or ended <= under_way[-1]
        under_way.append(ended)


def stages_by_lane(events: Events) -> dict[str, set[str]]:
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    stages: dict[str, set[str]] = defaultdict(set)
    for event in events:
        if event["ph"] == "X":
            stages[names[event["tid"]]].add(event["name"])
    return dict(stages)


def count(events: Events, name: str) -> int:
    return sum(event["ph"] == "X" and event["name"] == name for event in events)


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((50, 50), index**2)


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


def test_threads_of_a_loader_have_lanes(tmp_path: Path) -> None:
    documents = [np.arange(1, 20 + n % 50, dtype=np.uint16) for n in range(4000)]
    data = penstock.from_arrays({"tokens": documents})
    loader = penstock.Loader(data, seq_len=128, batch_size=8, workers=2).map(lambda batch: batch, per="batch")
    begun = time.perf_counter()
    with trace(loader, tmp_path / "trace.json"):
        batches = len(list(loader))
    events = read(tmp_path / "trace.json", time.perf_counter() - begun)
    lanes = stages_by_lane(events)
    assert lanes.pop("loop (MainThread)") == {"start", "wait", "step"}
    assert len(lanes) in (1, 2)  # one thread may have been faster than the other could start
    assert all(name.startswith("penstock-") for name in lanes)
    assert set.union(*lanes.values()) == {"plan", "gather", "transform"}
    assert count(events, "wait") == batches + 1
    assert count(events, "transform") == batches


def test_threads_of_the_dataloader_have_lanes(tmp_path: Path) -> None:
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, workers="thread")
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


def test_the_file_is_written_when_the_loop_fails_and_the_error_is_the_users(tmp_path: Path) -> None:
    failure = RuntimeError("diverged")
    loader = DataLoader(Squares(), batch_size=4)

    def loop() -> None:
        with trace(loader, tmp_path / "trace.json"):
            for number, _ in enumerate(loader):
                if number == 5:
                    raise failure

    with pytest.raises(RuntimeError, match="diverged") as caught:
        loop()
    assert caught.value is failure
    assert count(read(tmp_path / "trace.json"), "wait") == 6
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_disk_that_fails_does_not_hide_the_users_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "runs"
    place.mkdir()

    def loop() -> None:
        with trace([1], place / "trace.json"):
            place.rmdir()
            raise RuntimeError("diverged")

    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="diverged"):
        loop()
    assert "trace.json: the timeline could not be written" in caplog.text
    with pytest.raises(OSError), trace([1], tmp_path / "trace.json"):
        (tmp_path / "trace.json").mkdir()


def test_places_where_nothing_can_be_written_are_refused_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "trace.json"):
        with pytest.raises(SettingsError, match=str(path)), trace([1], path):
            pytest.fail("entered")
    with pytest.raises(SettingsError, match="max_spans=0"), trace([1], tmp_path / "x", max_spans=0):
        pytest.fail("entered")


def test_one_recording_at_a_time_and_another_after_it(tmp_path: Path) -> None:
    loader = DataLoader(Squares(), batch_size=4)
    with (
        trace(loader, tmp_path / "a.json"),
        pytest.raises(SettingsError, match="being recorded already"),
        trace(loader, tmp_path / "b.json"),
    ):
        pytest.fail("entered")
    list(loader)
    with trace(loader, tmp_path / "b.json"):
        list(itertools.islice(loader, 3))
    assert count(read(tmp_path / "a.json"), "wait") == 0
    assert count(read(tmp_path / "b.json"), "wait") == 3


def test_the_latest_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        trace(range(1000), tmp_path / "trace.json", max_spans=10) as traced,
    ):
        list(traced)
    events = read(tmp_path / "trace.json")
    assert count(events, "wait") + count(events, "step") == 10
    assert "only the last 10 pieces" in caplog.text


def test_finish_writes_once_and_a_loader_of_ours_stays_itself(tmp_path: Path) -> None:
    loader = DataLoader(Squares(), batch_size=4)
    recording = Recording(loader, tmp_path / "trace.json")
    assert recording.loader is loader
    list(loader)
    recording.finish()
    assert count(read(tmp_path / "trace.json"), "read") == 16
    os.unlink(tmp_path / "trace.json")
    recording.finish()
    list(loader)
    assert list(tmp_path.iterdir()) == []


def test_the_monitor_writes_one_too(tmp_path: Path) -> None:
    with monitor(DataLoader(Squares(), batch_size=4), view="off", trace=tmp_path / "trace.json") as watched:
        list(watched)
    assert count(read(tmp_path / "trace.json"), "read") == 16


def test_two_iterations_at_once_do_not_overlap_in_a_lane(tmp_path: Path) -> None:
    loader = DataLoader(Squares(), batch_size=4, num_workers=2)
    with trace(loader, tmp_path / "trace.json"):
        for _ in zip(loader, loader, strict=True):
            pass
    events = read(tmp_path / "trace.json")
    assert count(events, "read") == 32


def test_what_overlaps_goes_to_another_track() -> None:
    spans = [Span("read", a, b, b - a, "worker 0") for a, b in [(1, 2), (0, 4), (3, 6), (5, 9), (6, 8)]]
    events = list(trace_events(spans))
    tracks = Counter(event["tid"] for event in events if event["ph"] == "X")
    assert tracks == {1: 4, 2: 1}  # [3, 6] overlaps [0, 4]; when [5, 9] begins, the first track is free again
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["worker 0", "worker 0 2"]
    assert not [e for e in trace_events(spans, [(1, {"ready": 2})], begun=7) if e["ph"] in "XC"]
