"""Iterations of a loader: several at once, one inside another, in pipes and profiles, as with PyTorch's."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

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
