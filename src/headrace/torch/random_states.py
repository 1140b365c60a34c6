"""What a sampler may draw random numbers from: generators, and the random states of `torch`, `random` and NumPy.

A sampler that begins again with the states that it began with gives the same indices again.
"""

import base64
import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from headrace.errors import StateError

_DRAW_NOTHING = (SequentialSampler, DistributedSampler, _InfiniteConstantSampler)
"""Their indices depend on no random state but their own arguments."""


class PrivateRandom:
    """The process's random states as a loader has them to itself once it was resumed.

    The states of the process that resumes have nothing to do with those of the process that saved the state. A script
    that seeds itself when it starts would shuffle the next epoch as it shuffled the first.
    """

    def __init__(self) -> None:
        self.states: RandomStates | None = None


class Randomness:
    """The random states that a loader's sampler may draw from: of generators, and of the process."""

    def __init__(self, generator: Any, index_sampler: Any, private: PrivateRandom | None = None) -> None:
        inner = getattr(index_sampler, "sampler", None)
        found = [generator, *_attributes(index_sampler), *_attributes(inner)]
        self._generators: list[Any] = []
        for each in found:
            if isinstance(each, _GENERATORS) and not any(each is other for other in self._generators):
                self._generators.append(each)
        sampler = inner if type(index_sampler) is BatchSampler else index_sampler
        self._global = type(sampler) not in _DRAW_NOTHING
        self._private = private

    @property
    def is_private(self) -> bool:
        """Whether an epoch begins with random states that are the loader's own."""
        return self._private is not None and self._private.states is not None

    def now(self) -> "RandomStates":
        """What an epoch that begins now begins with."""
        generators = [_state_of(each) for each in self._generators]
        if not self._global:
            return RandomStates(generators)
        process = self._private.states if self._private is not None else None
        return replace(process or _of_process(), generators=generators)

    def of_process(self) -> "RandomStates":
        """Those that the process has now, if the sampler may draw from them."""
        return _of_process() if self._global else RandomStates([])

    def check(self, states: "RandomStates") -> None:
        there = len(states.generators)
        if there != len(self._generators):
            raise StateError(
                f"the state has {there} generators, but this loader and its sampler have {len(self._generators)}; "
                "give the same generator="
            )
        for each, state in zip(self._generators, states.generators, strict=True):
            with _damage_as_errors():
                _set_state_of(copy.deepcopy(each), state)

    def set_generators(self, states: "RandomStates") -> None:
        """Those that belong to the loader and its sampler go on from there."""
        self.check(states)
        for each, state in zip(self._generators, states.generators, strict=True):
            _set_state_of(each, state)

    def keep(self, states: "RandomStates") -> None:
        """From now on, epochs begin with the states of the process as they were then."""
        if self._private is not None and states.of_torch is not None:
            self._private.states = replace(states, generators=[])

    @contextmanager
    def private(self) -> Iterator[None]:
        """Inside, the process has the loader's own random states, if there are any."""
        if self._private is None or self._private.states is None:
            yield
            return
        with _process_as(self._private.states):
            yield
            self.keep(_of_process())

    @contextmanager
    def as_then(self, states: "RandomStates") -> Iterator[None]:
        """Inside, all random states are as they were; the process's own are put back afterwards."""
        self.set_generators(states)
        with _process_as(states):
            yield
            if self._global:
                self.keep(_of_process())

    def follow(self, before: "RandomStates", after: "RandomStates") -> None:
        """If the process's random states are as they were before, go on from those after."""
        if self._global and _of_process().same_process(before):
            after.set_global()


def _of_process() -> "RandomStates":
    return RandomStates([], torch.get_rng_state(), random.getstate(), np.random.get_state())


@contextmanager
def _process_as(states: "RandomStates") -> Iterator[None]:
    """Inside, the process's random states are these."""
    before = _of_process()
    states.set_global()
    try:
        yield
    finally:
        before.set_global()


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
    def from_json(written: Any) -> "RandomStates":
        """StateError if what was written is no random state."""
        with _damage_as_errors():
            states = RandomStates._read(written)
            if states.of_torch is not None:
                torch.Generator().set_state(states.of_torch)
                random.Random().setstate(states.of_random)
                np.random.RandomState().set_state(states.of_numpy)
        return states

    @staticmethod
    def _read(written: Any) -> "RandomStates":
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


@contextmanager
def _damage_as_errors() -> Iterator[None]:
    try:
        yield
    except StateError:
        raise
    except Exception as error:  # each kind of generator has its own way of refusing a state
        raise StateError(
            f"the random states in this state are damaged ({type(error).__name__}: {error}); use another one"
        ) from None


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
