"""Samples become a batch in memory that is used again.

PyTorch's `default_collate` stacks tensors, in a worker into new shared memory each time. Here a worker lends it a
room: memory for the batch that it is making. The way in is the table that PyTorch offers for extending
`default_collate`, so that a user's own `collate_fn` which calls it gets the room too.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data._utils.collate import (
    collate,
    collate_tensor_fn,
    default_collate,
    default_collate_fn_map,
)

from headrace.torch.memory import tensor_in


class Room(Protocol):
    def memory(self, size: int) -> NDArray[np.uint8] | None:
        """So many bytes, aligned, for the batch that is being made; None if there is no room for them."""


class _Lent(threading.local):
    room: Room | None = None


_lent = _Lent()


@contextmanager
def lend(room: Room) -> Iterator[None]:
    """What this thread collates inside goes into the room."""
    if default_collate_fn_map.get(Tensor) is collate_tensor_fn:
        default_collate_fn_map[Tensor] = _stack
    _lent.room = room
    try:
        yield
    finally:
        _lent.room = None


def _stack(batch: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    room, first = _lent.room, batch[0]
    if room is not None and type(first) is Tensor and first.layout is torch.strided and not first.is_nested:
        if first.device.type != "cpu":
            return torch.stack(batch)
        # What cannot be stacked, PyTorch shall say below.
        with suppress(RuntimeError, TypeError):
            return torch.stack(batch, out=_place_for(batch, first, room))
    return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)


def _place_for(batch: list[Tensor], first: Tensor, room: Room) -> Tensor:
    shape = (len(batch), *first.shape)
    memory = room.memory(first.element_size() * first.numel() * len(batch)) if first.numel() else None
    if memory is None:
        # Never without a place: then dtypes would decide another way, by how large a batch is.
        return torch.empty(shape, dtype=first.dtype)
    return tensor_in(memory).view(first.dtype).view(shape)


class _Dataclasses(type):
    def __instancecheck__(cls, thing: Any) -> bool:
        return hasattr(type(thing), "__dataclass_fields__") and not isinstance(thing, Mapping | Sequence)


class Dataclass(metaclass=_Dataclasses):
    """What every instance of a dataclass is an instance of, if PyTorch would not know what to do with it."""


def _collate_dataclass(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    first = batch[0]
    names = [field.name for field in dataclasses.fields(first)]
    # Not its constructor, which may compute or refuse: the batch has the samples' fields and nothing else.
    result = object.__new__(type(first))
    for name in names:
        values = collate([getattr(sample, name) for sample in batch], collate_fn_map=collate_fn_map)
        object.__setattr__(result, name, values)
    return result


class CollateDefault:
    """PyTorch's `default_collate`, and dataclasses field by field, once there are any."""

    def __init__(self) -> None:
        self._dataclasses = False

    def __call__(self, batch: list[Any]) -> Any:
        if not self._dataclasses:
            try:
                return default_collate(batch)
            except TypeError:
                if not _holds_dataclass(batch[0]):
                    raise
            self._dataclasses = True
        return collate(batch, collate_fn_map={**default_collate_fn_map, Dataclass: _collate_dataclass})


def _holds_dataclass(sample: Any) -> bool:
    if isinstance(sample, Mapping):
        return any(_holds_dataclass(value) for value in sample.values())
    if isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        return any(_holds_dataclass(value) for value in sample)
    return isinstance(sample, Dataclass)


def collate_for(chosen: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return CollateDefault() if chosen is default_collate else chosen
