"""Samples and batches of every kind: collated as PyTorch does it, and the same after the way from a worker."""

import warnings
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from tests.torch.dataloader import datasets
from tests.torch.dataloader.contents import BATCHES, LARGE, SAMPLES, SMALL
from tests.torch.dataloader.parity import ONE_OF_EACH, assert_parity, assert_same, ours, steps, stock, ways

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

Index = tuple[str, int, int]


def make_sample(index: Index) -> Any:
    name, number, size = index
    return SAMPLES[name](number, size)


def make_batch(index: Index) -> Any:
    name, _, size = index
    return BATCHES[name](size)


class Oracle:
    """All contents in one run of each kind of loader: starting workers for each of them would take minutes."""

    def __init__(self) -> None:
        self._runs: dict[Any, dict[Any, Any]] = {}

    def batch_of(self, make: Any, way: dict[str, Any], collated: bool, name: str, size: int) -> Any:
        if make is stock:
            way = {option: value for option, value in way.items() if option != "worker_kind"}
        key = (make, str(way), collated)
        if key not in self._runs:
            self._runs[key] = self._run(make, way, collated)
        return self._runs[key][name, size]

    def _run(self, make: Any, way: dict[str, Any], collated: bool) -> dict[Any, Any]:
        names = SAMPLES if collated else BATCHES
        wanted = [(name, size) for size in (SMALL, LARGE) for name in names]
        if collated:
            items = datasets.Items(make_sample, 1)
            loader = make(
                items, batch_sampler=[[(name, n, size) for n in range(3)] for name, size in wanted], **way
            )
        else:
            batches = datasets.Items(make_batch, 1)
            sampler = [(name, 0, size) for name, size in wanted]
            loader = make(batches, batch_size=None, sampler=sampler, collate_fn=datasets.as_it_came, **way)
        with warnings.catch_warnings():
            # PyTorch warns of what is rare once in a process, when it is made and when it is unpickled.
            warnings.simplefilter("ignore")
            return dict(zip(wanted, steps(iter(loader), len(wanted)), strict=True))


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


WRONG_WITH_PYTORCH = ("conjugated", "negated")
"""Its workers cannot collate such views, and send what they are views of: ours must be as without workers."""
EVERY = [(name, way, size) for name, way in ONE_OF_EACH.items() for size in (SMALL, LARGE)]


@pytest.mark.parametrize("name", SAMPLES)
def test_collated(name: str, oracle: Oracle) -> None:
    for title, way, size in EVERY:
        wanted = oracle.batch_of(stock, {} if name in WRONG_WITH_PYTORCH else way, True, name, size)
        assert_same(oracle.batch_of(ours, way, True, name, size), wanted, f"{title}, size {size}: batch")


# Not a column of a table: of what is a small part of something larger, ours sends that part alone (see `parcels.py`).
@pytest.mark.parametrize("name", [name for name in BATCHES if name != "column"])
def test_as_they_are(name: str, oracle: Oracle) -> None:
    for title, way, size in EVERY:
        # Threads send nothing: what they make is handed out as it is.
        sent = bool(way) and way.get("worker_kind") != "thread"
        broken = name in WRONG_WITH_PYTORCH and sent
        wanted = oracle.batch_of(stock, way if sent and not broken else {}, False, name, size)
        found = oracle.batch_of(ours, way, False, name, size)
        assert_same(found, wanted.clone() if broken else wanted, f"{title}, size {size}: batch")


@pytest.mark.parametrize("size", [8, LARGE])
def test_tensors_in_one_memory_still_are(size: int) -> None:
    """What is written to one of them is in the others."""

    def scenario(make: Any) -> Any:
        batches = datasets.Items(make_batch, 1)
        loader = make(
            batches,
            batch_size=None,
            sampler=[("shared", 0, size)],
            collate_fn=datasets.as_it_came,
            num_workers=1,
        )
        (batch,) = loader
        batch[0][size // 8] = 7.0
        return batch

    found = assert_parity(scenario)
    assert sum(7.0 in tensor for tensor in found) >= 2


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_is_in_a_batch_twice_is_one_thing(size: int) -> None:
    def scenario(make: Any) -> Any:
        sampler = [("twice", 0, size)]
        loader = make(datasets.Items(make_batch, 1), batch_size=None, sampler=sampler, num_workers=1)
        loader.collate_fn = datasets.as_it_came
        (batch,) = loader
        return [one is other for one, other in batch.values()]

    assert assert_parity(scenario) == [True, True, True]


# What PyTorch refuses and ours does not: dataclasses


@ways(ONE_OF_EACH)
def test_dataclasses_are_collated_field_by_field(way: dict[str, Any]) -> None:
    found = list(ours(datasets.Items(datasets.outer, 5), batch_size=3, **way))
    assert [type(batch) for batch in found] == [datasets.Outer, datasets.Outer]
    assert_same(found[0].weight, torch.tensor([0, 0.5, 1], dtype=torch.float64))
    assert_same(found[0].derived, torch.tensor([7, 7, 7]))
    assert type(found[1].inner) is datasets.Sample
    assert_same(found[1].inner.image, torch.tensor([[3, 3], [4, 4]]))
    assert_same(found[1].inner.label, torch.tensor([3, 4]))
    assert found[1].inner.names == [("a3", "a4"), ("b3", "b4")]


@ways(ONE_OF_EACH)
def test_dataclasses_inside_other_samples(way: dict[str, Any]) -> None:
    items = datasets.Items(datasets.in_a_dict, 4)
    (batch,) = ours(items, batch_size=4, **way)
    assert_same(batch["sample"].label, torch.arange(4))
    assert_same(batch["pair"][1].image, torch.arange(4).reshape(4, 1).expand(4, 2).contiguous())
    found = list(ours(items, batch_size=None, **way))
    assert [type(each["sample"]) for each in found] == [datasets.Sample] * 4


def test_a_dataclass_with_a_field_that_cannot_be_collated_is_an_error() -> None:
    items = datasets.Items(datasets.without_a_label, 4)
    with pytest.raises(TypeError, match="default_collate: batch must contain .*; found <class 'NoneType'>"):
        list(ours(items, batch_size=2))


# Extending default_collate


@ways(ONE_OF_EACH)
def test_types_that_the_user_has_taught_to_default_collate(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_collate_fn_map, datasets.Carrier, datasets.collate_carriers)
    monkeypatch.setitem(default_collate_fn_map, datasets.Sample, datasets.collate_samples)

    def scenario(make: Any) -> Any:
        carriers = list(make(datasets.Items(datasets.carried, 5), batch_size=2, **way))
        return carriers, list(make(datasets.Items(datasets.sample, 5), batch_size=2, **way))

    assert assert_parity(scenario) == (
        ["2 carriers", "2 carriers", "1 carriers"],
        ["2 samples"] * 2 + ["1 samples"],
    )


@ways(ONE_OF_EACH)
def test_a_function_of_the_users_that_calls_default_collate(way: dict[str, Any]) -> None:
    items = datasets.Items(datasets.large, 9)
    found = assert_parity(lambda make: list(make(items, batch_size=3, collate_fn=datasets.with_sizes, **way)))
    assert found[2]["sizes"] == [20_000] * 3


@ways(ONE_OF_EACH)
def test_a_function_of_the_users_for_tensors(way: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, datasets.concatenated)
    found = assert_parity(lambda make: list(make(datasets.Items(datasets.uneven, 9), batch_size=3, **way)))
    assert found[0].shape == (1 + 3001 + 6001,)
