"""A DataLoader goes on exactly where a state says, however its batches come about."""

import copy
import io
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingsError, StateError

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from penstock.torch import DataLoader
from tests.torch.dataloader import state_datasets as data

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

LENGTH = 23
WAYS: dict[str, dict[str, Any]] = {
    "in the loop": {},
    "processes": {"num_workers": 2},
    "processes that stay": {"num_workers": 2, "persistent_workers": True, "snapshot_every_n_steps": 2},
    "one thread": {"num_workers": 1, "workers": "thread"},
    "threads": {"num_workers": 3, "workers": "thread"},
    "snapshots now and then": {"num_workers": 2, "workers": "thread", "snapshot_every_n_steps": 3},
    "no snapshots": {"num_workers": 2, "workers": "thread", "snapshot_every_n_steps": 0},
    "threads that stay": {"num_workers": 2, "workers": "thread", "persistent_workers": True},
    "far ahead": {"num_workers": 2, "workers": "thread", "prefetch_factor": 7, "snapshot_every_n_steps": 2},
}


def _plain(batch: Any) -> Any:
    if isinstance(batch, list | tuple):
        return [_plain(part) for part in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def _numbers(batches: Any) -> list[Any]:
    return [_plain(batch) for batch in batches]


def _weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + number for number in range(LENGTH)], 30)


MAKE: dict[str, Callable[..., DataLoader[Any]]] = {
    "in order": lambda **way: DataLoader(data.Numbers(LENGTH), batch_size=3, **way),
    "drop last": lambda **way: DataLoader(data.Numbers(LENGTH), batch_size=4, drop_last=True, **way),
    "one by one": lambda **way: DataLoader(data.Numbers(LENGTH), batch_size=None, **way),
    "shuffled": lambda **way: DataLoader(data.Numbers(LENGTH), batch_size=3, shuffle=True, **way),
    "generator": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(4), **way
    ),
    "own generator": lambda **way: DataLoader(
        data.Numbers(LENGTH),
        batch_size=3,
        sampler=RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(5)),
        **way,
    ),
    "replacement": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=RandomSampler(range(LENGTH), True, 40), **way
    ),
    "weighted": lambda **way: DataLoader(data.Numbers(LENGTH), batch_size=3, sampler=_weighted(), **way),
    "random": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.Careless(LENGTH, "random"), **way
    ),
    "numpy": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.Careless(LENGTH, "numpy"), **way
    ),
    "torch": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.Careless(LENGTH, "torch"), **way
    ),
    "own generators": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.OwnGenerators(LENGTH), **way
    ),
    "sampler with state": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.Placed(LENGTH), **way
    ),
    "sampler whose iterator has state": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.PlacedCursor(LENGTH), **way
    ),
    "batch sampler": lambda **way: DataLoader(data.Numbers(LENGTH), batch_sampler=data.Groups(LENGTH), **way),
    "dataset with state": lambda **way: DataLoader(data.Counting(LENGTH), batch_size=2, shuffle=True, **way),
    "iterable": lambda **way: DataLoader(data.Plain(LENGTH), batch_size=2, **way),
    "iterable, one by one": lambda **way: DataLoader(data.Plain(LENGTH), batch_size=None, **way),
    "iterable, drop last": lambda **way: DataLoader(data.Plain(LENGTH), batch_size=3, drop_last=True, **way),
    "fewer than workers": lambda **way: DataLoader(data.WithIterator(1), batch_size=2, **way),
    "iterator with state": lambda **way: DataLoader(data.WithIterator(LENGTH), batch_size=2, **way),
    "iterable with state": lambda **way: DataLoader(data.WithDataset(LENGTH), batch_size=2, **way),
    "its own iterator": lambda **way: DataLoader(data.Itself(LENGTH), batch_size=2, **way),
}


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _check_resume(make: Callable[[], DataLoader[Any]], steps: list[int], epochs: int = 1) -> None:
    """From the state after so many batches of an epoch come the very batches that came in the first run."""
    for step in steps:
        _seed(7)
        loader = make()
        for _ in range(epochs - 1):
            list(loader)
        batches = iter(loader)
        begun = [next(batches, None) for _ in range(step)]
        if step and begun[-1] is None:
            continue
        state = copy.deepcopy(loader.state_dict())
        rest = _numbers(batches)
        after = _numbers(loader) if state["base_seed"] is None else None
        _seed(999)
        other = make()
        other.load_state_dict(state)
        again = iter(other)
        # Twice: the state of a run that was resumed is as good as any.
        first = _numbers(batch for batch in [next(again, None)] if batch is not None)
        assert first == rest[:1], f"after {step} batches"
        if rest:
            third = make()
            third.load_state_dict(copy.deepcopy(other.state_dict()))
            assert _numbers(third) == rest[1:], f"after {step} batches and one more"
        assert first + _numbers(again) == rest, f"after {step} batches"
        assert after is None or _numbers(other) == after


SNAPSHOTS = ("snapshots now and then", "no snapshots", "far ahead")
"""Ways in which a place is a state and what was handed out since."""
KEEP_STATE = (
    "sampler with state",
    "sampler whose iterator has state",
    "dataset with state",
    "iterable",
    "iterator with state",
    "iterable with state",
    "its own iterator",
)
PAIRS = {
    # In the loop nothing is ahead; with workers all is.
    *((kind, way) for kind in MAKE for way in ("in the loop", "threads")),
    *((kind, way) for kind in KEEP_STATE for way in SNAPSHOTS),
    # What goes to a process and comes from it is pickled: indices, states of datasets and of iterators.
    ("shuffled", "processes"),
    ("dataset with state", "processes"),
    ("iterator with state", "processes"),
    ("dataset with state", "processes that stay"),
    ("its own iterator", "processes that stay"),
    # No turns, and workers that could be asked again.
    ("iterable with state", "one thread"),
    ("shuffled", "threads that stay"),
    ("iterator with state", "threads that stay"),
}
EVERY_PAIR = [
    pytest.param(kind, way, marks=[] if (kind, way) in PAIRS else pytest.mark.soak)
    for kind in MAKE
    for way in WAYS
]


@pytest.mark.parametrize(("kind", "way"), EVERY_PAIR)
def test_every_kind_resumes_every_way(kind: str, way: str) -> None:
    if "processes" in way:
        steps = [5]
    elif kind in KEEP_STATE:
        steps = list(range(13))
    else:
        # Before the first batch, after it, in the middle, and after the last one of most.
        steps = [0, 1, 5, 8]
    _check_resume(lambda: MAKE[kind](**WAYS[way]), steps)


@pytest.mark.parametrize("way", ["in the loop", "threads that stay"])
@pytest.mark.parametrize(
    "kind", ["shuffled", "generator", "random", "own generators", "sampler with state", "iterator with state"]
)
def test_the_second_epoch_resumes_too(kind: str, way: str) -> None:
    _check_resume(lambda: MAKE[kind](**WAYS[way]), [0, 3], epochs=2)


@pytest.mark.parametrize("every", [0, 1, 3])
def test_a_dataset_with_state_goes_on_in_every_epoch_of_workers_that_stay(every: int) -> None:
    """Their datasets begin an epoch as the one before has left them."""
    way = {**WAYS["threads that stay"], "snapshot_every_n_steps": every}
    _check_resume(lambda: MAKE["dataset with state"](**way), list(range(7)), epochs=3)


@pytest.mark.parametrize("kind", ["dataset with state", "iterator with state"])
def test_the_second_epoch_of_processes_that_stay_resumes_too(kind: str) -> None:
    _check_resume(lambda: MAKE[kind](**WAYS["processes that stay"]), [1], epochs=2)


@given(
    st.integers(1, 40),
    st.integers(1, 7),
    st.integers(0, 12),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_map_style_run_resumes_on_another_number_of_workers(
    length: int, batch_size: int, step: int, before: int, after: int, every: int, shuffle: bool
) -> None:
    def make(workers: int) -> DataLoader[Any]:
        way = {"num_workers": workers, "workers": "thread"} if workers else {}
        return DataLoader(
            data.Numbers(length),
            batch_size,
            shuffle,
            snapshot_every_n_steps=every,
            **way,  # type: ignore[arg-type]
        )

    loader = make(before)
    batches = iter(loader)
    for _ in range(step):
        next(batches, None)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = _numbers(batches)
    other = make(after)
    other.load_state_dict(state)
    resumed = _numbers(other)
    if not state["finished"]:
        assert resumed == rest


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        (data.Numbers, "thread"),
        (data.Counting, "thread"),
        (data.Plain, "thread"),
        (data.WithIterator, "thread"),
        (data.Counting, "process"),
        (data.WithIterator, "process"),
    ],
)
def test_out_of_order_nothing_is_lost_and_nothing_comes_twice(dataset: Any, workers: str) -> None:
    for step in range(0, 12, 3) if workers == "thread" else [6]:
        way = {"num_workers": 2, "in_order": False, "workers": workers, "prefetch_factor": 3}
        loader = DataLoader(dataset(LENGTH), batch_size=2, collate_fn=_slow_first, **way)
        batches = iter(loader)
        got = [next(batches) for _ in range(step)]
        other = DataLoader(dataset(LENGTH), batch_size=2, collate_fn=_slow_first, **way)
        other.load_state_dict(copy.deepcopy(loader.state_dict()))
        got += list(other)
        assert sorted(number for batch in got for number in batch) == list(range(LENGTH)), step
        del batches


def _slow_first(samples: list[Any]) -> list[int]:
    numbers = [sample[0] if isinstance(sample, tuple) else sample for sample in samples]
    if numbers[0] % 6 == 0:
        torch.empty(2_000_000).fill_(1)
    return numbers


def test_nothing_is_loaded_to_get_to_the_place() -> None:
    loader = DataLoader(data.Numbers(1000), batch_size=10, shuffle=True)
    batches = iter(loader)
    for _ in range(60):
        next(batches)
    dataset = data.Numbers(1000)
    other = DataLoader(dataset, batch_size=10, shuffle=True)
    other.load_state_dict(loader.state_dict())
    assert _numbers([next(iter(other))]) == _numbers([next(batches)])
    assert dataset.asked == 10


def test_a_sampler_with_state_is_not_asked_for_what_was_before() -> None:
    loader = DataLoader(data.Numbers(700), batch_size=10, sampler=data.Placed(700))
    batches = iter(loader)
    for _ in range(60):
        next(batches)
    sampler = data.Placed(700)
    other = DataLoader(data.Numbers(700), batch_size=10, sampler=sampler)
    other.load_state_dict(loader.state_dict())
    assert _numbers(other) == _numbers(batches)
    assert sampler.begun_at == 600


def test_an_iterator_with_state_does_not_make_again_what_was_before() -> None:
    loader = DataLoader(data.WithIterator(100), batch_size=5)
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    other = DataLoader(data.WithIterator(100), batch_size=5)
    other.load_state_dict(loader.state_dict())
    again = iter(other)
    next(again)
    state = other.state_dict()["workers"][0]["state"]["iterator"]
    assert state == {"at": 55}


@pytest.mark.parametrize("way", ["in the loop", "threads", "processes"])
@pytest.mark.parametrize("kind", ["shuffled", "generator", "iterator with state"])
def test_after_the_end_comes_the_next_epoch(kind: str, way: str) -> None:
    loader = MAKE[kind](**WAYS[way])
    _numbers(loader)
    state = copy.deepcopy(loader.state_dict())
    rng = torch.get_rng_state()
    wanted = _numbers(loader)
    other = MAKE[kind](**WAYS[way])
    other.load_state_dict(state)
    torch.set_rng_state(rng)
    assert _numbers(other) == wanted
    assert len(wanted) > 5


def test_the_state_outlives_a_loop_that_was_left() -> None:
    for way in ({}, WAYS["threads"], WAYS["processes"]):
        loader = DataLoader(data.Numbers(LENGTH), batch_size=3, **way)
        for number, _ in enumerate(loader):
            if number == 2:
                break
        other = DataLoader(data.Numbers(LENGTH), batch_size=3)
        other.load_state_dict(loader.state_dict())
        assert _numbers(other)[0] == [9, 10, 11]


def test_resuming_leaves_the_random_states_of_the_process_alone() -> None:
    loader = MAKE["shuffled"]()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    _seed(3)
    before = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    other = MAKE["shuffled"]()
    other.load_state_dict(state)
    next(iter(other))
    assert (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_distributed_sampler_goes_back_to_its_epoch(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> tuple[DataLoader[Any], Any]:
        sampler = DistributedSampler(data.Numbers(LENGTH), 2, 1, seed=3)  # type: ignore[var-annotated]
        return DataLoader(data.Numbers(LENGTH), batch_size=2, sampler=sampler), sampler

    loader, sampler = make()
    sampler.set_epoch(5)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    other, sampler = make()
    other.load_state_dict(state)
    assert _numbers(other) == _numbers(batches)
    assert sampler.epoch == 5
    assert "goes back to 5" in caplog.text
    # The next epoch is the trainer's to say.
    sampler.set_epoch(6)
    assert len(_numbers(other)) == 6


@pytest.mark.parametrize("kind", ["shuffled", "generator", "iterator with state", "dataset with state"])
def test_a_state_can_be_saved_in_any_way(kind: str) -> None:
    loader = MAKE[kind](**WAYS["threads"])
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = _numbers(batches)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for saved in (json.loads(json.dumps(state)), torch.load(file, weights_only=True)):
        other = MAKE[kind](**WAYS["threads"])
        other.load_state_dict(saved)
        assert _numbers(other) == rest


def test_a_state_is_a_copy_and_can_be_loaded_twice() -> None:
    loader = MAKE["iterator with state"]()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    as_it_was = copy.deepcopy(state)
    rest = _numbers(batches)
    for _ in range(2):
        loader.load_state_dict(state)
        assert _numbers(loader) == rest
    assert state == as_it_was


def test_before_the_first_batch_and_before_the_first_loop() -> None:
    loader = MAKE["shuffled"]()
    state = loader.state_dict()
    wanted = _numbers(loader)
    other = MAKE["shuffled"]()
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert _numbers(other) == wanted
    empty = MAKE["shuffled"]()
    empty.load_state_dict({})
    assert len(_numbers(empty)) == len(wanted)


def test_states_that_do_not_fit_are_refused() -> None:
    iterable, plain = MAKE["iterator with state"](num_workers=2, workers="thread"), MAKE["in order"]()
    next(iter(iterable)), next(iter(plain))
    with pytest.raises(StateError, match=r"num_workers=3: .* state has those of num_workers=2"):
        MAKE["iterator with state"](num_workers=3, workers="thread").load_state_dict(iterable.state_dict())
    with pytest.raises(StateError, match="another kind"):
        MAKE["in order"]().load_state_dict(iterable.state_dict())
    with pytest.raises(StateError, match="must come from state_dict"):
        MAKE["in order"]().load_state_dict({"position": 4})
    with pytest.raises(StateError, match="must come from state_dict"):
        MAKE["in order"]().load_state_dict(5)  # type: ignore[arg-type]
    other = MAKE["generator"]()
    other.load_state_dict(plain.state_dict())
    with pytest.raises(
        StateError, match="the state has 0 generators, and this loader and its sampler have 1"
    ):
        iter(other)
    far = DataLoader(data.Numbers(100), batch_size=3)
    batches = iter(far)
    for _ in range(20):
        next(batches)
    short = DataLoader(data.Numbers(10), batch_size=3)
    short.load_state_dict(far.state_dict())
    with pytest.raises(StateError, match="gives 4 batches and 20 were handed out"):
        iter(short)


def test_settings_that_cannot_work() -> None:
    with pytest.raises(SettingsError, match="workers='fibre': must be 'process' or 'thread'"):
        DataLoader(data.Numbers(3), workers="fibre")
    with pytest.raises(SettingsError, match="snapshot_every_n_steps=-1"):
        DataLoader(data.Numbers(3), snapshot_every_n_steps=-1)
    with pytest.raises(SettingsError, match="goes with workers='process'"):
        DataLoader(data.Numbers(3), num_workers=1, workers="thread", multiprocessing_context="spawn")
