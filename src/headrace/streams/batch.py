"""Items combined into batches: dicts into a dict of columns, tuples into a tuple of columns.

    {"n": 1, "name": "a"}, {"n": 2, "name": "b"}    ->    {"n": array([1, 2]), "name": ["a", "b"]}

A column of numbers becomes an array: bool, int64, or float64 if there is a float among them. Arrays of equal shape and
dtype are stacked. Anything else stays a list, also integers that an array could not hold exactly.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import SettingsError, StageError
from headrace.readers.numbers import is_exact_float
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
        """Where the batch that is being made begins, if there is one."""

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
    if all(isinstance(item, dict) for item in items):
        return _combine_dicts(items)
    if all(isinstance(item, tuple) and len(item) == len(items[0]) for item in items):
        return tuple(_column(list(values)) for values in zip(*items, strict=True))
    return _column(items)


def _combine_dicts(items: list[dict[Any, Any]]) -> dict[Any, Any]:
    names = items[0].keys()
    for number, item in enumerate(items):
        if item.keys() != names:
            raise StageError(
                f"record {number} of a batch has the fields {sorted(map(str, item))}, but the first one has "
                f"{sorted(map(str, names))}; all records of a batch must have the same fields. Choose some with "
                "fields=, or fill in missing ones with map()"
            )
    return {name: _column([item[name] for item in items]) for name in names}


def _column(values: list[Any]) -> Any:
    kinds = set(map(type, values))
    if kinds == {np.ndarray}:
        return _stacked(values)
    if len(kinds) == 1 and issubclass(type(values[0]), np.generic):
        return np.array(values)
    dtype = _number_dtype(kinds)
    if dtype is None:
        return values
    if dtype is np.float64 and not all(type(value) is float or is_exact_float(value) for value in values):
        return values  # an array would round an integer
    try:
        return np.array(values, dtype=dtype)
    except OverflowError:
        return values


def _stacked(arrays: list[Any]) -> Any:
    """One array if all have the same shape and dtype; otherwise the list as it is."""
    layouts = {(array.shape, array.dtype) for array in arrays}
    if len(layouts) > 1 or arrays[0].dtype == object:
        return arrays
    return np.stack(arrays)


def _number_dtype(kinds: set[type]) -> type[np.generic] | None:
    """The dtype of a column of Python numbers of these types; None if they are not all numbers."""
    if kinds == {bool}:
        return np.bool_
    if kinds == {int}:
        return np.int64
    return np.float64 if kinds <= {int, float} else None
