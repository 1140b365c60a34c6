"""Iterations of a loader: several at once, one inside another, in pipes and profiles, as with PyTorch's."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _sharding_worker_init_fn
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_random_seed

from headrace.errors import StageError
from headrace.torch import DataLoader
from tests.torch.dataloader import datasets
from tests.torch.dataloader.parity import (
    ONE_OF_EACH,
    PROCESSES,
    THREADS,
    WAYS,
    assert_parity,
    epochs,
    ours,
    ways,
)

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

NUMBERS = datasets.Items(datasets.number, 23)


@ways({name: WAYS[name] for name in ("no workers", "1 process", "2 threads")})
def test_several_iterations_of_one_loader_at_once(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        loader = make(NUMBERS, batch_size=4, shuffle=True, **way)
        return list(zip(loader, loader, iter(loader), strict=True))

    assert len(assert_parity(scenario)) == 6


@ways({name: {**PROCESSES, **THREADS}[name] for name in ("2 processes that stay", "2 threads that stay")})
def test_workers_that_stay_have_one_iteration_at_a_time(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        loader = make(NUMBERS, batch_size=4, **way)
        first = iter(loader)
        begun = [next(first), next(first)]
        second = iter(loader)
        return begun, first is second, list(first), list(second), list(loader)

    found = assert_parity(scenario)
    assert found[1]
    assert [len(part) for part in found[2:]] == [6, 0, 6]


@ways(ONE_OF_EACH)
def test_a_loader_inside_the_dataset_of_a_loader(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        nested = datasets.WithLoaderInside(datasets.number, 5)
        nested.loader = DataLoader if make is ours else torch.utils.data.DataLoader
        return list(make(nested, batch_size=2, collate_fn=datasets.as_it_came, **way))

    assert assert_parity(scenario)[2] == [([[0, 1, 2], [3]], 4)]


def test_an_iterator_knows_how_many_batches_there_are_and_ends_for_good() -> None:
    for way in ONE_OF_EACH.values():

        def scenario(make: Any, way: Any = way) -> Any:
            iterator = iter(make(NUMBERS, batch_size=4, **way))
            return (
                len(iterator),
                len(list(iterator)),
                list(iterator),
                next(iterator, "no more"),
                iter(iterator) is iterator,
            )

        assert assert_parity(scenario) == (6, 6, [], "no more", True)


@ways(ONE_OF_EACH)
def test_data_pipes(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        pipe = IterableWrapper(list(range(20))).shuffle().sharding_filter()
        loader = make(pipe, batch_size=3, shuffle=True, **way)
        return epochs(loader), list(make(SequenceWrapper([3, 1, 4, 1, 5]).map(float), batch_size=2, **way))

    found, _ = assert_parity(scenario)
    for epoch in found:
        assert sorted(number for batch in epoch for number in batch.tolist()) == list(range(20))


class OneAtATime:
    """A function that notes how many threads are inside it at once."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._inside = 0
        self.seen: list[int] = []

    def __call__(self, *arguments: Any) -> Any:
        self._inside += 1
        self.seen.append(self._inside)
        # Time for another thread to come in, if it could.
        threading.Event().wait(0.02)
        try:
            return self._function(*arguments)
        finally:
            self._inside -= 1


def test_worker_threads_look_into_data_pipes_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has one hook for all pipes of a process: two threads in there at once fail, or get a stub for a pipe."""
    seeding, sharding = OneAtATime(apply_random_seed), OneAtATime(_sharding_worker_init_fn)
    monkeypatch.setattr("headrace.torch.workers.job.apply_random_seed", seeding)
    monkeypatch.setattr("headrace.torch.workers.job._sharding_worker_init_fn", sharding)
    pipe = IterableWrapper(list(range(200))).shuffle().sharding_filter()
    loader = DataLoader(pipe, batch_size=3, shuffle=True, num_workers=4, worker_kind="thread")
    for _ in range(2):
        assert sorted(number for batch in loader for number in batch.tolist()) == list(range(200))
    assert seeding.seen == sharding.seen == [1] * 8


def test_functions_that_begin_workers_with_data_pipes_run_side_by_side() -> None:
    """One of them may wait for the others."""
    together = threading.Barrier(3, timeout=120)
    pipe = IterableWrapper(list(range(30))).sharding_filter()
    loader = DataLoader(
        pipe, num_workers=3, worker_kind="thread", worker_init_fn=lambda worker: together.wait() and None
    )
    assert sorted(int(number) for number in loader) == list(range(30))


class Counting(IterDataPipe[int]):
    """Keeps a place, as the buffer of a shuffle does."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(100):
            self.given += 1
            yield self.given


def test_each_worker_thread_has_a_data_pipe_of_its_own() -> None:
    pipe = Counting().map(abs)
    loader = DataLoader(pipe, batch_size=None, num_workers=3, worker_kind="thread")
    assert sorted(loader) == sorted(3 * list(range(1, 101)))


@pytest.mark.filterwarnings("ignore:.*not supported by pickle:UserWarning")
def test_worker_threads_take_data_pipes_that_cannot_be_pickled() -> None:
    even, odd = IterableWrapper(list(range(50))).demux(2, lambda number: number % 2)
    left, right = even.mux(odd).map(lambda number: number + 1).fork(2)
    pipe = left.zip(right).sharding_filter()
    loader = DataLoader(pipe, batch_size=None, num_workers=3, worker_kind="thread")
    for _ in range(2):
        assert sorted(map(tuple, loader)) == [(number, number) for number in range(1, 51)]


class Shifting(IterDataPipe[int]):
    """Its methods are given to the loader, and change it or depend on it."""

    def __init__(self) -> None:
        self.shift = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.shift, self.shift + 4))

    def set_shift(self, worker: int) -> None:
        self.shift = 1000 * (worker + 1)

    def collate(self, items: list[int]) -> list[int]:
        return [item + self.shift for item in items]


@pytest.mark.parametrize("outer", [False, True])
def test_methods_of_a_data_pipe_act_on_the_workers_own(outer: bool) -> None:
    def batches(make: Any, **way: Any) -> list[Any]:
        pipe = Shifting()
        given = pipe.map(abs) if outer else pipe
        return list(
            make(
                given,
                batch_size=2,
                num_workers=2,
                worker_init_fn=pipe.set_shift,
                collate_fn=pipe.collate,
                **way,
            )
        )

    assert batches(DataLoader, worker_kind="thread") == batches(torch.utils.data.DataLoader)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_loop_looks_into_data_pipes_when_no_worker_does(
    persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loaders at once, and one that begins again while its workers begin."""
    looking = OneAtATime(traverse_dps)
    monkeypatch.setattr("torch.utils.data.graph_settings.traverse_dps", looking)
    way: Any = {"num_workers": 2, "worker_kind": "thread", "persistent_workers": persistent}
    pipes = [IterableWrapper(list(range(12))).shuffle().sharding_filter() for _ in range(2)]
    loaders = [DataLoader(pipe, batch_size=5, **way) for pipe in pipes]
    next(zip(*loaders, strict=True))
    assert len(list(zip(*loaders, strict=True))) == 4
    assert set(looking.seen) == {1}


class TakesLongToLookAt:
    """A part of a pipe: while PyTorch looks at it, it tells, and gives a fork time to come in between."""

    def __init__(self, looked_at: threading.Event | None = None) -> None:
        self._looked_at = looked_at

    def __deepcopy__(self, memo: Any) -> "TakesLongToLookAt":
        return self

    def __reduce__(self) -> Any:
        if self._looked_at is not None and threading.current_thread() is not threading.main_thread():
            self._looked_at.set()
            threading.Event().wait(0.3)
        return TakesLongToLookAt, ()


class LooksIntoAPipe:
    """A dataset that is no data pipe, so that nothing but the fork itself has to wait; its items look into one."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return len(traverse_dps(IterableWrapper([index])))


def test_processes_are_forked_when_nobody_looks_into_a_data_pipe() -> None:
    """A fork in the middle of a look would have PyTorch's hooks for ever, and fail with them."""
    looked_at = threading.Event()
    slow = IterableWrapper(list(range(6)), deepcopy=False).sharding_filter()
    slow.parts = [TakesLongToLookAt(looked_at)]
    beginning = iter(DataLoader(slow, batch_size=None, num_workers=1, worker_kind="thread"))
    assert looked_at.wait(60)
    assert [*DataLoader(LooksIntoAPipe(), batch_size=None, num_workers=1)] == [1, 1, 1]  # type: ignore[arg-type]
    assert sorted(beginning) == list(range(6))


class OverMap(IterDataPipe[int]):
    def __init__(self, array: Any) -> None:
        self.parts = {"array": [array]}

    def __iter__(self) -> Iterator[int]:
        yield self.parts["array"][0].ctypes.data


def test_memory_maps_in_a_data_pipe_are_shared_by_its_threads_and_other_arrays_are_not(
    tmp_path: Path,
) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000))
    for array, copies in ((np.load(tmp_path / "a.npy", mmap_mode="r"), 1), (np.arange(1000), 3)):
        loader = DataLoader(OverMap(array), batch_size=None, num_workers=3, worker_kind="thread")
        assert len(set(loader)) == copies


def test_a_data_pipe_that_cannot_be_copied_is_told() -> None:
    pipe = IterableWrapper(["a"], deepcopy=False).map(str.upper)
    pipe.lock = threading.Lock()
    with pytest.raises(StageError, match="cannot be copied: .*; use worker_kind='process'"):
        iter(DataLoader(pipe, num_workers=2, worker_kind="thread"))


@ways(ONE_OF_EACH)
def test_each_batch_shows_in_a_profile(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        loader = make(NUMBERS, batch_size=4, **way)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            list(loader)
        return [
            name.split("#")[0] for name in (event.name for event in profile.events()) if "DataLoader" in name
        ]

    # The last is the one that finds the end.
    assert assert_parity(scenario) == ["enumerate(DataLoader)"] * 7


class Augmented(torch.utils.data.Dataset[Any]):
    """Draws a random number for each item, as augmentation does, and is slow at some."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index == 5:
            torch.empty(3_000_000).fill_(1)
        return index, float(torch.rand(()))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("waits", [False, True])
def test_the_epoch_after_one_that_was_left_draws_the_same_as_with_pytorch(waits: bool) -> None:
    """Whether or not workers that stay had done what they were told by the time that the loop was left."""

    def second_epoch(make: Any) -> list[Any]:
        datasets.seed_torch(0)
        loader = make(Augmented(), num_workers=2, persistent_workers=True, prefetch_factor=4)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        if waits and make is DataLoader:
            # All that was sent is done, and has arrived.
            while batches._arrived + len(batches._due) - len(batches._tasks) < 8:
                for result in batches._receive():
                    batches._accept(result)
        return [[part.tolist() for part in batch] for batch in loader]

    assert second_epoch(DataLoader) == second_epoch(torch.utils.data.DataLoader)
