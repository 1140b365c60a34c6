"""A DataLoader goes on exactly where a state says, however its batches come about."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

pytest.importorskip("torch", reason="needs torch")

import torch

from headrace.torch import DataLoader
from tests.torch.dataloader import state_datasets as data
from tests.torch.dataloader.resuming import LENGTH, MAKE, WAYS, check_resume, numbers_of

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

SNAPSHOTS = ("snapshots now and then", "no snapshots", "far ahead")
"""Ways in which a place is a state and what was handed out since."""
KEEP_STATE = (
    "sampler with state",
    "sampler that counts epochs",
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
    check_resume(lambda: MAKE[kind](**WAYS[way]), steps)


@pytest.mark.parametrize("way", ["in the loop", "threads that stay"])
@pytest.mark.parametrize(
    "kind", ["shuffled", "generator", "random", "own generators", "sampler with state", "iterator with state"]
)
def test_the_second_epoch_resumes_too(kind: str, way: str) -> None:
    check_resume(lambda: MAKE[kind](**WAYS[way]), [0, 3], epochs=2)


@pytest.mark.parametrize("way", ["in the loop", "threads", "snapshots now and then", "threads that stay"])
def test_a_sampler_that_counts_epochs_resumes_in_a_later_one(way: str) -> None:
    """Also before it was asked for its state in that epoch."""
    check_resume(lambda: MAKE["sampler that counts epochs"](**WAYS[way]), list(range(6)), epochs=3)


@pytest.mark.parametrize("every", [0, 1, 3])
def test_a_dataset_with_state_goes_on_in_every_epoch_of_workers_that_stay(every: int) -> None:
    """Their datasets begin an epoch as the one before has left them."""
    way = {**WAYS["threads that stay"], "snapshot_every_n_steps": every}
    check_resume(lambda: MAKE["dataset with state"](**way), list(range(7)), epochs=3)


@pytest.mark.parametrize("kind", ["dataset with state", "iterator with state"])
def test_the_second_epoch_of_processes_that_stay_resumes_too(kind: str) -> None:
    check_resume(lambda: MAKE[kind](**WAYS["processes that stay"]), [1], epochs=2)


@given(
    st.integers(1, 40),
    st.integers(1, 7),
    st.integers(0, 12),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(1, 4),
    st.booleans(),
)
@examples(40)
def test_a_map_style_run_resumes_on_another_number_of_workers(
    length: int, batch_size: int, step: int, before: int, after: int, every: int, shuffle: bool
) -> None:
    def make(workers: int) -> DataLoader[Any]:
        way = {"num_workers": workers, "worker_kind": "thread"} if workers else {}
        return DataLoader(
            data.Numbers(length),
            batch_size,
            shuffle,
            snapshot_every_n_steps=every,
            **way,  # type: ignore[arg-type]
        )

    loader = make(before)
    batches = iter(loader)
    taken = [next(batches, None) for _ in range(step)]
    state = json.loads(json.dumps(loader.state_dict()))
    rest = numbers_of(batches)
    other = make(after)
    other.load_state_dict(state)
    resumed = numbers_of(other)
    if not any(batch is None for batch in taken):
        assert resumed == rest
    else:
        # The loop had ended: the next epoch, as a whole.
        assert sorted(number for batch in resumed for number in batch) == list(range(length))


@pytest.mark.parametrize(
    ("dataset", "worker_kind"),
    [
        (data.Numbers, "thread"),
        (data.Counting, "thread"),
        (data.Plain, "thread"),
        (data.WithIterator, "thread"),
        (data.Counting, "process"),
        (data.WithIterator, "process"),
    ],
)
def test_out_of_order_nothing_is_lost_and_nothing_comes_twice(dataset: Any, worker_kind: str) -> None:
    for step in range(0, 12, 3) if worker_kind == "thread" else [6]:
        way = {"num_workers": 2, "in_order": False, "worker_kind": worker_kind, "prefetch_factor": 3}
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
