"""The dataset's index: for each ragged field, all records in one order, by length.

    lengths  u32         the distinct lengths, ascending
    starts   u64         one more: records of length lengths[i] take places starts[i] to starts[i + 1]
    order    u32 or u64  record numbers by length; of equal lengths, ascending

So the j-th record of length lengths[i] is `order[starts[i] + j]`. With lengths 7 3 in the first shard and 7 0 in
the second, the three are [0 3 7], [0 1 2 4] and [3 1 0 2].

It is made by counting: the histograms of the shards say where each length begins, and then the records are put in
their places, shard by shard, so that a billion records need little memory.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CorruptError
from headrace.format.container import Chunks, Header, StoredFile, write_container
from headrace.store.files import no_space
from headrace.store.store import Store

_MERGED_AT_ONCE = 2**20
_PIECE_RECORDS = 2**22

Histogram = tuple[NDArray[Any], NDArray[Any]]
"""Distinct lengths, ascending, and how many records have each."""


@dataclass(frozen=True)
class LengthTable:
    lengths: NDArray[Any]
    starts: NDArray[Any]
    order: NDArray[Any]

    @property
    def counts(self) -> NDArray[np.int64]:
        return np.diff(self.starts).astype(np.int64)


def table_of(lengths: NDArray[np.int64]) -> LengthTable:
    """The table of records with these lengths, made in memory."""
    order = stable_order(lengths)
    ordered = lengths[order]
    # Not numpy.unique, which would sort a second time, and imports a module that threads must not import.
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    return LengthTable(ordered[first], np.append(first, len(order)), order)


def histogram(lengths: NDArray[Any]) -> Histogram:
    distinct, counts = np.unique(lengths, return_counts=True)
    return distinct.astype("<u4"), counts.astype("<u4")


def merge_histograms(histograms: Iterable[Histogram]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The `lengths` and `starts` of all records together."""
    lengths, counts = np.empty(0, dtype="<u4"), np.empty(0, dtype=np.int64)
    waiting: list[Histogram] = []

    def merge() -> Histogram:
        every = np.concatenate([lengths, *(h[0] for h in waiting)])
        distinct, which = np.unique(every, return_inverse=True)
        summed = np.zeros(len(distinct), dtype=np.int64)
        np.add.at(summed, which, np.concatenate([counts, *(h[1].astype(np.int64) for h in waiting)]))
        return distinct.astype("<u4"), summed

    for distinct, count in histograms:
        # Copies: a view would keep its shard mapped.
        waiting.append((distinct.copy(), count.copy()))
        if sum(len(each[0]) for each in waiting) > _MERGED_AT_ONCE:
            lengths, counts = merge()
            waiting = []
    lengths, counts = merge()
    return lengths, np.concatenate([[0], np.cumsum(counts)]).astype("<u8")


def places_by_length(
    lengths: NDArray[Any], starts: NDArray[Any], shards: Iterable[NDArray[Any]]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each shard (given by its lengths), the places of its records in the order, and their numbers."""
    next_place = starts[:-1].astype(np.int64)
    first = 0
    for shard in shards:
        order = stable_order(shard)
        distinct, begins, counts = np.unique(shard[order], return_index=True, return_counts=True)
        which = np.searchsorted(lengths, distinct)
        yield np.repeat(next_place[which] - begins, counts) + np.arange(len(order)), order + first
        next_place[which] += counts
        first += len(order)


def stable_order(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """A stable argsort in two passes of NumPy's radix sort, which exists for 16 bits only."""
    if not len(lengths) or lengths.max() < 2**16:
        return np.argsort(lengths.astype(np.uint16), kind="stable")
    by_low = np.argsort((lengths & 0xFFFF).astype(np.uint16), kind="stable")
    return by_low[np.argsort((lengths >> 16).astype(np.uint16)[by_low], kind="stable")]


def number_dtype(records: int) -> np.dtype[Any]:
    return np.dtype("<u4" if records <= 2**32 else "<u8")


def fill_order(
    out: NDArray[Any], lengths: NDArray[Any], starts: NDArray[Any], shards: Iterable[NDArray[Any]]
) -> None:
    for places, numbers in places_by_length(lengths, starts, shards):
        out[places] = numbers


class IndexWriter:
    """Gathers the tables of a dataset's fields and writes them as one file."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sections: dict[str, Chunks] = {}
        self._fields: list[str] = []
        self._scratch = ExitStack()

    def add(self, field: str, histograms: Iterable[Histogram], shards: Iterable[NDArray[Any]]) -> None:
        """`shards` gives the lengths of each shard's records, in the order of the shards."""
        lengths, starts = merge_histograms(histograms)
        order = self._room(int(starts[-1]))
        fill_order(order, lengths, starts, shards)
        pieces = [order[first : first + _PIECE_RECORDS] for first in range(0, len(order), _PIECE_RECORDS)]
        self._fields.append(field)
        self._sections |= {
            f"{field}/lengths": Chunks.of(lengths),
            f"{field}/starts": Chunks.of(starts),
            f"{field}/order": Chunks(order.dtype, order.shape, pieces),
        }

    def write(self) -> StoredFile:
        with self._scratch:
            return write_container(self._store, "index", "index", {"fields": self._fields}, self._sections)

    def _room(self, records: int) -> NDArray[Any]:
        """An array in an unnamed file on disk: it may be larger than RAM, and a crash does not leave it behind."""
        dtype = number_dtype(records)
        if not records:
            return np.empty(0, dtype)
        directory = self._store.scratch()
        file = self._scratch.enter_context(tempfile.TemporaryFile(dir=directory))  # noqa: SIM115
        with no_space(directory):
            # Writing to a mapped file on a full disk kills the process, so the space is allocated beforehand.
            os.posix_fallocate(file.fileno(), 0, records * dtype.itemsize)
        return np.memmap(file, dtype=dtype, mode="r+", shape=(records,))


def read_table(buffer: NDArray[np.uint8], header: Header, field: str, records: int, name: str) -> LengthTable:
    """One field's table as views of the mapped index file."""
    table = {}
    for part, dtype in (("lengths", "<u4"), ("starts", "<u8"), ("order", number_dtype(records))):
        section = header.sections.get(f"{field}/{part}")
        right = section is not None and section.dtype == np.dtype(dtype) and len(section.shape) == 1
        if header.kind != "index" or section is None or not right:
            raise CorruptError(f"{name}: damaged index: '{field}/{part}' is missing or has another type")
        table[part] = section.view(buffer)
    if len(table["starts"]) != len(table["lengths"]) + 1:
        raise CorruptError(
            f"{name}: damaged index: {len(table['starts'])} starts for {len(table['lengths'])} lengths"
        )
    if len(table["order"]) != records:
        raise CorruptError(
            f"{name}: damaged index: it orders {len(table['order'])} records, but there are {records}"
        )
    return LengthTable(**table)


def check_histogram(table: LengthTable, records: int, elements: int, name: str) -> None:
    """Check the short part of a table, distinct lengths and starts, against the sums in the manifest."""
    lengths, starts = table.lengths.astype(np.int64), table.starts
    if (lengths[1:] <= lengths[:-1]).any() or (starts[1:] <= starts[:-1]).any():
        raise CorruptError(f"{name}: damaged index: lengths or starts do not ascend; run `headrace verify`")
    if starts[0] != 0 or starts[-1] != records:
        raise CorruptError(f"{name}: damaged index: it orders {starts[-1]} records, but there are {records}")
    # Python integers: a forged histogram must not wrap around to the right sum.
    held = sum(a * b for a, b in zip(lengths.tolist(), np.diff(starts).tolist(), strict=True))
    if held != elements:
        raise CorruptError(f"{name}: damaged index: its lengths add up to {held} elements, not {elements}")


def check_order(
    table: LengthTable, histograms: Iterable[Histogram], shards: Iterable[NDArray[Any]], name: str
) -> None:
    """Check a whole table against the shards, one shard after another."""
    lengths, starts = merge_histograms(histograms)
    if not np.array_equal(table.lengths, lengths) or not np.array_equal(table.starts, starts):
        raise CorruptError(f"{name}: its lengths or starts do not match the histograms of the shards")
    for number, (places, records) in enumerate(places_by_length(lengths, starts, shards)):
        if not np.array_equal(table.order[places], records):
            raise CorruptError(f"{name}: the records of shard {number} are not in the order of their lengths")
