"""Which index comes next: a sampler's indices, numbered, and where in them a run goes on.

A sampler is asked ahead of the loop, so its own place is further than the batches that were handed out. So the place
that counts is a number, and the sampler is brought there without loading anything:

- one that keeps state (it or its iterator has `state_dict` and `load_state_dict`) is asked for it now and then, and
  later loads the last state before that number;
- any other begins again and skips. It must give the same indices again, so what it may have drawn them with is kept
  as it was at the beginning (`random_states.py`).
"""

import copy
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler

from headrace.errors import StateError
from headrace.torch.workers.job import is_stateful

_log = logging.getLogger(__name__)
_NOTHING = object()


class _End:
    """Whether a sampler has come to its end: what it says of its state from then on may be about its next time."""

    reached = False


def _not_begun() -> Any:
    raise StopIteration


def _groups(iterator: Iterator[Any], sampler: BatchSampler, end: _End) -> Iterator[list[Any]]:
    """As PyTorch's BatchSampler makes them.

    It knows nothing of `Draws`, which holds it: an epoch that is left early, with all its indices, is freed at once.
    """
    while group := list(itertools.islice(iterator, sampler.batch_size)):
        if len(group) < sampler.batch_size:
            end.reached = True
            if sampler.drop_last:
                return
        yield group


class Draws:
    """The indices of one epoch, one for each batch; `drawn` counts them."""

    def __init__(self, index_sampler: Any, iterator: Iterator[Any], every: int) -> None:
        """`every` so many indices the sampler is asked for its state; 0 if it is never ahead of the loop."""
        self._every = every
        self._batched = type(index_sampler) is BatchSampler
        # PyTorch's BatchSampler hides the iterator of the sampler in it, which may keep state.
        self._sampler = _inner(index_sampler)
        self._outer, self._iterator = index_sampler, iterator
        self._begun = False
        self._keeps_state = False
        self._end = _End()
        self._looked_ahead = False
        """Whether the sampler was asked for an index that was not drawn yet."""
        self._next: Callable[[], Any] = _not_begun
        self.drawn = 0
        self._kept: deque[tuple[int, Any]] = deque()

    def __iter__(self) -> "Draws":
        return self

    def __next__(self) -> Any:
        self._begin_once()
        try:
            index = self._next()
        except StopIteration:
            self._end.reached = True
            raise
        self.drawn += 1
        self._looked_ahead = False
        if self._keeps_state and self._every and (self.drawn % self._every == 0 or self.drawn == 1):
            self._kept.append((self.drawn, self._state()))
        return index

    def _begin_once(self) -> None:
        if not self._begun:
            self._begin(iter(self._sampler) if self._batched else self._iterator)

    def _begin(self, iterator: Iterator[Any]) -> None:
        self._begun, self._iterator = True, iterator
        self._keeps_state = is_stateful(self._sampler) or is_stateful(self._iterator)
        draws = _groups(iterator, self._outer, self._end) if self._batched else iterator
        self._next = draws.__next__

    def _state(self) -> dict[str, Any]:
        parts = {"sampler": self._sampler, "iterator": self._iterator}
        # A copy: some give out the very dict that they go on changing.
        state = {n: copy.deepcopy(p.state_dict()) if is_stateful(p) else None for n, p in parts.items()}
        return {**state, "over": self._end.reached}

    @property
    def keeps_many(self) -> bool:
        return len(self._kept) > 1

    def forget_before(self, number: int) -> None:
        """States of the sampler that nobody needs who goes on with index `number`, or with one after it."""
        while len(self._kept) > 1 and self._kept[1][0] <= number:
            self._kept.popleft()

    def place(self, number: int) -> dict[str, Any]:
        """What `resume` needs to give index `number` next."""
        if self._keeps_state and self._begun and number == self.drawn and not self._looked_ahead:
            return {"drawn": number, "state": self._state()}
        self.forget_before(number)
        drawn, state = self._kept[0] if self._kept and self._kept[0][0] <= number else (0, None)
        return {"drawn": drawn, "state": state}

    def resume(self, place: dict[str, Any], upto: int, wanted: set[int]) -> dict[int, Any]:
        """Go on with index `upto`; gives those before it that are wanted, by number."""
        if place["state"] is not None:
            self._load(place["state"])
            self.drawn = place["drawn"]
            self._kept.append((place["drawn"], place["state"]))
        self._begin_once()
        if not any(self.drawn <= number < upto for number in wanted):
            self._skip(upto)
        found = self._draw_until(upto, wanted)
        if self._keeps_state:
            self._kept.append((self.drawn, self._state()))
        self.is_at_end()
        return found

    def _draw_until(self, upto: int, wanted: set[int]) -> dict[int, Any]:
        found = {}
        while self.drawn < upto:
            number, index = self.drawn, next(self, None)
            if self.drawn == number:
                raise StateError(
                    f"the sampler gives {number} batches, but {upto} were handed out: it is not the sampler that this "
                    "state was saved with; create it with the same arguments"
                )
            if number in wanted:
                found[number] = index
        return found

    def is_at_end(self) -> bool:
        """Whether no index is left. The sampler is asked for the next one, which is kept.

        Most samplers draw all their random numbers before the first index: those are drawn now.
        """
        if self._looked_ahead:
            return False
        self._begin_once()
        following = list(itertools.islice(iter(self._next, _NOTHING), 1))
        self._next = itertools.chain(following, iter(self._next, _NOTHING)).__next__
        self._looked_ahead = bool(following)
        return not following

    def _skip(self, upto: int) -> None:
        """Pass over indices at the speed of C, without making batches of them."""
        size = self._outer.batch_size if self._batched else 1
        wanted = (upto - self.drawn) * size
        passed = deque(enumerate(itertools.islice(self._iterator, wanted), 1), maxlen=1)
        self.drawn += -(-passed[0][0] // size) if passed else 0

    def _load(self, state: dict[str, Any]) -> None:
        if state["sampler"] is not None:
            self._sampler.load_state_dict(state["sampler"])
        self._begin(iter(self._sampler))
        if state["iterator"] is not None:
            self._iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
        if state["over"]:
            self._end.reached, self._next = True, iter(()).__next__


def _inner(index_sampler: Any) -> Any:
    """The sampler that gives single indices, where PyTorch's own class makes batches of them."""
    return index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler


def state_of_sampler(index_sampler: Any) -> Any:
    """The state that the sampler itself keeps, not its iterator: what its next time begins with. None without one."""
    sampler = _inner(index_sampler)
    return copy.deepcopy(sampler.state_dict()) if is_stateful(sampler) else None


def load_sampler(index_sampler: Any, state: Any) -> None:
    """The state that a sampler which keeps one has begun or ended an epoch with."""
    sampler = _inner(index_sampler)
    if state is not None and is_stateful(sampler):
        sampler.load_state_dict(copy.deepcopy(state))


def _with_epoch(index_sampler: Any) -> Any:
    """The sampler, or the one in it, that is told the epoch, as DistributedSampler is; or None."""
    for each in (index_sampler, getattr(index_sampler, "sampler", None)):
        if isinstance(getattr(each, "epoch", None), int) and callable(getattr(each, "set_epoch", None)):
            return each
    return None


def epoch_of(index_sampler: Any) -> int | None:
    sampler = _with_epoch(index_sampler)
    return None if sampler is None else sampler.epoch


def set_epoch(index_sampler: Any, epoch: int | None) -> None:
    sampler = _with_epoch(index_sampler)
    if sampler is not None and epoch is not None and sampler.epoch != epoch:
        sampler.set_epoch(epoch)


def go_back_to_epoch(index_sampler: Any, epoch: int | None) -> None:
    """To the epoch of a state, in the middle of which the loop goes on."""
    now = epoch_of(index_sampler)
    if None not in (now, epoch) and now != epoch:
        _log.warning("the sampler is in epoch %d and goes back to epoch %d, that of the state", now, epoch)
        set_epoch(index_sampler, epoch)
