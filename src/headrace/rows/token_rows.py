"""Rows of tokens, for any row numbers: which stretches of which documents they hold, and where in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset
from headrace.errors import CorruptError
from headrace.format.index import Histogram, LengthTable
from headrace.format.ragged import Ragged
from headrace.format.shard import Shard
from headrace.order.distinct import distinct
from headrace.order.keys import derive
from headrace.pack.documents import STRATEGIES, DocumentPacking
from headrace.pack.overlong import Overlong
from headrace.pack.packing import Packing
from headrace.pack.room import SegmentCounts
from headrace.rows.kernel import pack
from headrace.rows.parts import PartTable
from headrace.store.maps import expect_random_reads

_ROWS_AT_ONCE = 2**16


@dataclass(frozen=True)
class Stretches:
    """Stretch i is `length[i]` tokens at an address, for row `row[i]` of those asked for.

    Rows ascend, and the stretches of a row are in order, without gaps.
    """

    row: NDArray[np.int64]
    length: NDArray[np.int64]
    address: NDArray[np.uint64]
    type: NDArray[np.uint8]
    more: NDArray[np.bool_]
    """Whether the next token of the document follows directly in memory."""
    record: NDArray[np.int64]
    start: NDArray[np.int64]
    """Where in its record the stretch begins."""
    pins: Sequence[Any] = ()
    """Keeps the memory at the addresses mapped, as long as the stretches exist."""

    @staticmethod
    def none() -> "Stretches":
        numbers = np.empty(0, dtype=np.int64)
        return Stretches(
            numbers,
            numbers,
            numbers.astype(np.uint64),
            numbers.astype(np.uint8),
            numbers.astype(bool),
            numbers,
            numbers,
        )

    @staticmethod
    def join(parts: Sequence["Stretches"]) -> "Stretches":
        """Stretches of different rows, put in the order of the rows."""
        if len(parts) == 1:
            return parts[0]
        columns = [
            np.concatenate(column) for column in zip(*(part._columns() for part in parts), strict=True)
        ]
        order = np.argsort(columns[0], kind="stable")
        ordered: Any = [column[order] for column in columns]
        return replace(Stretches(*ordered), pins=[part.pins for part in parts])

    def in_rows(self, rows: NDArray[np.int64]) -> "Stretches":
        """The same stretches, with row i renamed to rows[i]."""
        return replace(self, row=rows[self.row])

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self.row, self.length, self.address, self.type, self.more, self.record, self.start


@dataclass(frozen=True)
class PackingReport:
    """What an epoch's rows hold: `tokens` used, `padded` places, and tokens `cut` away."""

    rows: int
    seq_len: int
    tokens: int
    padded: int
    cut: int
    documents_cut: int | None
    """None for aligned windows that cut tokens, since they do not count documents."""

    @property
    def efficiency(self) -> float:
        return self.tokens / (self.rows * self.seq_len) if self.rows else 1.0


class TokenRows(Protocol):
    @property
    def rows(self) -> int: ...
    def stretches(self, rows: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Stretches: ...
    def report(self) -> PackingReport: ...


@dataclass(frozen=True)
class _Group:
    """Parts that are packed together: their lengths, and where their documents begin among those of each length."""

    documents: DocumentPacking
    length_index: NDArray[np.int64]
    base: NDArray[np.int64]


class DocumentRows:
    """Rows of whole documents or pieces of them: packed by best fit, or with one document per row."""

    def __init__(
        self,
        dataset: Dataset,
        table: PartTable,
        seq_len: int,
        packing: Packing,
        overlong: Overlong = Overlong.SPLIT,
        group_shards: int | None = None,
    ) -> None:
        self._table, self._seq_len, self._overlong = table, seq_len, overlong
        self._strategy = STRATEGIES[packing]
        self._index: LengthTable = dataset.source.length_table(table.field_name)
        # Documents of one length are spread over the dataset, whatever the order of the rows.
        expect_random_reads(self._index.order)
        self._index_starts = self._index.starts.astype(np.int64)
        self._index_lengths = self._index.lengths.astype(np.int64)
        parts = len(dataset.source.part_records)
        if group_shards is None or group_shards >= parts:
            every = np.arange(len(self._index.lengths))
            self._groups = [self._group(every, self._index.counts, np.zeros(len(every), dtype=np.int64))]
        else:
            self._groups = list(self._grouped(dataset, group_shards))
        self._first_row = np.concatenate([[0], np.cumsum([group.documents.rows for group in self._groups])])
        self._tokens_total = table.elements

    @property
    def rows(self) -> int:
        return int(self._first_row[-1])

    @property
    def segments(self) -> SegmentCounts:
        """How many segments (documents and padding) the rows have."""
        groups = [group.documents.segments for group in self._groups]
        return SegmentCounts(
            np.concatenate([group.segments for group in groups]),
            np.concatenate([group.rows for group in groups]),
        )

    def stretches(self, rows: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Stretches:
        if len(self._groups) == 1:
            return self._of_group(0, rows, keys)
        group = np.searchsorted(self._first_row, rows, side="right") - 1
        parts = []
        for number in distinct(group):
            where = np.flatnonzero(group == number)
            inner = None if keys is None else derive(keys[where], number)
            parts.append(self._of_group(number, rows[where] - self._first_row[number], inner).in_rows(where))
        return Stretches.join(parts)

    def _of_group(self, number: int, rows: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Stretches:
        group, table = self._groups[number], self._table
        pieces = pack(group.documents, rows, keys)
        length_index = group.length_index[pieces.length_index]
        place = self._index_starts[length_index] + group.base[pieces.length_index] + pieces.nth
        record = self._index.order[place].astype(np.int64)
        whole = self._index_lengths[length_index]
        with table.pinned() as pins:
            address, more = table.locate(record, pieces.start, pieces.length, whole)
        if self._overlong is not Overlong.SPLIT:
            more[:] = False
        types = np.full(len(record), table.token_type, dtype=np.uint8)
        return Stretches(pieces.row, pieces.length, address, types, more, record, pieces.start, pins)

    def _group(self, index: NDArray[Any], counts: NDArray[np.int64], base: NDArray[np.int64]) -> _Group:
        lengths = self._index.lengths[index]
        return _Group(self._strategy(lengths, counts, self._seq_len, self._overlong), index, base)

    def _grouped(self, dataset: Dataset, group_shards: int) -> Iterator[_Group]:
        """Groups of parts. In the index, documents of one length are in the order of the parts, so those of a group
        come after all documents of that length in earlier parts.
        """
        before = np.zeros(len(self._index.lengths), dtype=np.int64)
        parts = len(dataset.source.part_records)
        for first in range(0, parts, group_shards):
            counts = np.zeros_like(before)
            for number in range(first, min(first + group_shards, parts)):
                distinct, count = _part_histogram(dataset, number, self._table.field_name)
                where = np.minimum(np.searchsorted(self._index.lengths, distinct), len(before) - 1)
                if not np.array_equal(self._index.lengths[where], distinct):
                    raise self._other_histogram(dataset)
                counts[where] += count
            index = np.flatnonzero(counts)
            yield self._group(index, counts[index], before[index])
            before += counts
        if not np.array_equal(before, self._index.counts):
            raise self._other_histogram(dataset)

    @staticmethod
    def _other_histogram(dataset: Dataset) -> CorruptError:
        name = dataset.source.name
        return CorruptError(
            f"{name}: the index does not match the histograms of the shards; run `headrace verify`"
        )

    def report(self) -> PackingReport:
        documents = [group.documents for group in self._groups]
        tokens = sum(each.tokens for each in documents)
        return PackingReport(
            rows=self.rows,
            seq_len=self._seq_len,
            tokens=tokens,
            padded=self.rows * self._seq_len - tokens,
            cut=self._tokens_total - tokens,
            documents_cut=sum(each.documents_cut for each in documents),
        )


def _part_histogram(dataset: Dataset, number: int, field: str) -> Histogram:
    part = dataset.part(number)
    if isinstance(part, Shard):
        return part.histogram(field)
    column = part[field]
    lengths = column.lengths if isinstance(column, Ragged) else np.empty(0, dtype=np.int64)
    return np.unique(lengths, return_counts=True)


class WindowRows:
    """All tokens end to end, cut every `seq_len`: row k holds tokens [k seq_len, (k + 1) seq_len).

    `boundaries` splits the stretches where documents end; without it they end only where a shard does. `align` starts
    each row with the first document that begins in its window, if there is one. What comes before that document goes to
    the previous row, as far as there is room.
    """

    def __init__(self, table: PartTable, seq_len: int, boundaries: bool, align: bool) -> None:
        self._table, self._seq_len, self._boundaries, self._align = table, seq_len, boundaries, align

    @property
    def rows(self) -> int:
        return -(-self._table.elements // self._seq_len)

    def stretches(self, rows: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Stretches:
        with self._table.pinned() as pins:
            return replace(self._pinned_stretches(rows), pins=pins)

    def _pinned_stretches(self, rows: NDArray[np.int64]) -> Stretches:
        begin, end = self._windows(rows)
        row, parts, begin, end = self._by_part(begin, end)
        if self._boundaries:
            return self._by_document(row, parts, begin, end)
        length, table = end - begin, self._table
        more = end < np.diff(table.first_element)[parts]
        types = np.full(len(row), table.token_type, dtype=np.uint8)
        record = np.full(len(row), -1, dtype=np.int64)
        return Stretches(row, length, table.addresses(begin, parts), types, more, record, begin)

    def _windows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first token of each row, and the one after its last."""
        total = self._table.elements
        begin = rows * self._seq_len
        end = np.minimum(begin + self._seq_len, total)
        if not self._align:
            return begin, end
        begin, following = self._snap(begin), self._snap(end)
        return begin, np.minimum(begin + self._seq_len, following)

    def _snap(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first document start in the window at each place, or the place itself if there is none."""
        inside = np.flatnonzero(places < self._table.elements)
        parts = self._table.parts_at(places[inside])
        first = self._table.first_element[parts]
        local = places[inside] - first
        begin, end = self._table.extents(self._table.documents_at(local, parts), parts)
        start = first + np.where(begin == local, begin, end)
        snapped = places.copy()
        near = (start < places[inside] + self._seq_len) & (start < self._table.elements)
        snapped[inside[near]] = start[near]
        return np.minimum(snapped, self._table.elements)

    def _by_part(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Split windows where parts end. Returns row, part, and begin and end within the part."""
        table = self._table
        some = np.flatnonzero(end > begin)
        begin, end = begin[some], end[some]
        first, last = table.parts_at(begin), table.parts_at(end - 1)
        count = last - first + 1
        row = np.repeat(some, count)
        parts = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(len(row))
        start = table.first_element[parts]
        begin = np.maximum(np.repeat(begin, count), start)
        end = np.minimum(np.repeat(end, count), table.first_element[parts + 1])
        some = np.flatnonzero(end > begin)
        table.parts_at(begin[some])
        return row[some], parts[some], (begin - start)[some], (end - start)[some]

    def _by_document(
        self,
        row: NDArray[np.int64],
        parts: NDArray[np.int64],
        begin: NDArray[np.int64],
        end: NDArray[np.int64],
    ) -> Stretches:
        table = self._table
        first, last = table.documents_at(begin, parts), table.documents_at(end - 1, parts)
        count = last - first + 1
        record = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
        parts = np.repeat(parts, count)
        document_begin, document_end = table.extents(record, parts)
        from_, to = (
            np.maximum(np.repeat(begin, count), document_begin),
            np.minimum(np.repeat(end, count), document_end),
        )
        some = np.flatnonzero(to > from_)
        from_, to, parts, record = from_[some], to[some], parts[some], record[some]
        document_begin, document_end = document_begin[some], document_end[some]
        types = np.full(len(some), table.token_type, dtype=np.uint8)
        return Stretches(
            np.repeat(row, count)[some],
            to - from_,
            table.addresses(from_, parts),
            types,
            to < document_end,
            record,
            from_ - document_begin,
        )

    def report(self) -> PackingReport:
        """An exact report. For aligned windows this looks up where every row begins."""
        tokens, rows = self._table.elements, self.rows
        if self._align:
            tokens = 0
            for first in range(0, rows, _ROWS_AT_ONCE):
                with self._table.pinned():
                    begin, end = self._windows(np.arange(first, min(first + _ROWS_AT_ONCE, rows)))
                tokens += int((end - begin).clip(min=0).sum())
        cut = self._table.elements - tokens
        documents_cut = None if cut else 0
        return PackingReport(rows, self._seq_len, tokens, rows * self._seq_len - tokens, cut, documents_cut)
