"""How far an iteration of a DataLoader has come, and the state that says so.

The loop, the sampler and the workers are in different places at any moment:

    handed out   0 1 2 . 4                    batch 3 is slow, and `in_order=False`
    sampler      0 1 2 3 4 5 6 7 8            asked ahead, to keep the workers busy

A state describes what was handed out: everything before 5, except 3. Batches that are on their way do not count; they
are not lost, but made again. The states of workers, if any, refer to their batches that were handed out.
"""

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.torch.random_states import RandomStates
from headrace.torch.sampling import Draws, epoch_of
from headrace.torch.workers.job import Resumed

VERSION = 2


@dataclass(frozen=True)
class WorkerProgress:
    """One worker's: the last state of it that is known, and how many of its batches were handed out since. Their
    numbers are the first `count` of `numbers`; an iterable's batches have none."""

    state: Any = None
    count: int = 0
    numbers: list[int] | None = None

    def hand(self, number: int, state: Any) -> "WorkerProgress":
        if state is not None:
            return WorkerProgress(state, 0, None if self.numbers is None else [])
        if self.numbers is not None:
            self.numbers[self.count :] = [number]
        return WorkerProgress(self.state, self.count + 1, self.numbers)

    def since(self) -> list[int]:
        return [] if self.numbers is None else self.numbers[: self.count]

    def to_json(self) -> dict[str, Any]:
        state = pickle.loads(self.state) if isinstance(self.state, bytes) else copy.deepcopy(self.state)
        return {"state": state, "since": self.count if self.numbers is None else self.since()}

    @staticmethod
    def from_json(written: dict[str, Any]) -> "WorkerProgress":
        state, since = written["state"], written["since"]
        return (
            WorkerProgress(state, since)
            if isinstance(since, int)
            else WorkerProgress(state, len(since), [*since])
        )


class HandedOut(NamedTuple):
    """What was handed out. A batch more is another place: one assignment, so that Ctrl-C cannot come in between."""

    yielded: int = 0
    upto: int = 0
    missing: frozenset[int] = frozenset()
    """Numbers before `upto` that were not handed out."""
    next_worker: int = 0
    workers: tuple[WorkerProgress, ...] = ()
    """Empty if none of them keeps state that the loader must know of."""


@dataclass(frozen=True)
class EpochEnd:
    """What the next epoch depends on, when all batches of this one are handed out and the loop has ended."""

    random: dict[str, Any]
    """Random states, written as JSON."""
    sampler: Any = None
    """The state of a sampler that keeps one."""
    dataset: Any = None
    """Without workers: the state of a dataset that keeps one."""


class IterationProgress:
    """The progress of one epoch. The loader keeps it after the iterator is gone."""

    def __init__(self, index_sampler: Any, draws: Draws, randomness: RandomStates, base_seed: int) -> None:
        self._draws, self._randomness = draws, randomness
        self._base_seed, self._epoch = base_seed, epoch_of(index_sampler)
        self.place = HandedOut()
        self.iterable = False
        self.seeded_first = True
        """Whether the workers' seed was drawn after the sampler began, as when they start; not if they are reused."""
        self.begun_twice = False
        """Whether the sampler's iterator was made once before that seed and once after, as when workers start."""
        self.shared_seed: int | None = None
        self.dataset_epoch: int | None = None
        """The epoch of a dataset that counts its epochs."""
        self.num_workers = 0
        self.sampler_at_begin: Any = None
        """The state that the sampler began with, if it keeps one."""
        self.end: EpochEnd | None = None
        """One assignment says that the epoch has ended, so that Ctrl-C cannot come in between."""
        self.settings: dict[str, Any] = {}
        self.len_called: int | None = None
        self.ask_worker: Callable[[], dict[str, Any]] | None = None
        """Without workers: the loop's own state, which can be asked for at any time."""

    def go_on_from(self, state: dict[str, Any]) -> None:
        workers = tuple(WorkerProgress.from_json(each) for each in state["workers"])
        missing = frozenset(state["missing"])
        self.place = HandedOut(state["yielded"], state["upto"], missing, state["next_worker"], workers)
        self.seeded_first, self.begun_twice = state["seeded_first"], state["begun_twice"]
        self.len_called = state["len_called"]

    def begin_workers(self, states: Mapping[int, Any]) -> None:
        """They keep state, and none of them has had a batch handed out. `states`: of those that do not begin afresh."""
        if not self.place.workers:
            begun = (
                WorkerProgress(states.get(worker), numbers=None if self.iterable else [])
                for worker in range(self.num_workers)
            )
            self.place = self.place._replace(workers=tuple(begun))

    def end_workers(self, states: dict[int, Any]) -> None:
        """All is handed out, and these are the states that workers have ended with."""
        workers = list(self.place.workers)
        for worker, state in states.items():
            workers[worker] = WorkerProgress(state)
        self.place = self.place._replace(workers=tuple(workers))

    def hand(self, number: int, worker: int, state: Any) -> None:
        """Record that a batch is handed to the loop."""
        if self._draws.keeps_many:
            # Before it does: Ctrl-C may take it back.
            self._draws.forget_before(self._first_again())
        yielded, _, _, _, workers = self.place
        if workers:
            changed = workers[worker].hand(number, state)
            workers = (*workers[:worker], changed, *workers[worker + 1 :])
        self.place = HandedOut(
            yielded + 1, *self._after(number), (worker + 1) % max(1, self.num_workers), workers
        )

    def pass_by(self, number: int, worker: int) -> None:
        """Record that an error came instead of a batch and the loop goes on. For the worker it was an ordinary turn."""
        self.hand(number, worker, None)
        self.place = self.place._replace(yielded=self.place.yielded - 1)

    def _after(self, number: int) -> tuple[int, frozenset[int]]:
        """`upto` and `missing` when this one is handed out too."""
        _, upto, missing, _, _ = self.place
        if self.iterable:
            # Its tasks are only turns: which batch comes of one, its worker decides.
            return upto, missing
        if number == upto:
            return number + 1, missing
        return max(upto, number + 1), missing.union(range(upto, number)) - {number}

    def _first_again(self) -> int:
        """The first batch that is to be made again, for the loop or for a worker's state."""
        _, upto, missing, _, workers = self.place
        return min([upto, *missing, *(number for worker in workers for number in worker.since())])

    def state_dict(self) -> dict[str, Any]:
        yielded, upto, missing, next_worker, workers = self.place
        own = [self.ask_worker()] if self.ask_worker else []
        end = self.end
        return {
            "version": VERSION,
            "yielded": yielded,
            "finished": end is not None,
            "upto": upto,
            "missing": sorted(missing),
            "sampler": self._draws.place(self._first_again()),
            "epoch": self._epoch,
            "random": dict(self._randomness.as_json),
            "random_at_end": None if end is None else end.random,
            "sampler_at_begin": copy.deepcopy(self.sampler_at_begin),
            "sampler_at_end": None if end is None else copy.deepcopy(end.sampler),
            "dataset_at_end": None if end is None else copy.deepcopy(end.dataset),
            "base_seed": self._base_seed,
            "seeded_first": self.seeded_first,
            "begun_twice": self.begun_twice,
            "shared_seed": self.shared_seed,
            "dataset_epoch": self.dataset_epoch,
            "num_workers": self.num_workers,
            "next_worker": next_worker,
            "workers": own or [worker.to_json() for worker in workers],
            "len_called": self.len_called,
            "settings": self.settings,
        }


def resumed_workers(state: dict[str, Any], indices: dict[int, Any], turn: Any) -> tuple[Resumed, ...] | None:
    """Where each worker goes on. `indices` has those of the batches that must be made again; an iterable has one for
    all of its turns."""
    if not state["workers"]:
        return None
    return tuple(Resumed(each["state"], _replay(each["since"], indices, turn)) for each in state["workers"])


@dataclass(frozen=True)
class Turns:
    """The same index again and again, as the turns of an iterable have it."""

    index: Any
    count: int

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.index, self.count)


def _replay(since: int | list[int], indices: dict[int, Any], turn: Any) -> Iterable[Any]:
    return Turns(turn, since) if isinstance(since, int) else [indices[number] for number in since]
