"""Rows that are not packed: a dataset's records, or the samples of any object with a length and numbered items."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset
from headrace.dataset.units import UnitSource
from headrace.errors import FieldError, SettingsError
from headrace.format.fields import FieldKind
from headrace.rows.parts import PartTable, Pins


class SampleRows(Protocol):
    @property
    def rows(self) -> int: ...
    def samples(self, rows: NDArray[np.int64]) -> list[Any]: ...


class RecordRows:
    """A dataset's records. Their columns are gathered without a Python object for each record."""

    def __init__(self, dataset: Dataset, fields: Sequence[str] | None, random_reads: bool = False) -> None:
        self._dataset = dataset
        names = list(dataset.fields) if fields is None else list(fields)
        unknown = [name for name in names if name not in dataset.fields]
        if unknown:
            missing, there = (", ".join(map(repr, each)) for each in (unknown, dataset.fields))
            raise FieldError(f"fields={tuple(names)}: the dataset has no {missing}; its fields are {there}")
        for name in names:
            if dataset.fields[name].variable and f"{name}_offsets" in names:
                raise SettingsError(
                    f"field '{name}_offsets': a batch holds the offsets of {name!r} under that name; leave one out"
                )
        self.tables = {name: PartTable(dataset, name, random_reads) for name in names}

    @property
    def rows(self) -> int:
        return len(self._dataset)

    @property
    def unit_rows(self) -> NDArray[np.int64] | None:
        """How many records each unit has; None if the dataset was not opened by units."""
        source = self._dataset.source
        return np.diff(source.units.first_record) if isinstance(source, UnitSource) else None

    def units_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The unit of each record."""
        first_record = next(iter(self.tables.values())).first_record
        return np.searchsorted(first_record, rows, side="right") - 1

    def samples(self, rows: NDArray[np.int64]) -> list[Any]:
        return [
            {name: record[name] for name in self.tables}
            for record in self._dataset.__getitems__(rows.tolist())
        ]

    def extents(
        self, name: str, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64], Pins]:
        """The address of each record of a field, its number of elements, and the pins that keep it mapped."""
        table = self.tables[name]
        with table.pinned() as pins:
            parts = table.parts_of(rows)
            if not table.field.variable:
                begin, count = rows - table.first_record[parts], np.ones(len(rows), dtype=np.int64)
            else:
                begin, end = table.extents(rows, parts)
                count = end - begin
            address = table.addresses(begin, parts)
            table.read(address, count)
            return address, count, pins

    def is_bytes(self, name: str) -> bool:
        return self.tables[name].field.kind is FieldKind.BYTES


class ObjectRows:
    """A user's own map-style dataset."""

    def __init__(self, data: Any) -> None:
        self._data = data

    @property
    def rows(self) -> int:
        return len(self._data)

    def samples(self, rows: NDArray[np.int64]) -> list[Any]:
        numbers = rows.tolist()
        many = getattr(self._data, "__getitems__", None)
        samples = list(many(numbers)) if many is not None else [self._data[number] for number in numbers]
        if len(samples) != len(numbers):
            raise SettingsError(
                f"__getitems__ returned {len(samples)} samples for {len(numbers)} numbers; it must return one for each"
            )
        return [_as_fields(sample) for sample in samples]


def _as_fields(sample: Any) -> dict[str, Any]:
    """Name the values of a sample that is not a mapping: `data`, or `field0`, `field1`, ... for a tuple."""
    if isinstance(sample, Mapping):
        return dict(sample)
    if isinstance(sample, tuple | list):
        return {f"field{number}": value for number, value in enumerate(sample)}
    return {"data": sample}


def own_fingerprint(data: Any) -> str | None:
    """The fingerprint that the data itself has, if any."""
    own = getattr(data, "fingerprint", None)
    return own if isinstance(own, str) else None


def object_fingerprint(data: Any) -> str:
    """The data's own fingerprint, or else its type and length."""
    return own_fingerprint(data) or f"{type(data).__module__}.{type(data).__qualname__}, {len(data)} rows"
