"""Copies to page-locked memory ahead of the loop, by an accelerator that is not there and writes down what is asked."""

import dataclasses
import os
import signal
import threading
from collections import namedtuple
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from headrace.torch import DataLoader
from headrace.torch.workers import children, pinning
from tests.torch.dataloader import fault_datasets as faults
from tests.torch.dataloader import state_datasets as data
from tests.torch.leftovers import mapped_segments, worker_threads

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

Pair = namedtuple("Pair", "first second")


class Accelerator:
    """What of torch.accelerator and of pinning is used, written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: list[Any] = []
        self.threads: set[str] = set()
        self.devices: list[int] = []
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.devices.append)
        # Not the method itself: it would be bound to this object instead of to a tensor.
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: self._pin(tensor))

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        copied = tensor.clone()
        self.pinned.append(copied)
        return copied

    def has(self, tensor: torch.Tensor) -> bool:
        return any(tensor is each for each in self.pinned)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    return Accelerator(monkeypatch)


WAYS: dict[str, dict[str, Any]] = {
    "in the loop": {},
    "threads": {"num_workers": 2, "worker_kind": "thread"},
    "processes": {"num_workers": 2},
    "processes that stay": {"num_workers": 2, "persistent_workers": True},
    "out of order": {"num_workers": 2, "worker_kind": "thread", "in_order": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_batch_is_pinned_once_beside_the_loop(accelerator: Accelerator, way: str) -> None:
    loader = DataLoader(data.Numbers(40), batch_size=4, pin_memory=True, **WAYS[way])
    for _ in range(2):
        batches = list(loader)
        assert all(accelerator.has(batch) for batch in batches)
        assert sorted(torch.cat(batches).tolist()) == list(range(40))
        if way != "out of order":
            assert torch.cat(batches).tolist() == list(range(40))
    assert len(accelerator.pinned) == 20
    if way == "in the loop":
        assert accelerator.threads == {threading.current_thread().name}
    else:
        assert accelerator.threads == {"DataLoader-pin"}
        assert set(accelerator.devices) == {3}, "the thread works for the device of the one that made it"


class Own:
    def __init__(self, x: Any) -> None:
        self.x = x

    def pin_memory(self) -> "Own":
        return Own(("pinned", self.x))


@dataclasses.dataclass
class Sample:
    x: Any
    name: str


def _nested(samples: list[int]) -> Any:
    tensor = torch.tensor(samples)
    return {
        "t": tensor,
        "pair": Pair(tensor, [tensor, "text"]),
        "own": Own(samples[0]),
        "sample": Sample(tensor, "a"),
    }


@pytest.mark.parametrize("way", ["in the loop", "processes"])
def test_whatever_a_batch_holds(accelerator: Accelerator, way: str) -> None:
    for batch in DataLoader(data.Numbers(4), batch_size=2, pin_memory=True, collate_fn=_nested, **WAYS[way]):
        tensors = (batch["t"], batch["pair"].first, batch["pair"].second[0])
        assert all(accelerator.has(tensor) for tensor in tensors)
        assert batch["pair"].second[1] == "text"
        assert batch["own"].x == ("pinned", int(batch["t"][0]))
    for batch in DataLoader(_Samples(), batch_size=2, pin_memory=True, **WAYS[way]):
        assert accelerator.has(batch.x)
        assert batch.name == ["a", "a"]


class _Samples(data.Numbers):
    def __init__(self) -> None:
        super().__init__(4)

    def __getitem__(self, index: int) -> Any:
        return Sample(torch.tensor(index), "a")


def test_an_error_while_pinning_names_the_thread(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no page can be locked")

    monkeypatch.setattr(pinning, "pin_memory", refuse)
    loader = DataLoader(data.Numbers(8), num_workers=1, worker_kind="thread", pin_memory=True)
    with pytest.raises(RuntimeError, match=r"in pin memory thread for device 3(.|\n)*no page can be locked"):
        next(iter(loader))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("way", ["threads", "processes"])
def test_the_thread_ends_with_the_iteration(accelerator: Accelerator, way: str) -> None:
    loader = DataLoader(data.Numbers(400), pin_memory=True, **WAYS[way])
    batches = iter(loader)
    next(batches)
    assert "DataLoader-pin" in {thread.name for thread in worker_threads()}
    del batches


def test_errors_of_workers_come_through(accelerator: Accelerator) -> None:
    batches = iter(DataLoader(faults.Numbered(seconds=0.001), num_workers=2, pin_memory=True))
    next(batches)
    victim = batches._workers._workers.pids()[0]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"worker \(pid {victim}\) is killed by signal"):
        for _ in batches:
            pass


def test_a_dataset_that_hangs_meets_the_timeout(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_STOP_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 0.2 seconds"):
        list(DataLoader(faults.Hanging(), num_workers=1, pin_memory=True, timeout=0.2))


def test_shared_memory_is_free_as_soon_as_it_is_copied(accelerator: Accelerator) -> None:
    """However many batches the loop keeps: it keeps the copies."""
    before = mapped_segments()
    kept = list(DataLoader(faults.Numbered(100, 50_000), batch_size=2, num_workers=1, pin_memory=True))
    assert [int(batch[1, -1]) for batch in kept] == list(range(1, 100, 2))
    assert mapped_segments() < before + 20
