"""Iterable-style datasets: the same batches in the same order as PyTorch's, however uneven the workers' shares are."""

import itertools
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.utils.data import ChainDataset, IterableDataset

from tests.torch.dataloader import datasets
from tests.torch.dataloader.parity import (
    LOOP,
    ONE_OF_EACH,
    STAYING_PROCESSES,
    STAYING_THREADS,
    WAYS,
    assert_parity,
    epochs,
    ours,
    ways,
    ways_named,
    ways_with,
)

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

SHARES = [(13, 4), (3, 17), (0, 9), (9, 0), (0, 0), (1, 30)]


@ways_named(LOOP, STAYING_PROCESSES, STAYING_THREADS, "2 processes far ahead", "1 process in any order")
def test_epochs_of_one_stream_for_every_worker(way: dict[str, Any]) -> None:
    """That does not look at its worker: each gives all of it, as the documentation warns."""
    found = assert_parity(
        lambda make: epochs(make(datasets.Stream(datasets.count_to_ten), batch_size=4, **way))
    )
    assert len(found[0]) == 3 * max(1, way.get("num_workers", 0))


# Without workers all shares are one; threads and processes take turns in the same way.
@ways_with("shares", {LOOP: [(13, 4), (0, 0)], STAYING_PROCESSES: SHARES, STAYING_THREADS: [(3, 17), (0, 0)]})
def test_uneven_shares(shares: tuple[int, ...], way: dict[str, Any]) -> None:
    found = assert_parity(lambda make: epochs(make(datasets.Shards(shares), batch_size=3, **way)))
    seen = sorted(number for batch in found[0] for number in batch.tolist())
    assert seen == [100 * shard + place for shard, share in enumerate(shares) for place in range(share)]


@ways_with(
    "shares", {LOOP: [(13, 4)], STAYING_PROCESSES: [(13, 4), (0, 9), (2, 2)], STAYING_THREADS: [(13, 4)]}
)
def test_uneven_shares_without_their_last_batches(shares: tuple[int, ...], way: dict[str, Any]) -> None:
    found = assert_parity(
        lambda make: epochs(make(datasets.Shards(shares), batch_size=3, drop_last=True, **way))
    )
    whole = [sum(shares)] if not way else shares
    assert len(found[0]) == sum(share // 3 for share in whole)


@ways_with(
    "shares",
    {
        "2 processes": [(3, 17), (0, 9), (0, 0)],
        "2 processes far ahead": [(3, 17)],
        "2 threads, 1 ahead": [(3, 17), (0, 0)],
    },
)
def test_workers_that_end_early(shares: tuple[int, ...], way: dict[str, Any]) -> None:
    assert_parity(lambda make: list(make(datasets.Shards(shares), batch_size=2, **way)))
    assert_parity(lambda make: list(make(datasets.Shards(shares), batch_size=None, **way)))


@pytest.mark.parametrize("worker_kind", ["process", "thread"])
@pytest.mark.parametrize("shares", [(3, 17), (9, 0)])
def test_in_any_order_all_of_it_comes_once(shares: tuple[int, ...], worker_kind: str) -> None:
    options = {"num_workers": 2, "in_order": False, "worker_kind": worker_kind, "persistent_workers": True}

    def scenario(make: Any) -> Any:
        loader = make(datasets.Shards(shares), batch_size=2, **options)
        return [sorted(batch.tolist() for batch in epoch) for epoch in epochs(loader)]

    assert_parity(scenario)


@ways(ONE_OF_EACH)
def test_without_batches_items_come_one_by_one(way: dict[str, Any]) -> None:
    found = assert_parity(lambda make: epochs(make(datasets.Shards((5, 2)), batch_size=None, **way)))
    assert all(isinstance(item, int) for item in found[0])
    assert_parity(lambda make: list(make(datasets.Shards((5, 2)), batch_size=None, collate_fn=str, **way)))


@ways(ONE_OF_EACH)
def test_an_endless_stream_can_be_left_and_begun_again(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        loader = make(datasets.Stream(datasets.count_for_ever), batch_size=3, **way)
        return [list(itertools.islice(loader, 5)) for _ in range(3)]

    found = assert_parity(scenario)
    assert found[2][0].tolist() == [0, 1, 2]


@ways_named(LOOP, STAYING_PROCESSES)
def test_streams_of_batches_that_the_dataset_makes_itself(way: dict[str, Any]) -> None:
    found = assert_parity(
        lambda make: list(make(datasets.Stream(datasets.own_batches), batch_size=None, **way))
    )
    assert isinstance(found[0]["x"], torch.Tensor)


@ways(ONE_OF_EACH)
def test_a_dataset_that_is_its_own_iterator_is_used_up(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        loader = make(datasets.OwnIterator(7), batch_size=2, **way)
        return [len(batches) for batches in epochs(loader)]

    if way.get("worker_kind") == "thread":
        # What a dataset holds, threads have in common: as many items as it has, and not that many for each.
        loader = ours(datasets.OwnIterator(7), batch_size=None, **way)
        assert [sorted(each) for each in epochs(loader)] == [[0, 1, 2, 3, 4, 5, 6], []]
    else:
        assert_parity(scenario)


@ways_named(LOOP, STAYING_PROCESSES)
def test_chained_streams(way: dict[str, Any]) -> None:
    streams: list[IterableDataset[int]] = [datasets.Shards((4, 3)), datasets.Shards((1, 5))]
    assert_parity(lambda make: epochs(make(ChainDataset(streams), batch_size=3, **way)))


@ways({name: WAYS[name] for name in ("no workers", "2 processes", "2 threads")})
def test_shares_that_are_dealt_out_when_a_worker_starts(way: dict[str, Any]) -> None:
    """The documentation's other way: worker_init_fn changes the worker's copy of the dataset."""
    found = assert_parity(
        lambda make: list(make(datasets.Range(3, 17), batch_size=2, worker_init_fn=datasets.deal_out, **way))
    )
    assert sorted(number for batch in found for number in batch.tolist()) == list(range(3, 17))
