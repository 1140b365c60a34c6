"""The first records of a dataset as a dataset of their own: to see how size affects speed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset, Histogram
from headrace.errors import SettingsError
from headrace.format.checksum import checksum
from headrace.format.fields import Field
from headrace.format.index import LengthTable, table_of
from headrace.format.ragged import Ragged
from headrace.format.shard import Column


def first_share(dataset: Dataset, share: float) -> Dataset:
    """The first records: a share, if at most 1, or else a number of records. Nothing is copied."""
    count = len(dataset)
    if not isinstance(share, int | float) or not 0 < share <= count:
        raise SettingsError(
            f"dataset_size={share!r}: must be a share above 0 and at most 1, or a number of records up to {count:,}"
        )
    wanted = max(1, round(share * count)) if share <= 1 else int(share)
    return dataset if wanted == count else Dataset(FirstRecords(dataset.source, wanted))


class FirstRecords:
    """A source with the parts that hold these records; the last part may be cut."""

    manifest = None

    def __init__(self, source: Any, records: int) -> None:
        self.name = f"the first {records:,} records of {source.name}"
        self.fields: Mapping[str, Field] = source.fields
        self._source, self._records = source, records
        left, self.part_records = records, []
        for each in source.part_records:
            if left > 0:
                self.part_records.append(min(each, left))
                left -= each

    @property
    def elements(self) -> Mapping[str, int]:
        return {name: sum(self.part_elements(name)) for name in self.fields}

    def part_elements(self, field: str) -> Sequence[int]:
        parts = (self.load_part(number)[field] for number in range(len(self.part_records)))
        return [_count_elements(column) for column in parts]

    @property
    def fingerprint(self) -> str:
        return checksum(f"{self._source.fingerprint} {self._records}".encode())

    def load_part(self, number: int) -> Mapping[str, Column]:
        part, count = self._source.load_part(number), self.part_records[number]
        if count == self._source.part_records[number]:
            whole: Mapping[str, Column] = part
            return whole
        return {name: _cut(part[name], count) for name in self.fields}

    def histogram(self, field: str) -> Histogram:
        return np.unique(self._lengths(field), return_counts=True)

    def length_table(self, field: str) -> LengthTable:
        return table_of(self._lengths(field))

    def _lengths(self, field: str) -> NDArray[np.int64]:
        parts = [self.load_part(number)[field] for number in range(len(self.part_records))]
        lengths = [part.lengths for part in parts if isinstance(part, Ragged)]
        return np.concatenate(lengths) if lengths else np.empty(0, np.int64)


def _count_elements(column: Column) -> int:
    if isinstance(column, Ragged):
        return int(column.offsets[-1] - column.offsets[0])
    return len(column)


def _cut(column: Column, count: int) -> Column:
    if isinstance(column, Ragged):
        offsets = np.asarray(column.offsets)[: count + 1]
        return Ragged(column.values, offsets)
    return column[:count]
