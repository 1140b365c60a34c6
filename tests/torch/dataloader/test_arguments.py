"""Every argument is checked as PyTorch checks it, in its words, and is where code that inspects loaders looks."""

import copy
import inspect
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SettingsError

pytest.importorskip("torch", reason="needs torch")

import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, Subset

from headrace.torch import DataLoader
from tests.torch.dataloader import datasets
from tests.torch.dataloader.parity import (
    WAYS,
    assert_parity,
    assert_same,
    assert_same_error,
    ours,
    stock,
    ways,
)

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

NUMBERS = datasets.Items(datasets.number, 10)
STREAM = datasets.Shards((10,))
SAMPLER = SequentialSampler(NUMBERS)
BATCHES = BatchSampler(SAMPLER, 2, False)

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_workers": -1}, ValueError, "num_workers option should be non-negative"),
    ({"num_workers": "2"}, TypeError, "not supported"),
    ({"num_workers": None}, TypeError, "not supported"),
    ({"timeout": -1}, ValueError, "timeout option should be non-negative"),
    ({"timeout": -0.5, "num_workers": 1}, ValueError, "timeout option should be non-negative"),
    ({"timeout": 3}, AssertionError, "requires timeout == 0"),
    ({"prefetch_factor": 2}, ValueError, "prefetch_factor option could only be specified in multiprocessing"),
    ({"prefetch_factor": -1, "num_workers": 1}, ValueError, "prefetch_factor option should be non-negative"),
    ({"persistent_workers": True}, ValueError, "persistent_workers option needs num_workers > 0"),
    ({"sampler": SAMPLER, "shuffle": True}, ValueError, "sampler option is mutually exclusive with shuffle"),
    ({"batch_sampler": BATCHES, "batch_size": 2}, ValueError, "batch_sampler option is mutually exclusive"),
    (
        {"batch_sampler": BATCHES, "batch_size": None},
        ValueError,
        "batch_sampler option is mutually exclusive",
    ),
    ({"batch_sampler": BATCHES, "shuffle": True}, ValueError, "batch_sampler option is mutually exclusive"),
    (
        {"batch_sampler": BATCHES, "sampler": SAMPLER},
        ValueError,
        "batch_sampler option is mutually exclusive",
    ),
    ({"batch_sampler": BATCHES, "drop_last": True}, ValueError, "batch_sampler option is mutually exclusive"),
    ({"batch_size": None, "drop_last": True}, ValueError, "batch_size=None option disables auto-batching"),
    ({"batch_size": 0}, ValueError, "batch_size should be a positive integer value"),
    ({"batch_size": 2.0}, ValueError, "batch_size should be a positive integer value"),
    ({"batch_size": True}, ValueError, "batch_size should be a positive integer value"),
    ({"batch_size": "4"}, ValueError, "batch_size should be a positive integer value"),
    ({"drop_last": "no"}, ValueError, "drop_last should be a boolean value"),
    ({"dataset": STREAM, "shuffle": True}, ValueError, "expected unspecified shuffle option"),
    ({"dataset": STREAM, "shuffle": "yes"}, ValueError, "but got shuffle=yes"),
    ({"dataset": STREAM, "sampler": SAMPLER}, ValueError, "expected unspecified sampler option"),
    ({"dataset": STREAM, "batch_sampler": BATCHES}, ValueError, "expected unspecified batch_sampler option"),
    ({"dataset": STREAM, "batch_size": None, "drop_last": True}, ValueError, "exclusive with drop_last"),
    ({"dataset": [], "shuffle": True}, ValueError, "num_samples should be a positive integer value"),
    ({"dataset": iter([1]), "shuffle": True}, TypeError, "has no len()"),
    ({"dataset": iter([1])}, TypeError, "has no len()"),
    ({"dataset": {1, 2}, "batch_size": 2}, TypeError, "not subscriptable"),
    ({"dataset": None}, TypeError, "has no len()"),
    ({"multiprocessing_context": "fork"}, ValueError, "can only be used with multi-process loading"),
    ({"multiprocessing_context": "nonsense", "num_workers": 1}, ValueError, "valid start method in ['fork'"),
    ({"multiprocessing_context": 3, "num_workers": 1}, TypeError, "should be a valid context object"),
    ({"multiprocessing_context": multiprocessing, "num_workers": 1}, TypeError, "a valid context object"),
    ({"generator": 5, "shuffle": True}, TypeError, "generator"),
    ({"sampler": 5}, TypeError, "not iterable"),
    ({"batch_sampler": 5}, TypeError, "not iterable"),
    ({"collate_fn": 5}, TypeError, "not callable"),
    ({"worker_init_fn": 5, "num_workers": 1}, TypeError, "Caught TypeError in DataLoader worker process 0"),
    ({"nonsense": 5}, TypeError, "got an unexpected keyword argument 'nonsense'"),
]


@pytest.mark.parametrize(
    ("options", "kind", "says"), WRONG, ids=[" ".join(options) for options, _, _ in WRONG]
)
def test_what_makes_no_sense_is_refused_in_the_same_words(
    options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    assert_same_error(lambda make: list(make(**{"dataset": NUMBERS, **options})), kind, says)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of PyTorch's iterator
def test_nothing_ahead_is_refused_when_an_iteration_begins() -> None:
    options = {"prefetch_factor": 0, "num_workers": 1}
    says = "prefetch_factor must be greater than 0"
    assert_same_error(lambda make: list(make(NUMBERS, **options)), AssertionError, says)


def test_positional_arguments_are_counted_the_same() -> None:
    assert_same_error(lambda make: make(), TypeError, "missing 1 required positional argument: 'dataset'")
    given = [NUMBERS, 4, None, None, None, 0, None, False, True, 0, None, None, None]
    assert_parity(lambda make: list(make(*given)))
    assert_same_error(lambda make: make(*given, 2), TypeError, "takes from 2 to 14 positional arguments")


def test_the_signature_is_pytorchs_with_our_own_at_the_end() -> None:
    wanted = [*inspect.signature(torch.utils.data.DataLoader).parameters.values()]
    found = [*inspect.signature(DataLoader).parameters.values()]
    assert [(p.name, p.kind, p.default) for p in found[: len(wanted)]] == [
        (p.name, p.kind, p.default) for p in wanted
    ]
    more = {p.name: (p.kind, p.default) for p in found[len(wanted) :]}
    only = inspect.Parameter.KEYWORD_ONLY
    ours_alone = {
        "snapshot_every_n_steps": (only, 1),
        "worker_kind": (only, "process"),
        "workers": (only, None),
    }
    assert more == ours_alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker_kind": "fiber"}, "worker_kind='fiber': must be 'process' or 'thread'"),
        ({"workers": "fiber"}, "workers='fiber': must be 'process' or 'thread'"),
        ({"workers": 2}, "workers=2: must be 'process' or 'thread'; num_workers says how many"),
        ({"workers": "process", "worker_kind": "thread"}, "give only worker_kind"),
        ({"worker_kind": None}, "worker_kind=None: must be"),
        ({"snapshot_every_n_steps": -1}, "snapshot_every_n_steps=-1: must be at least 0"),
        (
            {"worker_kind": "thread", "num_workers": 1, "multiprocessing_context": "spawn"},
            "has no effect on threads",
        ),
    ],
)
def test_our_own_arguments_are_checked_too(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ours(NUMBERS, **options)


def test_it_is_a_dataloader() -> None:
    assert issubclass(DataLoader, torch.utils.data.DataLoader)
    loader = ours(NUMBERS)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert DataLoader.__name__ == "DataLoader"
    annotated: DataLoader[int] = DataLoader[int](NUMBERS, batch_size=5)
    assert [batch.tolist() for batch in annotated] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert DataLoader[int].__origin__ is DataLoader  # type: ignore[attr-defined]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_size": 4, "shuffle": True, "drop_last": True, "generator": torch.Generator()},
    {"batch_size": None},
    {"batch_sampler": BATCHES},
    {"sampler": SAMPLER, "num_workers": 2, "timeout": 3.5, "in_order": False},
    {"num_workers": 1, "prefetch_factor": 7, "persistent_workers": True, "worker_init_fn": print},
    {"num_workers": 1, "multiprocessing_context": "spawn", "collate_fn": datasets.total},
    {"dataset": STREAM, "batch_size": 3, "pin_memory": True, "pin_memory_device": "cuda"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[", ".join(options) or "none" for options in OPTIONS])
def test_attributes_have_the_same_names_and_values(options: dict[str, Any]) -> None:
    def scenario(make: Any) -> dict[str, Any]:
        loader = make(**{"dataset": NUMBERS, **options})
        names = {name for name in dir(torch.utils.data.DataLoader) if not name.startswith("__")}
        names |= set(vars(stock(NUMBERS)))
        given = {name: getattr(loader, name) for name in sorted(names)}
        samplers = {name: type(given.pop(name)) for name in ("sampler", "batch_sampler", "_index_sampler")}
        methods = {name for name, value in given.items() if inspect.ismethod(value)}
        return {**{name: given[name] for name in given if name not in methods}, **samplers}

    found = assert_parity(scenario)
    for name, value in options.items():
        if name not in ("shuffle", "multiprocessing_context", "sampler", "batch_sampler"):
            assert found[name] is value


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_a_loader_was_made_with_cannot_be_set_afterwards(name: str) -> None:
    def scenario(make: Any) -> None:
        setattr(make(NUMBERS), name, None)

    says = f"{name} attribute should not be set after DataLoader is initialized"
    assert_same_error(scenario, ValueError, says)


def test_the_rest_can_be_set_and_counts_from_then_on() -> None:
    def scenario(make: Any) -> Any:
        loader = make(NUMBERS, batch_size=4, shuffle=True)
        first = list(loader)
        loader.collate_fn, loader.generator = datasets.total, torch.Generator().manual_seed(3)
        second = list(loader)
        loader.num_workers, loader.prefetch_factor = 2, 1
        loader.multiprocessing_context = "fork"
        loader.in_order, loader.timeout = True, 60
        return first, second, list(loader), loader.multiprocessing_context.get_start_method()

    assert_parity(scenario)
    assert_same_error(
        lambda make: setattr(make(NUMBERS), "multiprocessing_context", "fork"), ValueError, "can only be used"
    )


@ways({name: WAYS[name] for name in ("no workers", "2 processes", "2 threads")})
def test_a_loader_that_was_used_can_be_copied_and_pickled(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        loader = make(NUMBERS, batch_size=4, shuffle=True, **way)
        first = list(loader)
        begun = iter(loader)
        next(begun)
        others = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
        return first, [list(other) for other in others], list(begun), type(others[2]) is type(loader)

    assert_parity(scenario)


def test_an_iterator_cannot_be_pickled() -> None:
    def scenario(make: Any) -> Any:
        with pytest.raises(NotImplementedError) as raised:
            pickle.dumps(iter(make(NUMBERS)))
        return raised.value.args[0]

    assert assert_parity(scenario) == "{} cannot be pickled"


def test_more_processes_than_cores_are_warned_of_and_more_threads_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    says = "This DataLoader will create 2 worker processes in total. Our suggested max number of worker"
    assert_parity(lambda make: list(make(NUMBERS, num_workers=2)), warns=says)
    assert_parity(lambda make: list(make(NUMBERS, num_workers=1)))
    # Warnings are errors here.
    assert len(list(ours(NUMBERS, num_workers=3, worker_kind="thread"))) == 10


@ways({name: WAYS[name] for name in ("no workers", "2 processes that stay", "2 threads")})
def test_pinning_without_an_accelerator_is_warned_of_and_does_nothing(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

    def scenario(make: Any) -> Any:
        loader = make(NUMBERS, batch_size=4, pin_memory=True, collate_fn=datasets.Carrier, **way)
        return [[(batch.values, batch.pinned_by) for batch in loader] for _ in range(2)]

    found = assert_parity(scenario, warns="no accelerator is found")
    assert_same(found[0][0], (torch.arange(4), None))


@pytest.fixture
def fake_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one: only batches that know how to pin themselves can be pinned."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)


@pytest.mark.usefixtures("fake_accelerator")
def test_a_device_to_pin_for_is_warned_of() -> None:
    def scenario(make: Any) -> Any:
        options = {"pin_memory": True, "pin_memory_device": "cuda", "collate_fn": datasets.Carrier}
        return list(make(NUMBERS, **options))

    assert_parity(scenario, warns="pin_memory_device is deprecated")


@ways({name: WAYS[name] for name in ("no workers", "2 processes that stay", "2 threads")})
@pytest.mark.usefixtures("fake_accelerator")
def test_a_batch_that_knows_how_is_asked_to_pin_itself(way: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        loader = make(NUMBERS, batch_size=4, pin_memory=True, collate_fn=datasets.Carrier, **way)
        return [[(batch.values, batch.pinned_by == "MainThread") for batch in loader] for _ in range(2)]

    found = assert_parity(scenario)
    assert [pinned_here for _, pinned_here in found[0]] == [not way] * 3


def test_parts_of_datasets_are_datasets() -> None:
    assert_parity(lambda make: list(make(Subset(NUMBERS, [3, 1, 4, 1, 5]), batch_size=2, shuffle=True)))
    assert_parity(lambda make: list(make([3, 1, 4], sampler=RandomSampler(range(3), True, 7))))


@pytest.mark.parametrize("place", ["s3://bucket/data", "data", Path("data")])
def test_the_place_of_a_dataset_is_not_a_dataset(place: Any) -> None:
    """PyTorch would take the characters of a text for its samples."""
    with pytest.raises(
        SettingsError, match=rf"dataset='{place}': must be a dataset.*headrace\.open\('{place}'\)"
    ):
        DataLoader(place, batch_size=2)
