"""Where the records of one field lie in memory, part by part: what batches are copied from.

A part is mapped when one of its records is first needed. The addresses of all parts are in tables that the compiled
loops read, so that a batch from a thousand shards runs no Python code for each of them.

If a dataset has more than `most_parts` parts, only that many stay mapped: those used most recently. Code that plans a
copy does so inside `pinned`, and keeps the pins until the copy is made. Meanwhile the parts of the plan
stay mapped, even if the table has released them.

    with table.pinned() as pins:           # no part is unmapped
        address, more = table.locate(...)
    copy(address)
    del pins                               # now they may be
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset
from headrace.errors import CorruptError, FieldError
from headrace.fork_lock import fork_lock
from headrace.format.fields import Field
from headrace.format.ragged import Ragged
from headrace.order.distinct import distinct
from headrace.rows.kernel import loops
from headrace.rows.reference import TYPES
from headrace.store.maps import expect_random_reads

Pins = list[Any]
"""Keeps parts mapped as long as it exists."""


class PartTable:
    """For each part: its first record and element, and the addresses of its offsets and values.

    With `random_reads`, the operating system is asked not to read ahead.
    """

    def __init__(self, dataset: Dataset, field: str, random_reads: bool = False) -> None:
        self._dataset, self.field_name, self.random_reads = dataset, field, random_reads
        self.field: Field = dataset.fields[field]
        source = dataset.source
        self.first_record = _starts(source.part_records)
        elements = source.part_elements(field) if self.field.variable else source.part_records
        self.first_element = _starts(elements)
        self._elements = np.diff(self.first_element)
        self._offsets = np.zeros(len(elements), dtype=np.uint64)
        self._values = np.zeros(len(elements), dtype=np.uint64)
        self._loaded = np.zeros(len(elements), dtype=bool)
        self._loading = fork_lock()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        """The memory of the mapped parts, ordered from the least to the most recently used."""
        self._most = dataset.most_parts
        self._pins: Pins | None = None
        """The pins of the plan that is being made, if not all parts can stay mapped."""
        self.item_bytes = self.field.numpy_dtype.itemsize * int(np.prod(self.field.shape, dtype=np.int64))

    @property
    def records(self) -> int:
        return int(self.first_record[-1])

    @property
    def elements(self) -> int:
        return int(self.first_element[-1])

    @property
    def token_type(self) -> int:
        """The number of the stored type in `TYPES`."""
        if self.field.shape or self.field.dtype not in TYPES:
            raise FieldError(
                f"field {self.field_name!r} is {self.field.notation}: tokens must be whole numbers, without a shape"
            )
        return TYPES.index(self.field.dtype)

    @contextlib.contextmanager
    def pinned(self) -> Iterator[Pins]:
        """Inside this block no part is unmapped. The pins keep the parts mapped that were located in it."""
        if len(self._loaded) <= self._most:
            # All parts stay mapped as long as the table exists.
            yield [self._kept]
            return
        with self._loading:
            pins = self._pins = []
            try:
                yield pins
            finally:
                self._pins = None
                self._let_go()

    def parts_of(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """The part of each record. These parts are mapped when this returns."""
        parts = np.searchsorted(self.first_record, records, side="right") - 1
        self._load(parts)
        return parts

    def parts_at(self, elements: NDArray[np.int64]) -> NDArray[np.int64]:
        """The part that holds each element of the whole field."""
        parts = np.searchsorted(self.first_element, elements, side="right") - 1
        self._load(parts)
        return parts

    def extents(
        self, records: NDArray[np.int64], parts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each record begins and ends, counted in elements of its part."""
        begin, end = np.empty_like(records), np.empty_like(records)
        bad = loops.bounds(records, parts, self.first_record, self._offsets, self._elements, begin, end)
        if bad >= 0:
            raise CorruptError(
                f"{self._dataset.source.name}: the offsets of record {records[bad]} are damaged; run `headrace verify`"
            )
        return begin, end

    def locate(
        self,
        records: NDArray[np.int64],
        start: NDArray[np.int64],
        length: NDArray[np.int64],
        whole: NDArray[np.int64],
    ) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """The address of `length` elements of each record, from `start` on, and whether more elements follow.

        `whole` is the expected length of the record.
        """
        address, more = np.empty(len(records), dtype=np.uint64), np.empty(len(records), dtype=bool)
        tables = (self.first_record, self._offsets, self._values, self._elements, self.item_bytes)
        if self._pins is not None and self._are_there(records):
            self.parts_of(records)
        bad = loops.locate(records, start, length, whole, *tables, address, more)
        if bad >= 0 and self._are_there(records):
            # Most likely one of the parts has not been mapped yet.
            self.parts_of(records)
            bad = loops.locate(records, start, length, whole, *tables, address, more)
        if bad >= 0:
            raise CorruptError(
                f"{self._dataset.source.name}: record {records[bad]} does not have the {whole[bad]} elements that the "
                "index says; run `headrace verify`"
            )
        return address, more

    def _are_there(self, records: NDArray[np.int64]) -> bool:
        """Whether there are such records; a damaged index may name others."""
        return bool(records.min(initial=0) >= 0 and records.max(initial=-1) < self.records)

    def documents_at(self, elements: NDArray[np.int64], parts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The record that holds each element; elements are numbered within their part."""
        local = np.empty_like(elements)
        if loops.search(elements, parts, self.first_record, self._offsets, local) >= 0:
            raise CorruptError(f"{self._dataset.source.name}: the offsets are damaged; run `headrace verify`")
        return self.first_record[parts] + local

    def addresses(self, elements: NDArray[np.int64], parts: NDArray[np.int64]) -> NDArray[np.uint64]:
        return self._values[parts] + elements.astype(np.uint64) * np.uint64(self.item_bytes)

    def _load(self, parts: NDArray[np.int64]) -> None:
        if self._pins is not None:
            for number in distinct(parts):
                if not self._loaded[number]:
                    self._map(number)
                self._kept.move_to_end(number)
                self._pins.append(self._kept[number])
            return
        missing = parts[~self._loaded[parts]]
        if not len(missing):
            return
        with self._loading:
            for number in distinct(missing[~self._loaded[missing]]):
                self._map(number)

    def _map(self, number: int) -> None:
        part = self._dataset.part(number)
        values, offsets = _flat(part[self.field_name])
        if self.random_reads:
            expect_random_reads(values)
            expect_random_reads(values if offsets is None else offsets)
        # With the part itself: as long as it is used, the dataset shares it instead of loading it again.
        self._kept[number] = (part, values, offsets)
        self._values[number] = values.ctypes.data
        # Last, because to other threads an offset means that the part is mapped.
        self._offsets[number] = 0 if offsets is None else offsets.ctypes.data
        self._loaded[number] = True

    def _let_go(self) -> None:
        """Release the least recently used parts until no more than `_most` are mapped.

        A fork or an interrupt may come between any two of these lines: a part that is loaded is always kept.
        """
        while len(self._kept) > self._most:
            number = next(iter(self._kept))
            self._loaded[number] = False
            self._offsets[number] = self._values[number] = 0
            del self._kept[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return PartTable, (self._dataset, self.field_name, self.random_reads)


def _flat(column: Any) -> tuple[NDArray[Any], NDArray[np.uint64] | None]:
    """Values and offsets as the compiled loops need them: views, unless arrays in RAM are not contiguous."""
    if not isinstance(column, Ragged):
        return np.ascontiguousarray(column), None
    first, last = int(column.offsets[0]), int(column.offsets[-1])
    offsets = np.ascontiguousarray(column.offsets, dtype=np.uint64)
    # A Ragged may be a slice of a longer one.
    return np.ascontiguousarray(column.values[first:last]), offsets - np.uint64(first) if first else offsets


def _starts(counts: Any) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
