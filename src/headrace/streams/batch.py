"""Items put together: of dicts, a dict of columns; of tuples, a tuple of columns.

    {"n": 1, "name": "a"}, {"n": 2, "name": "b"}    ->    {"n": array([1, 2]), "name": ["a", "b"]}

A column of numbers is an array: bool, int64, or float64 if there is a float among them. Arrays of one shape and dtype
are stacked. Anything else stays a list.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import SettingsError, StageError
from headrace.streams.bad import StreamBadRecords
from headrace.streams.cursor import Cursor, OpenAt, State


@dataclass(frozen=True)
class BatchOperation:
    size: int
    drop_last: bool

    def __post_init__(self) -> None:
        if not isinstance(self.drop_last, bool):
            raise SettingsError(f"drop_last={self.drop_last!r}: must be True or False")

    def describe(self) -> str:
        return f"batch({self.size}{', drop_last=True' if self.drop_last else ''})"

    def open(self, open_below: OpenAt, state: State, bad: StreamBadRecords) -> Cursor:
        return _BatchCursor(open_below(state), self)


class _BatchCursor:
    def __init__(self, below: Cursor, batch: BatchOperation) -> None:
        self._below, self._batch = below, batch
        self._before: State = None
        """Where the batch begins that is being made, if one is."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._before = self._below.state()
        items = list(itertools.islice(self._below, self._batch.size))
        if not items or (self._batch.drop_last and len(items) < self._batch.size):
            raise StopIteration
        made = put_together(items)
        self._before = None
        return made

    def state(self) -> State:
        return self._below.state() if self._before is None else self._before


def put_together(items: list[Any]) -> Any:
    if not all(isinstance(item, dict) for item in items):
        tuples = all(isinstance(item, tuple) and len(item) == len(items[0]) for item in items)
        return tuple(_column(list(each)) for each in zip(*items, strict=True)) if tuples else _column(items)
    names = items[0].keys()
    for number, item in enumerate(items):
        if item.keys() != names:
            raise StageError(
                f"record {number} of a batch has the fields {sorted(map(str, item))}, the first one has "
                f"{sorted(map(str, names))}: all must have the same. Choose some with fields=, or fill them with map()"
            )
    return {name: _column([item[name] for item in items]) for name in names}


def _column(values: list[Any]) -> Any:
    kinds = set(map(type, values))
    if kinds == {np.ndarray}:
        alike = len({(value.shape, value.dtype) for value in values}) == 1
        return np.stack(values) if alike and values[0].dtype != object else values
    if all(issubclass(kind, np.generic) for kind in kinds) and len(kinds) == 1:
        return np.array(values)
    dtype = np.bool_ if kinds == {bool} else np.int64 if kinds == {int} else np.float64
    if not (kinds == {bool} or kinds <= {int, float}):
        return values
    try:
        return np.array(values, dtype=dtype)
    except OverflowError:
        return values
