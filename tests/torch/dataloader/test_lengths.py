"""How long a loader says it is, and the warning when an iterable has more than it said."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

from torch.utils.data import BatchSampler, ChainDataset, RandomSampler, SequentialSampler

from tests.torch.dataloader import datasets, samplers
from tests.torch.dataloader.parity import (
    LOOP,
    ONE_OF_EACH,
    STAYING_PROCESSES,
    STAYING_THREADS,
    WAYS,
    assert_parity,
    assert_same_error,
    ways,
    ways_with,
)

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

TEN = datasets.Items(datasets.number, 10)
STREAM = datasets.Shards((7, 3))

LENGTHS: list[tuple[dict[str, Any], int]] = [
    ({}, 10),
    ({"batch_size": 4}, 3),
    ({"batch_size": 4, "drop_last": True}, 2),
    ({"batch_size": 5, "drop_last": True}, 2),
    ({"batch_size": 11}, 1),
    ({"batch_size": 11, "drop_last": True}, 0),
    ({"batch_size": None}, 10),
    ({"batch_size": 4, "shuffle": True}, 3),
    ({"batch_size": 4, "sampler": RandomSampler(TEN, replacement=True, num_samples=101)}, 26),
    ({"sampler": [3, 1], "batch_size": None}, 2),
    ({"batch_sampler": BatchSampler(SequentialSampler(TEN), 3, True)}, 3),
    ({"batch_sampler": [[1], [2, 3]]}, 2),
    ({"batch_sampler": samplers.DrawnBatches(10)}, 4),
    ({"dataset": []}, 0),
    ({"dataset": STREAM}, 10),
    ({"dataset": STREAM, "batch_size": 4}, 3),
    ({"dataset": STREAM, "batch_size": 4, "drop_last": True}, 2),
    ({"dataset": STREAM, "batch_size": None}, 10),
    ({"dataset": ChainDataset([STREAM, STREAM]), "batch_size": 4}, 5),
]


@pytest.mark.parametrize(
    ("options", "length"), LENGTHS, ids=[" ".join(options) or "none" for options, _ in LENGTHS]
)
def test_lengths(options: dict[str, Any], length: int) -> None:
    def scenario(make: Any) -> Any:
        loader = make(**{"dataset": TEN, **options})
        return len(loader), len(list(loader))

    assert assert_parity(scenario)[0] == length


def test_lengths_do_not_depend_on_workers() -> None:
    for way in WAYS.values():
        # A loader that only says how long it is starts none.
        assert assert_parity(lambda make, way=way: len(make(STREAM, batch_size=4, **way))) == 3


def test_a_length_that_changes_is_asked_for_again() -> None:
    def scenario(make: Any) -> Any:
        items: list[int] = [1, 2, 3]
        loader = make(items, batch_size=2)
        before = len(loader), list(loader)
        items.extend([4, 5])
        return before, len(loader), list(loader)

    assert assert_parity(scenario)[1] == 3


def test_what_has_no_length() -> None:
    assert_same_error(
        lambda make: len(make(datasets.Stream(datasets.count_to_ten))), TypeError, "without a length"
    )
    assert_same_error(lambda make: len(make(datasets.Range(1, 3))), TypeError, "has no len()")
    assert_same_error(lambda make: len(make(TEN, sampler=iter([1]))), TypeError, "has no len()")
    assert_same_error(lambda make: len(make(TEN, batch_sampler=iter([[1]]))), TypeError, "has no len()")
    assert_parity(lambda make: list(make(TEN, sampler=iter([1, 2, 3]), batch_size=2)))


# The warning


def short(length: int) -> Any:
    """Ten numbers, or ten for each worker, of which it says there are `length`."""
    return datasets.Stream(datasets.count_to_ten, length)


@ways(ONE_OF_EACH)
def test_more_than_was_said_is_warned_of_with_every_batch(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        loader = make(short(7), **way)
        return len(loader), len(list(loader)), len(list(loader))

    says = "was reported to be 7(when accessing len(dataloader)), but"
    workers = way.get("num_workers", 0)
    assert assert_parity(scenario, warns=says) == (7, 10 * max(1, workers), 10 * max(1, workers))


@ways({name: WAYS[name] for name in ("2 processes", "2 threads")})
def test_with_workers_the_warning_names_the_likely_cause(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        loader = make(short(10), batch_size=None, **way)
        return len(loader), list(loader)

    assert_parity(scenario, warns="not properly configuring the IterableDataset replica at each worker")


@ways_with("length", {LOOP: [0, 3, 10], STAYING_PROCESSES: [3, 10], STAYING_THREADS: [0]})
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_count_as_pytorch_counts_them(length: int, drop_last: bool, way: dict[str, Any]) -> None:
    """It compares batches with the dataset's length: what it warns of, we warn of."""

    def scenario(make: Any) -> Any:
        loader = make(short(length), batch_size=3, drop_last=drop_last, **way)
        return len(loader), list(loader)

    batches = 3 if drop_last else 4
    warned = length < batches * max(1, way.get("num_workers", 0))
    assert_parity(scenario, warns=f"reported to be {length}(" if warned else None)


@ways(ONE_OF_EACH)
def test_nobody_is_warned_who_has_not_asked(way: dict[str, Any]) -> None:
    assert_parity(lambda make: list(make(short(2), **way)))


@ways(ONE_OF_EACH)
def test_to_ask_in_the_middle_of_an_epoch_is_for_the_next(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        loader = make(short(2), **way)
        iterator = iter(loader)
        first = next(iterator)
        return first, len(loader), list(iterator), list(loader)

    assert_parity(scenario, warns="was reported to be 2(")


@ways(ONE_OF_EACH)
def test_a_share_for_each_worker_is_as_long_as_was_said(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        loader = make(STREAM, batch_size=None, **way)
        return len(loader), [len(list(loader)) for _ in range(2)]

    assert assert_parity(scenario) == (10, [10, 10])
