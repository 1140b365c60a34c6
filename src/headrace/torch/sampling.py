"""Which index comes next: a sampler's indices, numbered, and where in them a run goes on.

A sampler is asked ahead of the loop, so its own place is further than the batches that were handed out. So the place
that counts is a number, and the sampler is brought there without loading anything:

- one that keeps state (it or its iterator has `state_dict` and `load_state_dict`) is asked for it now and then, and
  later loads the last state before that number;
- any other begins again and skips. It must give the same indices again, so what it may have drawn them with is kept
  as it was at the beginning: generators, and the random states of `torch`, `random` and NumPy.
"""

import base64
import copy
import itertools
import logging
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from headrace.errors import StateError
from headrace.torch.workers.job import is_stateful

_log = logging.getLogger(__name__)
_DRAW_NOTHING = (SequentialSampler, DistributedSampler, _InfiniteConstantSampler)
"""Their indices depend on no random state but their own arguments."""


_NOTHING = object()


class Draws:
    """The indices of one epoch, one for each batch; `drawn` counts them."""

    def __init__(self, index_sampler: Any, iterator: Iterator[Any], every: int) -> None:
        """`every` so many indices the sampler is asked for its state; 0 if it is never ahead of the loop."""
        self._every = every
        self._batched = type(index_sampler) is BatchSampler
        # PyTorch's BatchSampler hides the iterator of the sampler in it, which may keep state.
        self._sampler = index_sampler.sampler if self._batched else index_sampler
        self._outer, self._iterator = index_sampler, iterator
        self._begun = False
        self._keeps_state = self._over = False
        self._next = self._first
        self.drawn = 0
        self._kept: deque[tuple[int, Any]] = deque()

    def __iter__(self) -> "Draws":
        return self

    def __next__(self) -> Any:
        index = self._next()
        self.drawn += 1
        if self._keeps_state and self._every and self.drawn % self._every == 0:
            self._kept.append((self.drawn, self._state()))
        return index

    def _first(self) -> Any:
        self._begin(iter(self._sampler) if self._batched else self._iterator)
        return self._next()

    def _begin(self, iterator: Iterator[Any]) -> None:
        self._begun, self._iterator = True, iterator
        self._keeps_state = is_stateful(self._sampler) or is_stateful(self._iterator)
        self._next = self._groups(iterator).__next__ if self._batched else iterator.__next__

    def _groups(self, iterator: Iterator[Any]) -> Iterator[list[Any]]:
        """As PyTorch's BatchSampler makes them."""
        size = self._outer.batch_size
        while group := list(itertools.islice(iterator, size)):
            if len(group) < size:
                # The sampler has ended, and what it says of its state now may be about its next time.
                self._over = True
                if self._outer.drop_last:
                    return
            yield group

    def _state(self) -> dict[str, Any]:
        parts = {"sampler": self._sampler, "iterator": self._iterator}
        # A copy: some give out the very dict that they go on changing.
        state = {n: copy.deepcopy(p.state_dict()) if is_stateful(p) else None for n, p in parts.items()}
        return {**state, "over": self._over}

    @property
    def keeps_many(self) -> bool:
        return len(self._kept) > 1

    def forget_before(self, number: int) -> None:
        """States of the sampler that nobody needs who goes on with index `number`, or with one after it."""
        while len(self._kept) > 1 and self._kept[1][0] <= number:
            self._kept.popleft()

    def place(self, number: int) -> dict[str, Any]:
        """What `resume` needs to give index `number` next."""
        if self._keeps_state and self._begun and number == self.drawn:
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
        elif not self._begun:
            self._begin(iter(self._sampler) if self._batched else self._iterator)
        if not any(self.drawn <= number < upto for number in wanted):
            self._skip(upto)
        found = self._draw_until(upto, wanted)
        if self._keeps_state:
            self._kept.append((self.drawn, self._state()))
        elif not upto:
            self._draw_first_early()
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

    def _draw_first_early(self) -> None:
        """Draw the first index while the random states are still restored: most samplers then draw all they need."""
        first = list(itertools.islice(iter(self._next, _NOTHING), 1))
        self._next = itertools.chain(first, iter(self._next, _NOTHING)).__next__

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
            self._over, self._next = True, iter(()).__next__


class Randomness:
    """The random states that a loader's sampler may draw from: of generators, and of the process."""

    def __init__(self, generator: Any, index_sampler: Any) -> None:
        inner = getattr(index_sampler, "sampler", None)
        found = [generator, *_attributes(index_sampler), *_attributes(inner)]
        self._generators: list[Any] = []
        for each in found:
            if isinstance(each, _GENERATORS) and not any(each is other for other in self._generators):
                self._generators.append(each)
        sampler = inner if type(index_sampler) is BatchSampler else index_sampler
        self._global = type(sampler) not in _DRAW_NOTHING

    def now(self) -> "RandomStates":
        generators = [_state_of(each) for each in self._generators]
        if not self._global:
            return RandomStates(generators)
        return RandomStates(generators, torch.get_rng_state(), random.getstate(), np.random.get_state())

    def set_generators(self, states: "RandomStates") -> None:
        """Those that belong to the loader and its sampler go on from there."""
        there = len(states.generators)
        if there != len(self._generators):
            raise StateError(
                f"the state has {there} generators, but this loader and its sampler have {len(self._generators)}; "
                "give the same generator="
            )
        for each, state in zip(self._generators, states.generators, strict=True):
            _set_state_of(each, state)

    @contextmanager
    def as_then(self, states: "RandomStates") -> Iterator[None]:
        """Inside, all random states are as they were; the process's own are put back afterwards."""
        self.set_generators(states)
        before = RandomStates([], torch.get_rng_state(), random.getstate(), np.random.get_state())
        states.set_global()
        try:
            yield
        finally:
            before.set_global()

    def follow(self, before: "RandomStates", after: "RandomStates") -> None:
        """If the process's random states are as they were before, go on from those after."""
        if self.now().same_process(before):
            after.set_global()


@dataclass(frozen=True, eq=False)
class RandomStates:
    generators: list[Any]
    of_torch: Any = None
    of_random: Any = None
    of_numpy: Any = None

    def same_process(self, other: "RandomStates") -> bool:
        """Whether the states that are not of generators are the same."""
        return {**self.as_json, "generators": ()} == {**other.as_json, "generators": ()}

    def set_global(self) -> None:
        if self.of_torch is not None:
            torch.set_rng_state(self.of_torch)
            random.setstate(self.of_random)
            np.random.set_state(self.of_numpy)

    @cached_property
    def as_json(self) -> dict[str, Any]:
        """Kept: every state of an epoch has the same."""
        written: dict[str, Any] = {"generators": [_written(each) for each in self.generators]}
        if self.of_torch is not None:
            version, numbers, gauss = self.of_random
            kind, keys, *rest = self.of_numpy
            written |= {
                "torch": _text(self.of_torch.numpy()),
                "random": [version, _text(np.array(numbers, np.uint32)), gauss],
                "numpy": [kind, _text(keys), *rest],
            }
        return written

    @staticmethod
    def from_json(written: dict[str, Any]) -> "RandomStates":
        generators = [_read(each) for each in written["generators"]]
        if "torch" not in written:
            return RandomStates(generators)
        version, numbers, gauss = written["random"]
        kind, keys, *rest = written["numpy"]
        return RandomStates(
            generators,
            torch.from_numpy(_array(written["torch"], np.uint8)),
            (version, tuple(_array(numbers, np.uint32).tolist()), gauss),
            (kind, _array(keys, np.uint32), *rest),
        )


_GENERATORS = (torch.Generator, random.Random, np.random.Generator)


def _attributes(sampler: Any) -> list[Any]:
    return list(vars(sampler).values()) if hasattr(sampler, "__dict__") else []


def _state_of(generator: Any) -> Any:
    """A tensor, a dict or a tuple, by the kind of generator."""
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state_of(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _written(state: Any) -> Any:
    """For JSON: arrays and tensors as text with their type, tuples as lists that say so."""
    if isinstance(state, torch.Tensor):
        return {"tensor": _text(state.numpy())}
    if isinstance(state, np.ndarray):
        return {"array": [state.dtype.str, _text(state)]}
    if isinstance(state, tuple):
        return {"tuple": [_written(each) for each in state]}
    if isinstance(state, dict):
        return {"dict": {name: _written(each) for name, each in state.items()}}
    return state


def _read(written: Any) -> Any:
    match written:
        case {"tensor": text}:
            return torch.from_numpy(_array(text, np.uint8))
        case {"array": [kind, text]}:
            return _array(text, kind)
        case {"tuple": parts}:
            return tuple(_read(each) for each in parts)
        case {"dict": parts}:
            return {name: _read(each) for name, each in parts.items()}
    return written


def _text(values: Any) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _array(text: str, dtype: Any) -> Any:
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype)


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
    """Back to the epoch of a state."""
    sampler = _with_epoch(index_sampler)
    if sampler is not None and epoch is not None and sampler.epoch != epoch:
        _log.warning(
            "the sampler is in epoch %d and goes back to epoch %d, that of the state", sampler.epoch, epoch
        )
        sampler.set_epoch(epoch)
