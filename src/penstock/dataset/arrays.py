"""Arrays that are already in RAM, behind the same interface as a dataset on disk."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.dataset.dataset import Dataset, Histogram
from penstock.errors import SettingsError
from penstock.format.checksum import hasher
from penstock.format.fields import DTYPES, Field, FieldKind, parse_fields
from penstock.format.ragged import Ragged
from penstock.format.shard import Column


def from_arrays(arrays: Mapping[str, Any]) -> Dataset:
    """A dataset over arrays in RAM, without copying them: `penstock.from_arrays({"x": X, "y": y})`.

    An array with one row a record is a field of fixed shape; a `Ragged` or a list of arrays is a ragged field;
    a list of bytes is a bytes field. Pickling such a dataset pickles the arrays.
    """
    if not isinstance(arrays, Mapping) or not arrays:
        raise SettingsError(f"from_arrays got {type(arrays).__name__}: give a dict of arrays, like {{'x': X, 'y': y}}")
    return Dataset(ArraySource({name: as_column(name, value) for name, value in arrays.items()}))


def as_column(name: str, value: Any) -> tuple[Field, Column]:
    """Find out which field a user's values make, and put them in that field's form."""
    if isinstance(value, Ragged):
        return _field(name, FieldKind.RAGGED, value.values), value
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, bytes) for item in value):
        pieces = [np.frombuffer(item, dtype=np.uint8) for item in value]
        return Field(FieldKind.BYTES, "uint8"), Ragged.from_items(pieces, np.uint8)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, np.ndarray) and item.ndim for item in value):
        ragged = Ragged.from_items(list(value), value[0].dtype)
        return _field(name, FieldKind.RAGGED, ragged.values), ragged
    array = np.asarray(value)
    if array.ndim == 0:
        raise SettingsError(f"array {name!r} is a single value; it needs a row for each record")
    return _field(name, FieldKind.FIXED, array), array


def _field(name: str, kind: FieldKind, values: Any) -> Field:
    if values.dtype.name not in DTYPES:
        raise SettingsError(f"array {name!r} has dtype {values.dtype}; fields take {', '.join(DTYPES)}")
    return Field(kind, values.dtype.name, values.shape[1:])


class ArraySource:
    manifest = None
    name = "arrays in RAM"

    def __init__(self, columns: Mapping[str, tuple[Field, Column]]) -> None:
        counts = {name: len(column) for name, (_, column) in columns.items()}
        if len(set(counts.values())) > 1:
            raise SettingsError(f"arrays of different lengths: {counts}; each needs one row a record")
        self.fields = parse_fields({name: field for name, (field, _) in columns.items()})
        self._columns = {name: _read_only(column) for name, (_, column) in columns.items()}
        self.part_records: Sequence[int] = [next(iter(counts.values()))]

    @property
    def elements(self) -> Mapping[str, int]:
        return {name: len(c.values) if isinstance(c, Ragged) else len(c) for name, c in self._columns.items()}

    @property
    def fingerprint(self) -> str:
        digest = hasher()
        for name, column in self._columns.items():
            digest.update(f"{name}: {self.fields[name].notation};".encode())
            arrays = [column.values, column.offsets] if isinstance(column, Ragged) else [column]
            for array in arrays:
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return str(digest.hexdigest())

    def load_part(self, number: int) -> Mapping[str, Column]:
        return self._columns

    def histogram(self, field: str) -> Histogram:
        column = self._columns[field]
        lengths = column.lengths if isinstance(column, Ragged) else np.empty(0, np.int64)
        return np.unique(lengths, return_counts=True)


def _read_only(column: Column) -> Column:
    if isinstance(column, Ragged):
        return Ragged(_read_only(column.values), column.offsets)  # type: ignore[arg-type]
    view = column.view()
    view.flags.writeable = False
    return view
