"""Arrays in RAM, with the same interface as a dataset on disk."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset, Histogram
from headrace.errors import SettingsError
from headrace.format.checksum import hasher
from headrace.format.fields import DTYPES, Field, FieldKind, parse_fields
from headrace.format.index import LengthTable, table_of
from headrace.format.ragged import Ragged
from headrace.format.shard import Column
from headrace.public import public


@public
def from_arrays(arrays: Mapping[str, Any]) -> Dataset:
    """A dataset over arrays in RAM, without copying them: `headrace.from_arrays({"x": X, "y": y})`.

    An array with one row for each record is a field of fixed shape; a `Ragged` or a list of arrays is a ragged
    field; a list of bytes is a bytes field. Pickling such a dataset pickles the arrays.
    """
    if not isinstance(arrays, Mapping) or not arrays:
        got = "an empty dict" if isinstance(arrays, Mapping) else type(arrays).__name__
        raise SettingsError(f"from_arrays got {got}: give a dict of arrays, like {{'x': X, 'y': y}}")
    return Dataset(ArraySource({name: as_column(name, value) for name, value in arrays.items()}))


def as_column(name: str, value: Any) -> tuple[Field, Column]:
    """Determine the field that a user's values make, and convert the values to that field's form."""
    if isinstance(value, Ragged):
        return _ragged_column(name, value)
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if is_list and all(isinstance(item, bytes) for item in value):
        return _bytes_column(value)
    if is_list and all(_is_array(item) for item in value):
        return _column_of_arrays(name, value)
    return _fixed_column(name, value)


def _ragged_column(name: str, value: Ragged) -> tuple[Field, Column]:
    value.check(name)
    field = _field(name, FieldKind.RAGGED, value.values)
    return field, Ragged(_little_endian(field, value.values), value.offsets)


def _bytes_column(items: Sequence[bytes]) -> tuple[Field, Column]:
    pieces = [np.frombuffer(item, dtype=np.uint8) for item in items]
    return Field(FieldKind.BYTES, "uint8"), Ragged.from_items(pieces, np.uint8)


def _column_of_arrays(name: str, arrays: Sequence[NDArray[Any]]) -> tuple[Field, Column]:
    # Concatenating arrays of different dtypes would silently widen or truncate their values.
    kinds = {(array.dtype, array.shape[1:]) for array in arrays}
    if len(kinds) > 1:
        described = sorted(f"{dtype} with elements of shape {shape}" for dtype, shape in kinds)
        listed = ", ".join(described[:4])
        raise SettingsError(f"arrays of {name!r} differ: {listed}; convert them to one dtype and shape")
    field = _field(name, FieldKind.RAGGED, arrays[0])
    return field, Ragged.from_items(list(arrays), field.numpy_dtype)


def _fixed_column(name: str, value: Any) -> tuple[Field, Column]:
    try:
        array = np.asarray(value)
    except ValueError:
        raise SettingsError(
            f"array {name!r} has rows of different lengths; give a list of NumPy arrays for a ragged field"
        ) from None
    if array.ndim == 0:
        raise SettingsError(f"array {name!r} is a single value; give an array with one row for each record")
    field = _field(name, FieldKind.FIXED, array)
    return field, _little_endian(field, array)


def _is_array(item: Any) -> bool:
    return isinstance(item, np.ndarray) and item.ndim > 0


def _little_endian(field: Field, values: Any) -> NDArray[Any]:
    """The same array, or a copy if it is big-endian, which frameworks refuse."""
    return np.asarray(values, dtype=field.numpy_dtype)


def _field(name: str, kind: FieldKind, values: Any) -> Field:
    if values.dtype.name not in DTYPES:
        raise SettingsError(
            f"array {name!r} has dtype {values.dtype}; convert it to one of {', '.join(DTYPES)}"
        )
    return Field(kind, values.dtype.name, values.shape[1:])


class ArraySource:
    manifest = None
    name = "arrays in RAM"

    def __init__(self, columns: Mapping[str, tuple[Field, Column]]) -> None:
        counts = {name: len(column) for name, (_, column) in columns.items()}
        if len(set(counts.values())) > 1:
            raise SettingsError(
                f"arrays of different lengths: {counts}; each must have one row for each record"
            )
        self.fields = parse_fields({name: field for name, (field, _) in columns.items()})
        self._columns = {name: _read_only(column) for name, (_, column) in columns.items()}
        self.part_records: Sequence[int] = [next(iter(counts.values()))]

    @property
    def elements(self) -> Mapping[str, int]:
        return {
            name: int(c.offsets[-1] - c.offsets[0]) if isinstance(c, Ragged) else len(c)
            for name, c in self._columns.items()
        }

    def part_elements(self, field: str) -> Sequence[int]:
        return [self.elements[field]]

    @property
    def fingerprint(self) -> str:
        digest = hasher()
        for name, column in self._columns.items():
            digest.update(f"{name}: {self.fields[name].notation};".encode())
            arrays = [column] if not isinstance(column, Ragged) else [_used(column), column.lengths]
            for array in arrays:
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return str(digest.hexdigest())

    def load_part(self, number: int) -> Mapping[str, Column]:
        return self._columns

    def histogram(self, field: str) -> Histogram:
        return np.unique(self._lengths(field), return_counts=True)

    def length_table(self, field: str) -> LengthTable:
        """The by-length table, computed from the lengths."""
        return table_of(self._lengths(field))

    def _lengths(self, field: str) -> NDArray[np.int64]:
        column = self._columns[field]
        return column.lengths if isinstance(column, Ragged) else np.empty(0, np.int64)


def _read_only(column: Column) -> Column:
    if isinstance(column, Ragged):
        return Ragged(_sealed(column.values), _sealed(np.asarray(column.offsets)))
    return _sealed(column)


def _sealed(array: NDArray[Any]) -> NDArray[Any]:
    # The flag of a plain view could be set back as long as the user's own array is writeable.
    return np.asarray(array.data.toreadonly())


def _used(column: Ragged) -> NDArray[Any]:
    """The values that belong to records: a Ragged may be a slice of a longer one."""
    return column.values[int(column.offsets[0]) : int(column.offsets[-1])]
