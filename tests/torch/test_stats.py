"""`loader.stats()` of the drop-in DataLoader: what was spent, whoever spent it."""

from typing import Any

import pytest

import headrace

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.utils.data import Dataset, IterableDataset

from headrace.torch import DataLoader
from tests.torch.leftovers import wait_until

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), index)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(64))


WAYS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "worker_kind": "thread"}]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dataset", [Rows(), Endless()])
def test_every_batch_is_counted_once(way: dict[str, Any], dataset: Any) -> None:
    loader = DataLoader(dataset, batch_size=8, **way)
    count = sum(1 for _ in loader)
    stats = loader.stats()
    assert stats.batches == count
    assert stats.stages["collate"].count == count
    assert stats.stages["read"].count >= count
    assert ("transport" in stats.stages) == (way == {"num_workers": 2})
    assert stats.workers == way.get("num_workers", 0)
    list(loader)
    assert loader.stats().batches == 2 * count


def test_the_queue_is_seen() -> None:
    loader = DataLoader(Rows(), batch_size=8, num_workers=2, prefetch_factor=3)
    list(loader)
    queue = loader.stats().queues["ready"]
    assert queue.capacity == 6
    assert queue.seen == 8
    assert 0 <= queue.mean <= 6


@pytest.mark.parametrize("worker_kind", ["process", "thread"])
def test_a_loop_that_is_slower_than_its_workers_never_finds_the_queue_empty(worker_kind: str) -> None:
    loader = DataLoader(Rows(), batch_size=8, num_workers=1, prefetch_factor=2, worker_kind=worker_kind)
    batches = iter(loader)
    next(batches)
    before = loader.stats()
    for _ in range(6):
        # Until the worker has made what it was told.
        wait_until(lambda: batches._arrived + batches._workers.waiting() > 0)
        next(batches)
    queue = loader.stats().since(before).queues["ready"]
    assert (queue.seen, queue.empty) == (6, 0)


def test_no_stage_of_a_worker_is_lost(tmp_path: Any) -> None:
    """Though it has hundreds of pieces in one batch."""
    for number in range(600):
        (tmp_path / f"{number}.jsonl").write_text('{"x": 1}\n')
    loader = DataLoader(headrace.stream(tmp_path / "*.jsonl"), batch_size=300, num_workers=1)
    assert sum(1 for _ in loader) == 2
    assert loader.stats().stages["read"].count >= 600


def test_persistent_workers_go_on_counting() -> None:
    loader = DataLoader(Rows(), batch_size=8, num_workers=1, persistent_workers=True)
    for epoch in range(1, 4):
        list(loader)
        assert loader.stats().batches == 8 * epoch
        assert loader.stats().stages["collate"].count == 8 * epoch


def test_a_stream_counts_its_reading_apart(tmp_path: Any) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_text("".join(f'{{"x": {number}}}\n' for number in range(100)))
    loader = DataLoader(headrace.stream([path]), batch_size=10)
    assert sum(1 for _ in loader) == 10
    assert {"read", "transform", "collate"} <= set(loader.stats().stages)


def test_copies_and_pickles_begin_at_nothing() -> None:
    import copy
    import pickle

    loader = DataLoader(Rows(), batch_size=8)
    list(loader)
    assert copy.copy(loader).stats().batches == 0
    assert pickle.loads(pickle.dumps(loader)).stats().batches == 0
    assert loader.stats().batches == 8
