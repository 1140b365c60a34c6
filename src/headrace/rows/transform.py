"""A user's function on samples or batches, with random numbers that depend on the row and not on the worker."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError, SettingsError, StageError
from headrace.observe.counting import counted_as
from headrace.order.keys import derive
from headrace.order.steps import described_rows
from headrace.rows.buffers import BufferPool
from headrace.rows.sample_batches import length_of, split_columns, stack_samples, without_rows

Function = Callable[..., Any]


class Per(StrEnum):
    SAMPLE = "sample"
    BATCH = "batch"


@dataclass(frozen=True)
class Transform:
    function: Function
    per: Per

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SettingsError(f"map({self.function!r}): must be a function")
        if self.takes_generator:
            # Not only when a thread needs it: a fork in that moment would find it half imported.
            importlib.import_module("numpy.random")

    @property
    def name(self) -> str:
        return f"map({getattr(self.function, '__qualname__', type(self.function).__qualname__)})"

    @cached_property
    def takes_generator(self) -> bool:
        """Whether the function has a second parameter without a default, or one called `rng`."""
        try:
            parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):
            return False
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        needed = [p for p in positional if p.default is p.empty]
        return len(needed) > 1 or any(p.name == "rng" for p in positional[1:])

    def __call__(self, value: Any, key: np.uint64) -> Any:
        if not self.takes_generator:
            return self.function(value)
        return self.function(value, np.random.Generator(np.random.Philox(key=int(key))))


def apply_transforms(
    transforms: tuple[Transform, ...],
    content: Any,
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    pool: BufferPool,
    before: int = 0,
) -> dict[str, Any]:
    """Columns (a dict) or samples (a list of dicts) -> columns, through every function in turn.

    `positions` are those of the rows, for error messages; `before` is how many functions were applied already.
    """
    batch = _TransformedBatch(positions, pool)
    name = transforms[-1].name if transforms else "samples"
    with counted_as("transform"):
        for turn, transform in enumerate(transforms, before):
            # Each function draws its own random numbers.
            drawn = derive(keys, turn) if len(keys) else keys
            if transform.per is Per.SAMPLE:
                content = batch.map_samples(transform, content, drawn)
            else:
                content = batch.map_batch(transform, content, drawn)
        return batch.columns(name, content)


@dataclass(frozen=True)
class _TransformedBatch:
    """The rows at some positions of the stream, on their way through a user's functions."""

    positions: NDArray[np.int64]
    pool: BufferPool

    def map_samples(self, transform: Transform, content: Any, keys: NDArray[np.uint64]) -> list[Any]:
        samples = content
        if isinstance(content, dict):
            samples = _split(transform.name, content, len(self.positions))
        return [
            _run(transform, sample, key, described_rows((position,)))
            for sample, key, position in zip(samples, keys, self.positions, strict=True)
        ]

    def map_batch(self, transform: Transform, content: Any, keys: NDArray[np.uint64]) -> dict[str, Any]:
        rows = len(self.positions)
        columns = self.columns(transform.name, content)
        by_row = _fields_by_row(columns, rows)
        where = described_rows(self.positions)
        result = _run(transform, columns, keys[0], where)
        _check_rows(transform.name, by_row, result, rows, where)
        return result

    def columns(self, name: str, content: Any) -> dict[str, Any]:
        """The content as columns; `name` says in errors which function gave the samples."""
        if isinstance(content, dict):
            return content
        return _stack(name, content, self.pool, self.positions)


def _run(transform: Transform, value: Any, key: np.uint64, where: str) -> dict[str, Any]:
    try:
        result = transform(value, key)
    except Exception as error:
        raise StageError(f"{transform.name} failed on {where}: {type(error).__name__}: {error}") from error
    if not isinstance(result, Mapping):
        raise StageError(
            f"{transform.name} returned {type(result).__name__} for {where}; it must return a dict of fields"
        )
    return dict(result)


def run_without_rows(
    transform: Transform, columns: dict[str, Any], one_row: dict[str, Any]
) -> dict[str, Any]:
    """What a function of batches makes of `columns` without rows, with the fields and types of its result for one row.

    A function need not be able to take a batch without rows, unless it returns a value for the whole batch.
    """
    where = "a batch without rows"
    try:
        result = _run(transform, columns, np.uint64(0), where)
        _check_rows(transform.name, _fields_by_row(columns, 0), result, 0, where)
    except StageError as error:
        result, failure = {}, error
    try:
        return without_rows(one_row, result)
    except SettingsError as error:
        problem = error if result else failure
        raise StageError(
            f"{problem}. With drop_last=False, the last batch of an epoch has no rows on some ranks: let the function "
            "return the same fields without rows for it, or create the Loader with drop_last=True"
        ) from problem.__cause__


def _fields_by_row(columns: dict[str, Any], rows: int) -> list[str]:
    """The fields that have a value for each row."""
    return [
        name
        for name, column in columns.items()
        if length_of(column) == rows and f"{name}_offsets" not in columns
    ]


def _check_rows(name: str, fields: list[str], columns: dict[str, Any], rows: int, where: str) -> None:
    """Check that a function has lost no rows: they would count as seen, and never be trained on."""
    found = ((field, length_of(column)) for field, column in columns.items())
    lengths = {field: length for field, length in found if length is not None}
    for field in fields:
        if lengths.get(field, rows) != rows:
            raise StageError(
                f"{name} returned {lengths[field]} values of {field!r} for {where}; it must return {rows}"
            )
    kept = (_may_hold(columns[field], length, rows) for field, length in lengths.items())
    if lengths and not any(kept):
        listed = ", ".join(f"{length} values of {field!r}" for field, length in lengths.items())
        raise StageError(f"{name} returned {listed} for {where}; it must return {rows} of at least one field")


def _may_hold(column: Any, length: int, rows: int) -> bool:
    """Whether a field can hold all rows: one after the other, or all of them flattened into one."""
    is_flattened = length == 1 and len(getattr(column, "shape", ())) > 1
    return length >= rows or is_flattened


def _split(name: str, columns: dict[str, Any], rows: int) -> list[dict[str, Any]]:
    try:
        return split_columns(columns, rows)
    except HeadraceError as error:
        raise StageError(f"{name} takes one sample at a time: {error}") from error


def _stack(name: str, samples: list[Any], pool: BufferPool, positions: NDArray[np.int64]) -> dict[str, Any]:
    try:
        return stack_samples(samples, pool)
    except HeadraceError as error:
        raise StageError(
            f"{name}, in the batch that begins at row {positions[0]} of the stream: {error}"
        ) from error
