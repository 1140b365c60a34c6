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

from headrace.dataset.dataset import Dataset, Part
from headrace.dataset.sparse import Need, SparseBytes, fill
from headrace.dataset.unit_part import UnitPart
from headrace.dataset.units import UnitSource
from headrace.errors import CorruptError, FieldError
from headrace.fork_lock import fork_lock
from headrace.format.fields import Field
from headrace.format.ragged import Ragged
from headrace.format.shard import Column
from headrace.observe.counting import counted_as
from headrace.order.distinct import distinct
from headrace.rows.kernel import loops
from headrace.rows.reference import TYPES
from headrace.store.maps import expect_random_reads

_OPENED_AT_ONCE = 128
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
        self.item_bytes = self.field.element_bytes
        self._units = source if isinstance(source, UnitSource) else None
        self._may_be_sparse = self._units is not None and self._units.is_sparse
        self.continues = np.zeros(len(elements), dtype=bool)
        """Whether a part goes on in the next one: units of one shard do, and the next one's first token follows a
        unit in memory."""
        if self._units is not None:
            shard = self._units.units.shard_of
            self.continues[:-1] = shard[1:] == shard[:-1]
        self.waits = True
        """Whether to wait for units that were asked for ahead, instead of reading single rows of them meanwhile."""
        self._sparse: dict[int, SparseBytes] = {}
        """The parts of which perhaps not all data is there, by number."""

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
        if len(self._loaded) <= self._most and not self._may_be_sparse:
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
        # The token after a stretch is a label.
        self.read(address, length + more)
        return address, more

    def _are_there(self, records: NDArray[np.int64]) -> bool:
        """Whether there are such records; a damaged index may name others."""
        return bool(records.min(initial=0) >= 0 and records.max(initial=-1) < self.records)

    def lengths_of(self, parts: list[int]) -> list[NDArray[np.int64]]:
        """The lengths of the records of some parts; their data need not be there."""
        self._load(np.array(parts, dtype=np.int64))
        found = []
        for number in parts:
            offsets = self._kept[number][2]
            found.append(np.diff(offsets.astype(np.int64)) if offsets is not None else np.empty(0, np.int64))
        return found

    def all_lengths(self) -> Iterator[NDArray[np.int64]]:
        """The lengths of the records of all parts, some parts at a time."""
        at_once = min(_OPENED_AT_ONCE, self._most)
        for first in range(0, len(self._loaded), at_once):
            numbers = list(range(first, min(first + at_once, len(self._loaded))))
            with self.pinned():
                found = self.lengths_of(numbers)
            yield from found

    def documents_at(self, elements: NDArray[np.int64], parts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The record that holds each element; elements are numbered within their part."""
        local = np.empty_like(elements)
        if loops.search(elements, parts, self.first_record, self._offsets, local) >= 0:
            raise CorruptError(f"{self._dataset.source.name}: the offsets are damaged; run `headrace verify`")
        return self.first_record[parts] + local

    def addresses(self, elements: NDArray[np.int64], parts: NDArray[np.int64]) -> NDArray[np.uint64]:
        return self._values[parts] + elements.astype(np.uint64) * np.uint64(self.item_bytes)

    def read(self, address: NDArray[np.uint64], elements: NDArray[np.int64]) -> None:
        """Make sure that so many elements at these addresses are there, if not all parts are whole."""
        if not self._sparse or self._units is None:
            return
        needs: list[Need] = []
        sizes = elements * self.item_bytes
        for sparse in list(self._sparse.values()):
            begin = address.astype(np.int64) - sparse.content.ctypes.data
            inside = np.flatnonzero((begin >= 0) & (begin < len(sparse.content)))
            stop = np.minimum(begin[inside] + sizes[inside], len(sparse.content))
            needs += ((sparse, *each) for each in zip(begin[inside].tolist(), stop.tolist(), strict=True))
        if needs:
            with counted_as("fetch"):
                fill(self._units.reads, needs)

    def _load(self, parts: NDArray[np.int64]) -> None:
        if self._pins is not None:
            self._forget_sparse(parts)
            self._open_units(distinct(parts[~self._loaded[parts]]))
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
            numbers = distinct(missing[~self._loaded[missing]])
            self._open_units(numbers)
            for number in numbers:
                self._map(number)

    def _open_units(self, numbers: list[int]) -> None:
        """Open all units at once that are to be mapped, instead of one after another."""
        if self._units is not None and self._may_be_sparse and numbers:
            parts = [self._dataset.part(number) for number in numbers]
            with counted_as("fetch"):
                units = [part for part in parts if isinstance(part, UnitPart)]
                self._units.open_sparse(units, self.field_name, self.waits)

    def _map(self, number: int) -> None:
        part = self._dataset.part(number)
        values, offsets = _flat(self._column(part, number))
        if self.random_reads:
            expect_random_reads(values)
            expect_random_reads(values if offsets is None else offsets)
        # With the part itself: as long as it is used, the dataset shares it instead of loading it again.
        self._kept[number] = (part, values, offsets)
        self._values[number] = values.ctypes.data
        # Last, because to other threads an offset means that the part is mapped.
        self._offsets[number] = 0 if offsets is None else offsets.ctypes.data
        self._loaded[number] = True

    def _column(self, part: Part, number: int) -> Column:
        if not self._may_be_sparse or not isinstance(part, UnitPart):
            return part[self.field_name]
        field = part.sparse(self.field_name)
        if field.sparse is not None:
            self._sparse[number] = field.sparse
        return field.column

    def _forget_sparse(self, wanted: NDArray[np.int64]) -> None:
        """Let go of sparse parts that have arrived whole in the meantime; plans that use them have pinned them. Those
        that are wanted now are waited for, if they are on their way."""
        for number in list(self._sparse):
            part = self._kept[number][0]
            if self.waits and number in wanted:
                with counted_as("fetch"):
                    part.wait_for_ahead()
            if part.sparse(self.field_name).sparse is None:
                self._forget(number)

    def _let_go(self) -> None:
        """Release the least recently used parts until no more than `_most` are mapped.

        A fork or an interrupt may come between any two of these lines: a part that is loaded is always kept.
        """
        while len(self._kept) > self._most:
            self._forget(next(iter(self._kept)))

    def _forget(self, number: int) -> None:
        self._loaded[number] = False
        self._offsets[number] = self._values[number] = 0
        self._sparse.pop(number, None)
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
