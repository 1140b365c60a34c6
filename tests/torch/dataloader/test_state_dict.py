"""States of DataLoaders: what getting to a place costs, where they can be kept, and which are refused."""

import copy
import io
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingsError, StateError
from tests.properties import examples

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.utils.data import DistributedSampler

from headrace.torch import DataLoader
from tests.torch.dataloader import state_datasets as data
from tests.torch.dataloader.resuming import LENGTH, MAKE, WAYS, numbers_of, seed_all

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def test_nothing_is_loaded_to_get_to_the_place() -> None:
    loader = DataLoader(data.Numbers(1000), batch_size=10, shuffle=True)
    batches = iter(loader)
    for _ in range(60):
        next(batches)
    dataset = data.Numbers(1000)
    other = DataLoader(dataset, batch_size=10, shuffle=True)
    other.load_state_dict(loader.state_dict())
    assert numbers_of([next(iter(other))]) == numbers_of([next(batches)])
    assert dataset.asked == 10


def test_a_sampler_with_state_is_not_asked_for_what_was_before() -> None:
    loader = DataLoader(data.Numbers(700), batch_size=10, sampler=data.Placed(700))
    batches = iter(loader)
    for _ in range(60):
        next(batches)
    sampler = data.Placed(700)
    other = DataLoader(data.Numbers(700), batch_size=10, sampler=sampler)
    other.load_state_dict(loader.state_dict())
    assert numbers_of(other) == numbers_of(batches)
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
    numbers_of(loader)
    state = copy.deepcopy(loader.state_dict())
    rng = torch.get_rng_state()
    wanted = numbers_of(loader)
    other = MAKE[kind](**WAYS[way])
    other.load_state_dict(state)
    torch.set_rng_state(rng)
    assert numbers_of(other) == wanted
    assert len(wanted) > 5


def test_the_state_outlives_a_loop_that_was_left() -> None:
    for way in ({}, WAYS["threads"], WAYS["processes"]):
        loader = DataLoader(data.Numbers(LENGTH), batch_size=3, **way)
        for number, _ in enumerate(loader):
            if number == 2:
                break
        other = DataLoader(data.Numbers(LENGTH), batch_size=3)
        other.load_state_dict(loader.state_dict())
        assert numbers_of(other)[0] == [9, 10, 11]


def test_resuming_leaves_the_random_states_of_the_process_alone() -> None:
    loader = MAKE["shuffled"]()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    seed_all(3)
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
    assert numbers_of(other) == numbers_of(batches)
    assert sampler.epoch == 5
    assert "goes back to epoch 5" in caplog.text
    # The next epoch is the trainer's to say.
    sampler.set_epoch(6)
    assert len(numbers_of(other)) == 6


@pytest.mark.parametrize("stay", [False, True])
def test_after_a_state_from_the_end_the_sampler_is_in_the_epoch_that_the_trainer_says(stay: bool) -> None:
    def make() -> DataLoader[Any]:
        sampler = DistributedSampler(data.Numbers(LENGTH), 1, 0, seed=3)  # type: ignore[var-annotated]
        way = {"num_workers": 1, "worker_kind": "thread", "persistent_workers": stay}
        return DataLoader(data.Numbers(LENGTH), batch_size=4, sampler=sampler, **way)

    def epoch(loader: DataLoader[Any], number: int) -> list[Any]:
        loader.sampler.set_epoch(number)
        return numbers_of(loader)

    loader, other = make(), make()
    epoch(loader, 0), epoch(loader, 1)
    other.load_state_dict(loader.state_dict())
    assert [epoch(other, 2), epoch(other, 3)] == [epoch(loader, 2), epoch(loader, 3)]


@pytest.mark.parametrize("kind", ["shuffled", "generator", "iterator with state", "dataset with state"])
def test_a_state_can_be_saved_in_any_way(kind: str) -> None:
    loader = MAKE[kind](**WAYS["threads"])
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = numbers_of(batches)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for saved in (json.loads(json.dumps(state)), torch.load(file, weights_only=True)):
        other = MAKE[kind](**WAYS["threads"])
        other.load_state_dict(saved)
        assert numbers_of(other) == rest


def test_a_state_is_a_copy_and_can_be_loaded_twice() -> None:
    loader = MAKE["iterator with state"]()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    as_it_was = copy.deepcopy(state)
    rest = numbers_of(batches)
    for _ in range(2):
        loader.load_state_dict(state)
        assert numbers_of(loader) == rest
    assert state == as_it_was


def test_before_the_first_batch_and_before_the_first_loop() -> None:
    loader = MAKE["shuffled"]()
    state = loader.state_dict()
    wanted = numbers_of(loader)
    other = MAKE["shuffled"]()
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert numbers_of(other) == wanted


def test_states_that_do_not_fit_are_refused() -> None:
    iterable, plain = MAKE["iterator with state"](num_workers=2, worker_kind="thread"), MAKE["in order"]()
    next(iter(iterable)), next(iter(plain))
    with pytest.raises(StateError, match=r"num_workers=3: .* state was saved with num_workers=2"):
        MAKE["iterator with state"](num_workers=3, worker_kind="thread").load_state_dict(
            iterable.state_dict()
        )
    with pytest.raises(StateError, match="use the same kind"):
        MAKE["in order"]().load_state_dict(iterable.state_dict())
    with pytest.raises(StateError, match="must come from state_dict"):
        MAKE["in order"]().load_state_dict({"position": 4})
    with pytest.raises(StateError, match="must come from state_dict"):
        MAKE["in order"]().load_state_dict(5)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="state is an empty dict: must come from state_dict"):
        MAKE["in order"]().load_state_dict({})
    with pytest.raises(StateError, match="state has version 1, but"):
        MAKE["in order"]().load_state_dict(plain.state_dict() | {"version": 1})
    with pytest.raises(
        StateError, match="the state has 0 generators, but this loader and its sampler have 1"
    ):
        MAKE["generator"]().load_state_dict(plain.state_dict())


@pytest.mark.parametrize("part", sorted(MAKE["in order"]().state_dict()))
def test_a_state_without_one_of_its_parts_is_refused(part: str) -> None:
    state = MAKE["in order"]().state_dict()
    del state[part]
    with pytest.raises(
        StateError, match=f"damaged.* missing required field `{part}`|must come from state_dict"
    ):
        MAKE["in order"]().load_state_dict(state)


@pytest.mark.parametrize("since", [10**9, [10**9], [3]])
def test_a_state_that_would_repeat_too_much_is_refused(since: int | list[int]) -> None:
    loader = MAKE["dataset with state"](num_workers=2, worker_kind="thread")
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    state["workers"][1]["since"] = since
    with pytest.raises(StateError, match=r"damaged.* made 1000000000 batches again|needed again, but only 2"):
        MAKE["dataset with state"](num_workers=2, worker_kind="thread").load_state_dict(state)


@pytest.mark.parametrize("way", [{}, {"num_workers": 2, "worker_kind": "thread"}])
def test_turns_of_an_iterable_are_not_repeated_after_its_end(way: dict[str, Any]) -> None:
    loader = MAKE["iterator with state"](**way)
    next(iter(loader))
    state = loader.state_dict()
    for worker in state["workers"]:
        worker["since"] = 10**12
    other = MAKE["iterator with state"](**way)
    other.load_state_dict(state)
    assert len(numbers_of(other)) <= 12


def test_a_state_whose_sampler_is_past_a_missing_batch_is_refused() -> None:
    loader = MAKE["sampler with state"]()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    assert state["sampler"]["drawn"] > 0
    state["missing"] = [0]
    with pytest.raises(StateError, match="batch 0 is needed again, but the sampler is past"):
        MAKE["sampler with state"]().load_state_dict(state)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each part of a state, from the outermost to the innermost."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, part in parts for place in _places(part, (*path, name)))]


@examples(150)
@given(st.data())
def test_a_damaged_state_is_refused_or_harmless(choose: st.DataObject) -> None:
    kind = choose.draw(st.sampled_from(["shuffled", "generator", "dataset with state", "sampler with state"]))
    way = choose.draw(st.sampled_from(["in the loop", "threads"]))
    loader = MAKE[kind](**WAYS[way])
    batches = iter(loader)
    for _ in range(choose.draw(st.integers(0, 9))):
        next(batches, None)
    state = json.loads(json.dumps(loader.state_dict()))
    *path, last = choose.draw(st.sampled_from(_places(state)[1:]))
    part = state
    for name in path:
        part = part[name]
    part[last] = choose.draw(
        st.sampled_from([None, -1, 3, 10**9, 2**64, True, "x", "AAAA", [], [3], {}, 0.5])
    )
    other = MAKE[kind](**WAYS[way])
    try:
        other.load_state_dict(state)
        assert len(numbers_of(other)) <= 12
    except StateError:
        pass
    except Exception as error:
        # What samplers and datasets keep is their own, and so are their errors.
        assert {"state", "sampler_at_begin", "sampler_at_end", "dataset_at_end"} & {*path, last}, (
            error,
            path,
            last,
        )


def _of_numbers(length: int = LENGTH, **settings: Any) -> DataLoader[Any]:
    return DataLoader(data.Numbers(length), **({"batch_size": 3} | settings))


OTHER_SETTINGS = {
    "batch_size=4: .* with batch_size=3": {"batch_size": 4},
    "batch_size=None: .* with batch_size=3": {"batch_size": None},
    "the dataset has 30 samples, .* over 23": {"length": 30},
    "the dataset has 20 samples, .* over 23": {"length": 20},
    "the sampler is RandomSampler, .* with SequentialSampler": {"shuffle": True},
    "the sampler is Placed, .* with SequentialSampler": {"sampler": data.Placed(LENGTH)},
    "batch_size=None: the state was saved .* with batch_size=3": {
        "batch_size": 1,
        "batch_sampler": data.Groups(LENGTH),
    },
}


@pytest.mark.parametrize("said", OTHER_SETTINGS)
def test_other_settings_are_refused_in_the_middle_of_an_epoch_and_taken_after_it(said: str) -> None:
    settings = OTHER_SETTINGS[said]
    loader = _of_numbers()
    batches = iter(loader)
    next(batches)
    with pytest.raises(StateError, match=said):
        _of_numbers(**settings).load_state_dict(loader.state_dict())
    list(batches)
    other = _of_numbers(**settings)
    other.load_state_dict(loader.state_dict())
    came = [batch if isinstance(batch, list) else [batch] for batch in numbers_of(other)]
    wanted = range(settings.get("length", LENGTH))
    assert sorted(number for batch in came for number in batch) == list(wanted)


def test_another_number_of_ranks_is_refused_in_the_middle_of_an_epoch() -> None:
    def make(ranks: int) -> DataLoader[Any]:
        sampler = DistributedSampler(data.Numbers(LENGTH), ranks, 0)  # type: ignore[var-annotated]
        return _of_numbers(sampler=sampler)

    loader = make(2)
    next(iter(loader))
    with pytest.raises(StateError, match="the sampler has 6 samples, .* over 12"):
        make(4).load_state_dict(loader.state_dict())


def test_an_iterable_that_keeps_its_place_goes_on_in_batches_of_another_size() -> None:
    loader = DataLoader(data.WithIterator(LENGTH), batch_size=2)
    next(iter(loader))
    other = DataLoader(data.WithIterator(LENGTH), batch_size=5)
    other.load_state_dict(loader.state_dict())
    assert [number for batch in numbers_of(other) for number in batch] == list(range(2, LENGTH))
    plain = DataLoader(data.Plain(LENGTH), batch_size=2)
    next(iter(plain))
    with pytest.raises(StateError, match=r"batch_size=5: .* with batch_size=2, and counts batches"):
        DataLoader(data.Plain(LENGTH), batch_size=5).load_state_dict(plain.state_dict())


def test_an_unknown_sampler_that_gives_too_few_batches_is_refused() -> None:
    far = DataLoader(range(100), batch_sampler=[[number] for number in range(40)])  # type: ignore[arg-type]
    batches = iter(far)
    for _ in range(20):
        next(batches)
    short = DataLoader(range(100), batch_sampler=[[number] for number in range(4)])  # type: ignore[arg-type]
    short.load_state_dict(far.state_dict())
    with pytest.raises(StateError, match="gives 4 batches, but 20 were handed out"):
        iter(short)


def test_settings_that_cannot_work() -> None:
    with pytest.raises(SettingsError, match="worker_kind='fibre': must be 'process' or 'thread'"):
        DataLoader(data.Numbers(3), worker_kind="fibre")
    with pytest.raises(SettingsError, match="snapshot_every_n_steps=-1"):
        DataLoader(data.Numbers(3), snapshot_every_n_steps=-1)
    with pytest.raises(SettingsError, match="use worker_kind='process'"):
        DataLoader(data.Numbers(3), num_workers=1, worker_kind="thread", multiprocessing_context="spawn")
