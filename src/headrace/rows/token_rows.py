"""Rows of tokens, for any row numbers: which stretches of which documents they hold, and where in memory."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset
from headrace.dataset.units import UnitSource
from headrace.errors import CorruptError
from headrace.format.index import Histogram, LengthTable
from headrace.format.ragged import Ragged
from headrace.format.shard import Shard
from headrace.order.distinct import distinct
from headrace.order.keys import derive
from headrace.pack.documents import DocumentPacking, strategy_of
from headrace.pack.overlong import Overlong
from headrace.pack.packing import Packing
from headrace.pack.room import SegmentCounts
from headrace.rows.kernel import look_up, loops, pack_groups, plan_best_fit
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
    table: PartTable

    @property
    def rows(self) -> int: ...
    def stretches(self, rows: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Stretches: ...
    def report(self) -> PackingReport: ...


@dataclass(frozen=True)
class _Group:
    """Parts that are packed together. For each of their lengths: the length, and where in the index by length the
    documents of these parts begin."""

    documents: DocumentPacking
    lengths: NDArray[np.int64]
    first_place: NDArray[np.int64]


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
        self.table, self._seq_len, self._overlong = table, seq_len, overlong
        self._strategy = strategy_of(packing, plan_best_fit)
        self._index: LengthTable = dataset.source.length_table(table.field_name)
        # Documents of one length are spread over the dataset, whatever the order of the rows.
        expect_random_reads(self._index.order)
        self._index_starts = self._index.starts.astype(np.int64)
        self._index_lengths = self._index.lengths.astype(np.int64)
        if self._index.counts.min(initial=0) < 0:
            raise self._other_histogram(dataset)
        if group_shards is None or group_shards >= _shard_count(dataset):
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
    def unit_rows(self) -> NDArray[np.int64]:
        """How many rows each group has: the order by units goes by groups, if there are any."""
        return np.diff(self._first_row)

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
            return self._of_groups(self._groups, np.zeros(len(rows), dtype=np.int64), rows, keys)
        group = np.searchsorted(self._first_row, rows, side="right") - 1
        touched = distinct(group)
        which = np.searchsorted(touched, group)
        if keys is not None:
            keys = derive(keys, group)
        return self._of_groups(
            [self._groups[number] for number in touched], which, rows - self._first_row[group], keys
        )

    def _of_groups(
        self,
        groups: list[_Group],
        which: NDArray[np.int64],
        rows: NDArray[np.int64],
        keys: NDArray[np.uint64] | None,
    ) -> Stretches:
        """The stretches of the rows `rows[i]` of `groups[which[i]]`."""
        table = self.table
        pieces = pack_groups([group.documents for group in groups], which, rows, keys)
        of_group = which[pieces.row]
        first_place = look_up([group.first_place for group in groups], of_group, pieces.length_index)
        whole = look_up([group.lengths for group in groups], of_group, pieces.length_index)
        record = self._index.order[first_place + pieces.nth].astype(np.int64)
        with table.pinned() as pins:
            address, more = table.locate(record, pieces.start, pieces.length, whole)
        if self._overlong is not Overlong.SPLIT:
            more[:] = False
        types = np.full(len(record), table.token_type, dtype=np.uint8)
        return Stretches(pieces.row, pieces.length, address, types, more, record, pieces.start, pins)

    def _group(self, index: NDArray[Any], counts: NDArray[np.int64], base: NDArray[np.int64]) -> _Group:
        lengths = self._index_lengths[index]
        documents = self._strategy(lengths, counts, self._seq_len, self._overlong)
        return _Group(documents, lengths, self._index_starts[index] + base)

    def _grouped(self, dataset: Dataset, group_shards: int) -> Iterator[_Group]:
        """Groups of shards. In the index, documents of one length are in the order of the shards, so those of a group
        come after all documents of that length in earlier shards.
        """
        before = np.zeros(len(self._index.lengths), dtype=np.int64)
        histograms = _shard_histograms(dataset, self.table.field_name)
        while group := list(itertools.islice(histograms, group_shards)):
            counts = np.zeros_like(before)
            for lengths, count in group:
                where = np.minimum(np.searchsorted(self._index.lengths, lengths), len(before) - 1)
                if not np.array_equal(self._index.lengths[where], lengths):
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


def _shard_count(dataset: Dataset) -> int:
    source = dataset.source
    return len(source.manifest.shards if isinstance(source, UnitSource) else source.part_records)


def _shard_histograms(dataset: Dataset, field: str) -> Iterator[Histogram]:
    """The histogram of each shard; of other data, of each part."""
    source = dataset.source
    if isinstance(source, UnitSource):
        yield from source.shard_histograms(field)
        return
    for number in range(len(source.part_records)):
        part = dataset.part(number)
        if isinstance(part, Shard):
            yield part.histogram(field)
            continue
        column = part[field]
        lengths = column.lengths if isinstance(column, Ragged) else np.empty(0, dtype=np.int64)
        yield np.unique(lengths, return_counts=True)


class WindowRows:
    """All tokens end to end, cut every `seq_len`: row k holds tokens [k seq_len, (k + 1) seq_len).

    `boundaries` splits the stretches where documents end; without it they end only where a shard does. `align` starts
    each row with the first document that begins in its window, if there is one. What comes before that document goes to
    the previous row, as far as there is room.
    """

    def __init__(self, table: PartTable, seq_len: int, boundaries: bool, align: bool) -> None:
        self.table, self._seq_len, self._boundaries, self._align = table, seq_len, boundaries, align

    @property
    def rows(self) -> int:
        return -(-self.table.elements // self._seq_len)

    def units_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The part in which each row begins."""
        return np.searchsorted(self.table.first_element, rows * self._seq_len, side="right") - 1

    def stretches(self, rows: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Stretches:
        with self.table.pinned() as pins:
            found = self._pinned_stretches(rows)
            return replace(found, pins=[pins, found.pins])

    def _pinned_stretches(self, rows: NDArray[np.int64]) -> Stretches:
        begin, end = self._windows(rows)
        row, parts, begin, end = self._by_part(begin, end)
        if self._boundaries:
            return self._by_document(row, parts, begin, end)
        length, table = end - begin, self.table
        more = (end < np.diff(table.first_element)[parts]) | table.continues[parts]
        types = np.full(len(row), table.token_type, dtype=np.uint8)
        record = np.full(len(row), -1, dtype=np.int64)
        address = table.addresses(begin, parts)
        table.read(address, length + more)
        found = Stretches(row, length, address, types, more, record, begin)
        goes_on = table.continues[parts[:-1]] & (row[1:] == row[:-1])
        return self._joined(found, goes_on) if goes_on.any() else found

    def _joined(self, found: Stretches, goes_on: NDArray[np.bool_]) -> Stretches:
        """Stretches that go on in the next part as if they were one, which they are in a copy of their own."""
        is_first = np.append(True, ~goes_on)
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(is_first)) - 1
        address, item_bytes, copies = found.address[firsts], self.table.item_bytes, []
        for place in np.flatnonzero(lasts > firsts).tolist():
            run = slice(firsts[place], lasts[place] + 1)
            sizes = found.length[run].copy()
            sizes[-1] += found.more[lasts[place]]
            copies.append(np.empty(int(sizes.sum()) * item_bytes, dtype=np.uint8))
            loops.copy(found.address[run], sizes * item_bytes, copies[-1])
            address[place] = copies[-1].ctypes.data
        return Stretches(
            found.row[firsts],
            np.add.reduceat(found.length, firsts),
            address,
            found.type[firsts],
            found.more[lasts],
            found.record[firsts],
            found.start[firsts],
            copies,
        )

    def _windows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first token of each row, and the one after its last."""
        total = self.table.elements
        begin = rows * self._seq_len
        end = np.minimum(begin + self._seq_len, total)
        if not self._align:
            return begin, end
        begin, following = self._snap(begin), self._snap(end)
        return begin, np.minimum(begin + self._seq_len, following)

    def _snap(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first document start in the window at each place, or the place itself if there is none."""
        inside = np.flatnonzero(places < self.table.elements)
        parts = self.table.parts_at(places[inside])
        first = self.table.first_element[parts]
        local = places[inside] - first
        begin, end = self.table.extents(self.table.documents_at(local, parts), parts)
        start = first + np.where(begin == local, begin, end)
        snapped = places.copy()
        near = (start < places[inside] + self._seq_len) & (start < self.table.elements)
        snapped[inside[near]] = start[near]
        return np.minimum(snapped, self.table.elements)

    def _by_part(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Split windows where parts end. Returns row, part, and begin and end within the part."""
        table = self.table
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
        table = self.table
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
        address, more = table.addresses(from_, parts), to < document_end
        table.read(address, to - from_ + more)
        return Stretches(
            np.repeat(row, count)[some],
            to - from_,
            address,
            types,
            more,
            record,
            from_ - document_begin,
        )

    def report(self) -> PackingReport:
        """An exact report. For aligned windows this looks up where every row begins."""
        tokens, rows = self.table.elements, self.rows
        if self._align:
            tokens = 0
            for first in range(0, rows, _ROWS_AT_ONCE):
                with self.table.pinned():
                    begin, end = self._windows(np.arange(first, min(first + _ROWS_AT_ONCE, rows)))
                tokens += int((end - begin).clip(min=0).sum())
        cut = self.table.elements - tokens
        documents_cut = None if cut else 0
        return PackingReport(rows, self._seq_len, tokens, rows * self._seq_len - tokens, cut, documents_cut)
