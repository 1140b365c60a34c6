"""What a worker knows of itself: `get_worker_info`, `worker_init_fn` and seeds, in processes and in threads."""

import functools
import pickle
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
import torch.utils.data
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from headrace.torch import DataLoader
from tests.torch.dataloader import datasets, failures
from tests.torch.dataloader.parity import (
    PROCESSES,
    WAYS,
    assert_parity,
    assert_same_error,
    ours,
    ways,
)

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

SOME = {
    name: WAYS[name] for name in ("no workers", "1 process", "2 processes that stay", "2 threads that stay")
}


def all_of(loader: Any, epochs: int = 2) -> list[Any]:
    return [[item for batch in loader for item in batch] for _ in range(epochs)]


def loader_of(make: Any, function: Any, **options: Any) -> Any:
    items = datasets.Items(function, 8)
    return make(items, batch_size=2, collate_fn=datasets.as_it_came, **options)


# get_worker_info


@ways(SOME)
def test_workers_know_who_they_are(way: dict[str, Any]) -> None:
    found = assert_parity(lambda make: all_of(loader_of(make, datasets.info, **way)))
    workers = way.get("num_workers", 0)
    assert {item["id"] for item in found[0]} == (set(range(workers)) if workers else {None})
    if workers:
        assert {item["seed"] - item["id"] for item in found[0]} == {found[0][0]["seed"]}


@ways(SOME)
def test_their_seeds_come_from_the_loaders_generator(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        return all_of(loader_of(make, datasets.info, generator=torch.Generator().manual_seed(8), **way))

    assert_parity(scenario)


@ways({"2 processes": PROCESSES["2 processes"]})
def test_their_dataset_is_the_one_that_is_used(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        items = datasets.OfOwnLength(datasets.number, 8)
        loader = make(items, batch_size=2, worker_init_fn=datasets.change_the_copy, **way)
        return list(loader), items.length

    found = assert_parity(scenario)
    assert [batch.tolist() for batch in found[0]] == [[1000] * 2, [1001] * 2] * 2
    assert found[1] == 8, "the main process has its own copy"


def test_threads_of_a_worker_process_know_it_too() -> None:
    assert_parity(lambda make: all_of(loader_of(make, datasets.info_from_another_thread, num_workers=1), 1))


class Meeting(datasets.Items):
    """Threads meet here twice: nobody leaves before both have come, and the main thread has looked."""

    def __init__(self) -> None:
        super().__init__(datasets.number, 2)
        self.inside, self.may_leave = threading.Barrier(3, timeout=90), threading.Barrier(3, timeout=90)

    def __getitem__(self, index: Any) -> Any:
        first = get_worker_info()
        self.inside.wait()
        self.may_leave.wait()
        second = torch.utils.data.get_worker_info()
        assert (
            first is second is torch_worker.get_worker_info() is torch.utils.data.dataloader.get_worker_info()
        )
        assert second is not None
        assert second.dataset is self
        return second.id, getattr(second, "worker_method", "thread"), threading.current_thread().name


def test_each_thread_has_its_own_and_the_main_thread_has_none() -> None:
    """However the function was imported, and while threads have one."""
    meeting = Meeting()
    iterator = iter(ours(meeting, batch_size=None, num_workers=2, worker_kind="thread"))
    meeting.inside.wait()
    assert get_worker_info() is None
    assert torch.utils.data.get_worker_info() is None
    assert torch_worker.get_worker_info() is None
    other: list[Any] = []
    stranger = threading.Thread(target=lambda: other.append(get_worker_info()))
    stranger.start()
    stranger.join()
    assert other == [None]
    meeting.may_leave.wait()
    found = [next(iterator), next(iterator)]
    assert [(worker, kind) for worker, kind, _ in found] == [(0, "thread"), (1, "thread")]
    assert len({name for _, _, name in found} | {threading.main_thread().name}) == 3
    assert get_worker_info() is None


@ways({name: WAYS[name] for name in ("1 process", "1 thread")})
def test_there_is_none_after_an_epoch_either(way: dict[str, Any]) -> None:
    all_of(loader_of(ours, datasets.info, **way))
    assert get_worker_info() is None


def test_a_function_that_was_imported_before_is_still_documented() -> None:
    all_of(loader_of(ours, datasets.info, num_workers=1, worker_kind="thread"))
    assert get_worker_info.__name__ == "get_worker_info"
    assert "current worker id" in str(get_worker_info.__doc__)


# Loaders with workers inside workers


def test_processes_in_a_thread_know_that_they_are_processes() -> None:
    nested = datasets.NestedInfo(DataLoader, {"num_workers": 2})
    ((outer, inner),) = ours(nested, batch_size=None, num_workers=1, worker_kind="thread")
    assert outer == [0, 1]
    assert inner == [[0, 2], [1, 2], [0, 2], [1, 2]]


def test_threads_in_a_process_know_that_they_are_threads() -> None:
    nested = datasets.NestedInfo(DataLoader, {"num_workers": 2, "worker_kind": "thread"})
    ((outer, inner),) = ours(nested, batch_size=None, num_workers=1)
    assert outer == [0, 1]
    assert inner == [[0, 2], [1, 2], [0, 2], [1, 2]]


def test_processes_in_a_process_are_refused() -> None:
    def scenario(make: Any) -> Any:
        nested = datasets.NestedInfo(
            DataLoader if make is ours else torch.utils.data.DataLoader, {"num_workers": 1}
        )
        return list(make(nested, batch_size=None, num_workers=1))

    assert_same_error(scenario, AssertionError, "daemonic processes are not allowed to have children")


# worker_init_fn


@ways(
    {name: WAYS[name] for name in ("1 process", "2 processes that stay", "2 threads", "2 threads that stay")}
)
def test_worker_init_fn_is_called_once_in_each_worker(way: dict[str, Any], tmp_path: Path) -> None:
    tell = functools.partial(datasets.tell, str(tmp_path))
    all_of(loader_of(ours, datasets.number, worker_init_fn=tell, **way), epochs=2)
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    workers, starts = way["num_workers"], 1 if way.get("persistent_workers") else 2
    said = sorted((given, own, total) for given, own, _, total, *_ in calls)
    assert said == sorted([(str(n), str(n), str(workers)) for n in range(workers)] * starts)
    assert len({tuple(who) for _, _, _, _, *who in calls}) == (
        workers if way.get("worker_kind") else workers * starts
    )


def test_without_workers_worker_init_fn_is_not_called() -> None:
    assert_parity(lambda make: list(make(range(3), worker_init_fn=failures.fails_to_begin)))


@ways({name: WAYS[name] for name in ("2 processes", "2 processes that stay")})
def test_worker_init_fn_may_seed(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        return all_of(loader_of(make, datasets.draws, worker_init_fn=datasets.seed_all, **way))

    found = assert_parity(scenario)
    assert found[0][0][0] == 77


# Seeds


@ways(PROCESSES)
def test_processes_draw_what_pytorchs_draw(way: dict[str, Any]) -> None:
    """From `random`, NumPy and torch, in every worker and epoch; and with as many threads of torch: one."""
    found = assert_parity(lambda make: all_of(loader_of(make, datasets.draws, shuffle=True, **way)))
    if way.get("in_order", True):
        assert len({seed for seed, *_ in found[0]}) == way["num_workers"]
    assert found[0] != found[1]
    assert {threads for *_, threads in found[0]} == {1}


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.usefixtures("forkserver")
def test_however_processes_start_they_are_the_same(start_method: str) -> None:
    """Forks of PyTorch's are the oracle: they are quicker, and start methods make no difference."""

    def scenario(make: Any) -> Any:
        context = start_method if make is ours else "fork"
        loader = loader_of(make, datasets.draws_and_info, num_workers=2, multiprocessing_context=context)
        return all_of(loader, 1), loader.multiprocessing_context.get_start_method() == context

    assert_parity(scenario)


@pytest.mark.usefixtures("forkserver")
def test_a_context_may_be_an_object_and_the_dataset_may_have_tensors_and_arrays() -> None:
    def scenario(make: Any) -> Any:
        context = torch.multiprocessing.get_context("forkserver" if make is ours else "fork")
        table = datasets.Table(torch.arange(100_000.0), np.arange(50_000)[::-1], "a name")
        options = {"num_workers": 1, "persistent_workers": True, "worker_init_fn": datasets.seed_all}
        loader = make(table, batch_size=3, multiprocessing_context=context, **options)
        return [list(loader) for _ in range(2)]

    assert_parity(scenario)


def test_what_cannot_be_pickled_cannot_be_sent_to_a_spawned_worker() -> None:
    def scenario(make: Any) -> Any:
        options = {"num_workers": 1, "multiprocessing_context": "spawn"}
        return list(make(range(3), collate_fn=lambda batch: batch, **options))

    kind = pickle.PicklingError if sys.version_info >= (3, 14) else AttributeError
    assert_same_error(scenario, kind, "local object")


def test_threads_leave_the_generators_of_the_process_alone_and_have_their_own() -> None:
    if not hasattr(torch_worker, "_RNG"):
        pytest.skip("this version of PyTorch has no generators for threads")
    torch_threads = torch.get_num_threads()
    items = loader_of(
        ours, datasets.draws_of_own_generators, num_workers=2, worker_kind="thread", shuffle=True
    )
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    iterator = iter(items)
    after_beginning = torch.get_rng_state()
    found: dict[int, list[Any]] = {}
    for batch in iterator:
        for seed, *drawn in batch:
            found.setdefault(seed, []).append(drawn)
    assert torch.equal(torch.get_rng_state(), after_beginning)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]
    assert torch.get_num_threads() == torch_threads
    assert len(found) == 2
    for seed, drawn in found.items():
        python, numpy = random.Random(seed), np.random.default_rng(seed)
        tensor = torch.Generator().manual_seed(seed)
        wanted = [[python.random(), torch.rand(1, generator=tensor).item(), numpy.random()] for _ in drawn]
        assert drawn == wanted
