"""Batches of samples: columns gathered straight from memory, or samples that are stacked after transforms."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.observe.counting import counted_as, now, spent
from headrace.order.distinct import distinct
from headrace.order.stream import Places
from headrace.rows.buffers import BufferPool, Spec
from headrace.rows.kernel import loops
from headrace.rows.sample_rows import RecordRows, SampleRows


def gather_columns(sources: Sequence[RecordRows], places: Places, pool: BufferPool) -> dict[str, Any]:
    """The records at these places as columns: stacked arrays for fixed fields, values and `<name>_offsets` for ragged
    fields, and lists for bytes.
    """
    with counted_as("gather"):
        return _gathered(sources, places, pool)


def _gathered(sources: Sequence[RecordRows], places: Places, pool: BufferPool) -> dict[str, Any]:
    rows = len(places.row)
    plans, specs, pins = {}, [], []
    for name, table in sources[0].tables.items():
        address, count = np.empty(rows, dtype=np.uint64), np.empty(rows, dtype=np.int64)
        for number in distinct(places.source):
            where = np.flatnonzero(places.source == number)
            address[where], count[where], kept = sources[number].extents(name, places.row[where])
            pins.append(kept)
        plans[name] = (address, count, table)
        specs += _specs(name, table.field, count, rows)
    arrays: dict[str, Any] = pool.arrays(specs)
    for name, (address, count, table) in plans.items():
        flat = arrays[name].reshape(-1).view(np.uint8)
        loops.copy(address, count * table.item_bytes, flat)
        if table.field.variable:
            offsets = arrays[f"{name}_offsets"]
            offsets[0] = 0
            np.cumsum(count, out=offsets[1:])
        if sources[0].is_bytes(name):
            ends = arrays.pop(f"{name}_offsets").tolist()
            arrays[name] = [flat[a:b].tobytes() for a, b in zip(ends[:-1], ends[1:], strict=True)]
    # Everything is copied, so the records may be unmapped.
    del pins
    return arrays


def _specs(name: str, field: Any, count: NDArray[np.int64], rows: int) -> list[Spec]:
    if not field.variable:
        return [(name, field.numpy_dtype, (rows, *field.shape))]
    values: Spec = (name, field.numpy_dtype, (int(count.sum()), *field.shape))
    return [values, (f"{name}_offsets", np.int64, (rows + 1,))]


def fetch_samples(sources: Sequence[SampleRows], places: Places) -> list[Any]:
    """The samples at these places, in the order of the places."""
    samples: list[Any] = [None] * len(places.row)
    begun = now()
    for number in distinct(places.source):
        where = np.flatnonzero(places.source == number)
        for place, sample in zip(where.tolist(), sources[number].samples(places.row[where]), strict=True):
            samples[place] = sample
    spent("read", begun)
    return samples


def split_columns(columns: dict[str, Any], rows: int) -> list[dict[str, Any]]:
    """One dict for each row. Fields without a value for each row (cu_seqlens, max_seqlen) are left out."""
    samples: list[dict[str, Any]] = [{} for _ in range(rows)]
    for name, column in columns.items():
        values = _by_row(name, column, columns, rows)
        for sample, value in zip(samples, values, strict=True) if values is not None else ():
            sample[name] = value
    return samples


def _by_row(name: str, column: Any, columns: dict[str, Any], rows: int) -> Any:
    offsets = columns.get(f"{name}_offsets")
    if offsets is not None and len(offsets) == rows + 1:
        return [column[a:b] for a, b in itertools.pairwise(offsets.tolist())]
    if name.endswith("_offsets") and name.removesuffix("_offsets") in columns:
        return None
    if name == "cu_seqlens" or not isinstance(column, np.ndarray | list):
        return None
    if len(column) != rows:
        raise SettingsError(
            f"field {name!r} has length {len(column)} in a batch of {rows} rows; it must have one value for each row"
        )
    return column


def stack_samples(samples: Sequence[Any], pool: BufferPool) -> dict[str, Any]:
    """Columns from samples with the same fields: arrays and numbers are stacked, all other values become lists."""
    if not samples:
        return {}
    names, begun = list(samples[0]), now()
    _check_same_fields(samples, names)
    columns: dict[str, Any] = {name: [sample[name] for sample in samples] for name in names}
    stacked: dict[str, list[NDArray[Any]]] = {}
    specs: list[Spec] = []
    for name, column in columns.items():
        if _stacks(column):
            arrays = stacked[name] = [_array(value) for value in column]
            shape = (len(arrays), *_one_shape(name, arrays))
            specs.append((name, np.result_type(*arrays), shape))
    room = pool.arrays(specs)
    for name, arrays in stacked.items():
        columns[name] = np.stack(arrays, out=room[name])
    spent("collate", begun)
    return columns


def _check_same_fields(samples: Sequence[Any], names: list[str]) -> None:
    for number, sample in enumerate(samples):
        if list(sample) != names and set(sample) != set(names):
            raise SettingsError(
                f"sample {number} of the batch has the fields {sorted(map(str, sample))}, but the first has "
                f"{sorted(map(str, names))}; every sample must have the same fields"
            )


def _stacks(column: list[Any]) -> bool:
    return all(
        isinstance(value, np.ndarray | np.generic | int | float | complex) or hasattr(value, "__array__")
        for value in column
    )


def _array(value: Any) -> NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise SettingsError(
            f"a value of dtype {array.dtype} cannot be put into a batch; convert it to numbers"
        )
    return array


def _one_shape(name: str, column: list[NDArray[Any]]) -> tuple[int, ...]:
    first = column[0].shape
    for number, array in enumerate(column):
        if array.shape != first:
            raise SettingsError(
                f"field {name!r} of sample {number} has shape {array.shape}, but that of the first has {first}: the "
                "samples of a batch are stacked, so give them the same shape (pad or crop them)"
            )
    return first


def without_rows(one_row: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """The fields, types and shapes of a batch of one row, with no rows.

    `made` holds what is known better: fields that were made without rows, if they are of the same type.
    """
    emptied: dict[str, Any] = {}
    for name, column in one_row.items():
        if name in made and _kind(made[name]) == _kind(column):
            emptied[name] = made[name]
        elif name == "max_seqlen":
            emptied[name] = 0
        elif length_of(column) is None:
            raise SettingsError(f"field {name!r} has one value for the whole batch, and none without rows")
        else:
            # Bounds have one entry more than there are rows.
            is_bounds = name.removesuffix("_offsets") in one_row.keys() - {name}
            entries = 1 if is_bounds or (name == "cu_seqlens" and column.ndim == 1) else 0
            emptied[name] = column[:entries]
    return emptied


def _kind(value: Any) -> tuple[Any, ...]:
    return type(value), getattr(value, "dtype", None), len(getattr(value, "shape", ()))


def length_of(column: Any) -> int | None:
    """How many values an array, a tensor or a list has; None for anything else."""
    shape = getattr(column, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(column) if isinstance(column, list | tuple) else None
