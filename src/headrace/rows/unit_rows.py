"""Rows of tokens that each come from one unit, so that reading a row needs no other unit.

How many rows a unit has must be known for all units before the first row is: the row at any position depends on it.
These counts are stored with the dataset for the usual `seq_len`, or else made from the lengths of all documents
(`unit_counts.py`). How a unit's documents are packed into its rows is only worked out when one of them is needed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CorruptError
from headrace.fork_lock import fork_lock
from headrace.format.index import table_of
from headrace.order.distinct import distinct
from headrace.order.keys import derive
from headrace.pack.documents import DocumentPacking, strategy_of
from headrace.pack.overlong import Overlong
from headrace.pack.packing import Packing
from headrace.rows.kernel import look_up, pack_groups, plan_best_fit
from headrace.rows.parts import PartTable
from headrace.rows.token_rows import PackingReport, Stretches, WindowRows

_PACKED_UNITS_KEPT = 512


@dataclass(frozen=True)
class _PackedUnit:
    """A unit's rows. For each length: the length, and where in `order` the documents of that length begin."""

    documents: DocumentPacking
    lengths: NDArray[np.int64]
    first_place: NDArray[np.int64]
    order: NDArray[np.int64]


class UnitDocumentRows:
    """Documents packed within their unit: by best fit, or one in each row. `unit_rows` counts the rows of each unit."""

    def __init__(
        self,
        table: PartTable,
        seq_len: int,
        packing: Packing,
        overlong: Overlong,
        unit_rows: NDArray[np.int64],
    ) -> None:
        self.table, self._seq_len, self._overlong = table, seq_len, overlong
        self._strategy = strategy_of(packing, plan_best_fit)
        self.unit_rows = unit_rows
        self._first_row = np.concatenate([[0], np.cumsum(unit_rows)])
        self._packed: OrderedDict[int, _PackedUnit] = OrderedDict()
        self._packing = fork_lock()

    @property
    def rows(self) -> int:
        return int(self._first_row[-1])

    def units_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The unit of each row."""
        return np.searchsorted(self._first_row, rows, side="right") - 1

    def stretches(self, rows: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Stretches:
        table = self.table
        unit = self.units_of(rows)
        numbers = distinct(unit)
        which = np.searchsorted(numbers, unit)
        inner = None if keys is None else derive(keys, unit)
        with table.pinned() as pins:
            packed = self._packed_units(numbers)
            documents = [each.documents for each in packed]
            pieces = pack_groups(documents, which, rows - self._first_row[unit], inner)
            of_unit = which[pieces.row]
            place = look_up([each.first_place for each in packed], of_unit, pieces.length_index) + pieces.nth
            whole = look_up([each.lengths for each in packed], of_unit, pieces.length_index)
            record = look_up([each.order for each in packed], of_unit, place)
            record += table.first_record[np.array(numbers, dtype=np.int64)][of_unit]
            address, more = table.locate(record, pieces.start, pieces.length, whole)
        if self._overlong is not Overlong.SPLIT:
            more[:] = False
        types = np.full(len(record), table.token_type, dtype=np.uint8)
        return Stretches(pieces.row, pieces.length, address, types, more, record, pieces.start, pins)

    def _packed_units(self, numbers: Sequence[int]) -> list[_PackedUnit]:
        with self._packing:
            missing = [number for number in numbers if number not in self._packed]
            for number, lengths in zip(missing, self.table.lengths_of(missing), strict=True):
                self._packed[number] = self._pack(number, lengths)
            for number in numbers:
                self._packed.move_to_end(number)
            found = [self._packed[number] for number in numbers]
            while len(self._packed) > max(_PACKED_UNITS_KEPT, len(numbers)):
                self._packed.popitem(last=False)
        return found

    def _pack(self, number: int, lengths: NDArray[np.int64]) -> _PackedUnit:
        table = table_of(lengths)
        documents = self._strategy(table.lengths, table.counts, self._seq_len, self._overlong)
        if documents.rows != self.unit_rows[number]:
            raise CorruptError(
                f"unit {number} has {documents.rows} rows of {self._seq_len} tokens, but the dataset says "
                f"{self.unit_rows[number]}; run `headrace verify`"
            )
        return _PackedUnit(documents, table.lengths, table.starts[:-1], table.order)

    def report(self) -> PackingReport:
        """What an epoch's rows hold. If long documents are not split, this reads the lengths of all documents."""
        tokens, documents_cut = self.table.elements, 0
        if self._overlong is not Overlong.SPLIT:
            tokens, documents_cut = self._kept()
        places = self.rows * self._seq_len
        cut = self.table.elements - tokens
        return PackingReport(self.rows, self._seq_len, tokens, places - tokens, cut, documents_cut)

    def _kept(self) -> tuple[int, int]:
        """How many tokens rows hold if long documents are truncated or dropped, and how many documents those are."""
        most = self._seq_len if self._overlong is Overlong.TRUNCATE else 0
        tokens = documents_cut = 0
        for lengths in self.table.all_lengths():
            is_long = lengths > self._seq_len
            tokens += int(np.where(is_long, most, lengths).sum())
            documents_cut += int(is_long.sum())
        return tokens, documents_cut


class UnitWindowRows(WindowRows):
    """Windows that end where their unit does: the last one of each unit may be shorter."""

    def __init__(self, table: PartTable, seq_len: int, boundaries: bool, align: bool) -> None:
        super().__init__(table, seq_len, boundaries, align)
        self.unit_rows: NDArray[np.int64] = -(-np.diff(table.first_element) // seq_len)
        self._first_row = np.concatenate([[0], np.cumsum(self.unit_rows)])

    @property
    def rows(self) -> int:
        return int(self._first_row[-1])

    def units_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._first_row, rows, side="right") - 1

    def _windows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        unit = self.units_of(rows)
        first, last = self.table.first_element[unit], self.table.first_element[unit + 1]
        begin = first + (rows - self._first_row[unit]) * self._seq_len
        end = np.minimum(begin + self._seq_len, last)
        if not self._align:
            return begin, end
        begin, following = self._snap_within(begin, last), self._snap_within(end, last)
        return begin, np.minimum(begin + self._seq_len, following)

    def _snap_within(self, places: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
        """Like `_snap`, but no document begins where the unit ends."""
        snapped = places.copy()
        inside = np.flatnonzero(places < last)
        found = self._snap(places[inside])
        snapped[inside] = np.where(found < last[inside], found, places[inside])
        return snapped
