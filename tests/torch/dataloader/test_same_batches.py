"""Map-style datasets: the same batches as PyTorch's, whichever sampler says what comes, and whoever makes them."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.torch.dataloader import datasets, samplers
from tests.torch.dataloader.parity import (
    LOOP,
    ONE_OF_EACH,
    STAYING_PROCESSES,
    STAYING_THREADS,
    WAYS,
    assert_parity,
    assert_same,
    epochs,
    ours,
    outcome_of,
    stock,
    ways,
    ways_named,
    ways_with,
)

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

PAIRS = datasets.Items(datasets.pair, 23)
NUMBERS = datasets.Items(datasets.number, 23)


def flat(batches: list[Any]) -> list[int]:
    return [int(number) for batch in batches for number in batch]


@ways(WAYS)
def test_epochs_in_order(way: dict[str, Any]) -> None:
    found = assert_parity(lambda make: epochs(make(PAIRS, batch_size=4, **way)))
    assert [len(batches) for batches in found] == [6, 6]
    assert found[1][5][1]["name"] == ["item 20", "item 21", "item 22"]


@ways_named(LOOP, "2 processes", STAYING_PROCESSES, STAYING_THREADS)
def test_shuffled_epochs_with_the_generator_of_the_process(way: dict[str, Any]) -> None:
    first, second = assert_parity(lambda make: epochs(make(NUMBERS, batch_size=4, shuffle=True, **way)))
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(23))
    assert flat(first) != flat(second)


@ways_named(LOOP, STAYING_PROCESSES)
def test_shuffled_epochs_with_a_generator(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        generator = torch.Generator().manual_seed(11)
        loader = make(PAIRS, batch_size=4, shuffle=True, drop_last=True, generator=generator, **way)
        return epochs(loader, 3), generator.get_state()

    (batches, _) = assert_parity(scenario)
    assert [len(epoch) for epoch in batches] == [5, 5, 5]


GENERATOR = torch.Generator()
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "random": lambda: {"sampler": RandomSampler(NUMBERS)},
    "with replacement": lambda: {"sampler": RandomSampler(NUMBERS, replacement=True, num_samples=101)},
    "several rounds": lambda: {"sampler": RandomSampler(NUMBERS, num_samples=60, generator=GENERATOR)},
    "weighted": lambda: {"sampler": WeightedRandomSampler(torch.arange(23.0) + 1, 40)},
    "subset": lambda: {"sampler": SubsetRandomSampler([2, 3, 5, 7, 11, 13, 17, 19], generator=GENERATOR)},
    "backwards": lambda: {"sampler": samplers.Backwards(23)},
    "drawn at once": lambda: {"sampler": samplers.Drawn(23)},
    "list": lambda: {"sampler": [3, 1, 4, 1, 5, 9, 2, 6]},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(NUMBERS), 5, True)},
    "uneven batches": lambda: {"batch_sampler": [[1], [2, 3], [], [4, 5, 6], [7] * 9]},
    "array of batches": lambda: {"batch_sampler": np.arange(12).reshape(4, 3)},
    "tensors": lambda: {"batch_sampler": torch.arange(12).reshape(4, 3)},
    "one by one": lambda: {"sampler": RandomSampler(NUMBERS), "batch_size": None},
}


# Who makes the batches, a sampler does not know; but its indices are sent to processes.
@ways_with(
    "name", {LOOP: SAMPLERS, STAYING_PROCESSES: SAMPLERS, STAYING_THREADS: ["random", "uneven batches"]}
)
def test_samplers(name: str, way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        GENERATOR.manual_seed(3)
        options = {**SAMPLERS[name](), **way}
        if "batch_sampler" not in options:
            options.setdefault("batch_size", 4)
        return epochs(make(NUMBERS, collate_fn=datasets.as_it_came, **options), 3), GENERATOR.get_state()

    assert_parity(scenario)


@ways({name: WAYS[name] for name in ("no workers", "2 processes that stay", "2 threads")})
@pytest.mark.parametrize("kind", ["batches drawn at once", "counts its epochs", "counts, one by one"])
def test_samplers_that_do_something_when_an_iteration_begins(kind: str, way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        options: dict[str, Any] = {
            "batches drawn at once": {"batch_sampler": samplers.DrawnBatches(23)},
            "counts its epochs": {"batch_sampler": BatchSampler(samplers.ByEpoch(23), 4, False)},
            "counts, one by one": {"sampler": samplers.ByEpoch(23), "batch_size": None},
        }[kind]
        return epochs(make(NUMBERS, **options, **way))

    assert_parity(scenario)


@pytest.mark.parametrize("kind", [samplers.DrawnBatches, samplers.ByEpoch])
def test_a_run_that_goes_on_begins_its_sampler_as_the_first_did(kind: Any) -> None:
    """With workers that is twice, as with PyTorch, whatever it goes on with."""

    def begin(way: dict[str, Any]) -> Any:
        sampler = {"batch_sampler" if kind is samplers.DrawnBatches else "sampler": kind(23)}
        return ours(NUMBERS, collate_fn=datasets.as_it_came, **sampler, **way)

    for first_way in ({"num_workers": 2}, {}):
        torch.manual_seed(1)
        first = begin(first_way)
        iterator = iter(first)
        handed, state = [next(iterator) for _ in range(2)], first.state_dict()
        wanted = list(iterator)
        for way in ({"num_workers": 1, "worker_kind": "thread"}, {}, {"num_workers": 2}):
            torch.manual_seed(2)
            resumed = begin(way)
            resumed.load_state_dict(state)
            iterator = iter(resumed)
            handed.append(next(iterator))
            state = resumed.state_dict()
            assert [handed[-1], *iterator] == wanted
            wanted = wanted[1:]


@ways_named(LOOP, STAYING_PROCESSES)
def test_ranks_of_a_distributed_sampler(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        found: list[Any] = []
        for rank in range(2):
            sampler: Any = DistributedSampler(NUMBERS, num_replicas=2, rank=rank, seed=4)
            loader = make(NUMBERS, batch_size=4, sampler=sampler, **way)
            for epoch in (0, 1, 1):
                sampler.set_epoch(epoch)
                found.append(flat(loader))
        return found

    found = assert_parity(scenario)
    assert set(found[0]) | set(found[3]) == set(range(23))
    assert found[0] != found[1] == found[2]


@ways(ONE_OF_EACH)
def test_an_epoch_that_was_left_early_is_followed_by_a_whole_one(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        sampler = RandomSampler(NUMBERS, replacement=True, num_samples=200)
        loader = make(NUMBERS, batch_size=4, sampler=sampler, **way)
        return (
            list(itertools.islice(loader, 3)),
            list(loader),
            list(itertools.islice(loader, 1)),
            list(loader),
        )

    assert [len(part) for part in assert_parity(scenario)] == [3, 50, 1, 50]


@ways(
    {name: WAYS[name] for name in ("no workers", "1 process", "2 processes far ahead", "2 threads that stay")}
)
def test_a_sampler_is_asked_no_further_ahead(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        sampler = samplers.Watched(range(30))
        loader = make(range(30), batch_size=2, sampler=sampler, **way)
        asked = [sampler.asked]
        iterator = iter(loader)
        asked.append(sampler.asked)
        for _ in iterator:
            asked.append(sampler.asked)
        return asked

    assert assert_parity(scenario)[-1] == 30


@pytest.mark.parametrize("worker_kind", ["process", "thread"])
@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_in_any_order_every_batch_comes_once(worker_kind: str, prefetch_factor: int) -> None:
    options = {
        "num_workers": 2,
        "prefetch_factor": prefetch_factor,
        "in_order": False,
        "worker_kind": worker_kind,
    }

    def scenario(make: Any) -> Any:
        loader = make(NUMBERS, batch_size=2, shuffle=True, persistent_workers=True, **options)
        return [sorted(batch.tolist() for batch in epoch) for epoch in epochs(loader)]

    assert_parity(scenario)


def test_in_any_order_a_slow_batch_holds_up_no_other() -> None:
    slow = datasets.WaitsForOthers(12)
    options = {"num_workers": 2, "prefetch_factor": 1, "in_order": False, "worker_kind": "thread"}
    loader = ours(slow, batch_size=None, **options)
    found = []
    for index in loader:
        found.append(index)
        slow.seen(index)
    assert found[-1] == 0
    assert sorted(found) == list(range(12))


@ways_named(LOOP, "2 processes", STAYING_PROCESSES, "2 threads", STAYING_THREADS)
def test_persistent_workers_keep_their_dataset_and_others_begin_anew(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        counting = datasets.Counting(datasets.number, 12)
        loader = make(counting, batch_size=2, collate_fn=datasets.as_it_came, **way)
        found = epochs(loader)
        copies = [{copy for batch in epoch for _, _, copy in batch} for epoch in found]
        asked = [sorted(count for batch in epoch for _, count, _ in batch) for epoch in found]
        return asked, copies[0] == copies[1], [len(each) for each in copies], counting.asked

    _, same, copies, in_the_main_process = assert_parity(scenario)
    assert same is (not way or way.get("persistent_workers", False))
    assert copies == [max(1, way.get("num_workers", 0))] * 2
    assert in_the_main_process == (0 if way else 24)


@ways(ONE_OF_EACH)
def test_many_at_once(way: dict[str, Any]) -> None:
    for kind in (datasets.AllAtOnce, datasets.NoneAtOnce):
        found = assert_parity(
            lambda make, kind=kind: list(make(kind(datasets.pair, 10), batch_size=4, **way))
        )
    assert len(found[0]) == 2
    found = assert_parity(
        lambda make: list(make(datasets.AllAtOnce(datasets.number, 10), batch_size=4, **way))
    )
    assert_same(found[2], [torch.tensor([8, 9]), torch.tensor([2, 2])])


FUNCTIONS = [None, datasets.as_it_came, datasets.total, datasets.first_of, len]


@ways_with(
    "collate_fn", {LOOP: [datasets.total], STAYING_PROCESSES: FUNCTIONS, STAYING_THREADS: [datasets.total]}
)
def test_a_function_of_the_users_makes_the_batch(collate_fn: Any, way: dict[str, Any]) -> None:
    assert_parity(lambda make: list(make(NUMBERS, batch_size=5, collate_fn=collate_fn, **way)))


@ways(ONE_OF_EACH)
def test_without_batches_samples_come_one_by_one(way: dict[str, Any]) -> None:
    found = assert_parity(lambda make: epochs(make(PAIRS, batch_size=None, shuffle=True, **way)))
    assert found[0][0][0].shape == (2,)
    assert_parity(lambda make: list(make(PAIRS, batch_size=None, collate_fn=str, **way)))


@ways(ONE_OF_EACH)
@pytest.mark.parametrize("make_item", [datasets.large, datasets.uneven])
def test_large_batches_stay_what_they_were_however_long_they_are_held(
    make_item: Any, way: dict[str, Any]
) -> None:
    batch_size = 1 if make_item is datasets.uneven else 3

    def scenario(make: Any) -> Any:
        loader = make(datasets.Items(make_item, 24), batch_size=batch_size, **way)
        kept = list(loader)
        for number, batch in enumerate(loader):
            # To memory that is used again, nothing of this may show.
            batch.mul_(-1)
            if number % 3 == 0:
                kept.append(batch)
        return kept, list(loader)

    assert_parity(scenario)


@ways_named(LOOP, STAYING_PROCESSES)
def test_pytorchs_own_datasets(way: dict[str, Any]) -> None:
    tensors = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    joined = ConcatDataset([Subset(tensors, [9, 8, 7]), tensors])
    assert_parity(lambda make: list(make(joined, batch_size=4, shuffle=True, **way)))
    assert_parity(lambda make: list(make([(1, 2.5), (3, 4.5)], batch_size=2, **way)))
    assert_parity(lambda make: list(make({0: "a", 1: "b"}, batch_size=2, **way)))
    assert_parity(lambda make: list(make([], batch_size=2, sampler=SequentialSampler([]), **way)))


@ways_named(LOOP, STAYING_PROCESSES)
def test_indices_may_be_anything_that_the_dataset_takes(way: dict[str, Any]) -> None:
    words = {"a": 1, ("b", 2): 2, None: 3, 2.5: 4}
    assert_parity(lambda make: list(make(words, batch_size=3, sampler=list(words), **way)))
    assert_parity(lambda make: list(make(NUMBERS, sampler=torch.tensor([3, 1, 2]), batch_size=None, **way)))
    cuts = [slice(0, 3), np.array([5, 1]), torch.tensor([True] + [False] * 19)]
    table = torch.arange(40).reshape(20, 2)
    assert_parity(lambda make: list(make(table, sampler=cuts, batch_size=None, **way)))


def test_the_oracle_tells_loaders_apart() -> None:
    """That the comparison can fail: another order, another type and another draw are seen."""

    def scenario(make: Any) -> Any:
        return list(make(NUMBERS, batch_size=4, shuffle=make is ours))

    wanted, found = outcome_of(scenario, stock), outcome_of(scenario, ours)
    assert found.drawn_next != wanted.drawn_next
    with pytest.raises(AssertionError):
        assert_same(found.value, wanted.value)
    for one, other in [([1], (1,)), (1, True), (torch.ones(2), torch.ones(2).double()), ({"a": 1}, {"a": 2})]:
        with pytest.raises(AssertionError):
            assert_same(one, other)
