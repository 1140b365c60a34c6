"""How far an iteration of a DataLoader has come, and the state that says so.

The loop, the sampler and the workers are in different places at any moment:

    handed out   0 1 2 . 4                    batch 3 is slow, and `in_order=False`
    sampler      0 1 2 3 4 5 6 7 8            asked ahead, to keep the workers busy

A state is about what was handed out: all before 5, but for 3. Nothing that is on its way counts, and nothing of it is
lost: it is made again. Where workers keep state of their own, it is about the batches of theirs that were handed out.
"""

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import StateError
from penstock.torch.sampling import Draws, RandomStates, epoch_of
from penstock.torch.workers.job import Resumed

VERSION = 1


@dataclass
class WorkerProgress:
    """One worker's: the last state of it that is known, and what it has had handed out since: the numbers of those
    batches, or only how many, if its batches come from an iterable."""

    state: Any = None
    since: int | list[int] = 0

    def hand(self, number: int, state: Any) -> None:
        if state is not None:
            self.state, self.since = state, [] if isinstance(self.since, list) else 0
        elif isinstance(self.since, list):
            self.since.append(number)
        else:
            self.since += 1

    def to_json(self) -> dict[str, Any]:
        state = pickle.loads(self.state) if isinstance(self.state, bytes) else copy.deepcopy(self.state)
        since = list(self.since) if isinstance(self.since, list) else self.since
        return {"state": state, "since": since}


class Progress:
    """Of one epoch. The loader keeps it after the iterator is gone."""

    def __init__(self, index_sampler: Any, draws: Draws, randomness: RandomStates, base_seed: int) -> None:
        self._draws, self._randomness = draws, randomness
        self._base_seed, self._epoch = base_seed, epoch_of(index_sampler)
        self.iterable = False
        self.never_ahead = False
        """Whether the sampler is only asked for what is handed out: then its place is the loop's."""
        self.seeded_first = True
        """Whether the workers' seed was drawn after the sampler began, as when they start; not if they are reused."""
        self.begun_twice = False
        """Whether the sampler's iterator was made once before that seed and once after, as when workers start."""
        self.shared_seed: int | None = None
        self.yielded = 0
        self.upto = 0
        self.missing: set[int] = set()
        """Numbers before `upto` that were not handed out."""
        self.next_worker = 0
        self.workers: list[WorkerProgress] = []
        """Empty if none of them keeps state that the loader must know of."""
        self.num_workers = 0
        self.finished = False
        self.generators_at_end: dict[str, Any] | None = None
        self.len_called: int | None = None

    def go_on_from(self, state: dict[str, Any]) -> None:
        self.yielded, self.upto, self.missing = state["yielded"], state["upto"], set(state["missing"])
        self.next_worker, self.len_called = state["next_worker"], state["len_called"]
        self.workers = [WorkerProgress(**each) for each in state["workers"]]

    def hand(self, number: int, worker: int, state: Any, failed: bool) -> None:
        """A batch goes to the loop, or the error that came of it."""
        if self.iterable:
            # Its tasks are only turns: which batch comes of one, its worker decides.
            pass
        elif number >= self.upto:
            self.missing.update(range(self.upto, number))
            self.upto = number + 1
        else:
            self.missing.discard(number)
        self.next_worker = (worker + 1) % max(1, self.num_workers)
        if not failed:
            self.yielded += 1
            if self.workers:
                self.workers[worker].hand(number, state)

    def state_dict(self) -> dict[str, Any]:
        if self.never_ahead:
            self.upto = self._draws.drawn
        first = min(self.missing, default=self.upto)
        return {
            "version": VERSION,
            "yielded": self.yielded,
            "finished": self.finished,
            "upto": self.upto,
            "missing": sorted(self.missing),
            "sampler": self._draws.place(first),
            "epoch": self._epoch,
            "random": dict(self._randomness.as_json),
            "random_at_end": self.generators_at_end,
            "base_seed": self._base_seed,
            "seeded_first": self.seeded_first,
            "begun_twice": self.begun_twice,
            "shared_seed": self.shared_seed,
            "num_workers": self.num_workers,
            "next_worker": self.next_worker,
            "workers": [worker.to_json() for worker in self.workers],
            "len_called": self.len_called,
        }


def check_state(state: Any, num_workers: int, stateful: bool) -> None:
    """Whether a state can be loaded, before anything is changed."""
    if not isinstance(state, dict) or state.get("version") != VERSION:
        kind = (
            type(state).__name__
            if not isinstance(state, dict)
            else f"a dict with {', '.join(map(str, state))}"
        )
        raise StateError(f"state is {kind[:200]}: must come from state_dict() of a penstock.torch.DataLoader")
    if bool(state["workers"]) != stateful and state["yielded"]:
        had = "kept state in its workers" if state["workers"] else "kept no state"
        raise StateError(
            f"the dataset of this state {had}, and this one does not do the same: it is another kind"
        )
    if state["workers"] and state["num_workers"] != num_workers and not state["finished"]:
        raise StateError(
            f"num_workers={num_workers}: each worker keeps its own state of the dataset, and the state has those of "
            f"num_workers={state['num_workers']}; go on with as many"
        )


def resumed_workers(state: dict[str, Any], indices: dict[int, Any], turn: Any) -> tuple[Resumed, ...] | None:
    """Where each worker goes on. `indices` has those of the batches that must be made again; an iterable has one for
    all of its turns."""
    if not state["workers"]:
        return None
    return tuple(Resumed(each["state"], _replay(each["since"], indices, turn)) for each in state["workers"])


def _replay(since: int | list[int], indices: dict[int, Any], turn: Any) -> Sequence[Any]:
    # One list over and over: pickled, it takes a few bytes for each.
    return [turn] * since if isinstance(since, int) else [indices[number] for number in since]
