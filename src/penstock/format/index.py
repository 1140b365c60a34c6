"""The dataset's index: where in which shard the records of each length are.

Each shard keeps its own by-length ordering. Put the shards' orderings side by side, length by length and
shard by shard within a length, and there is one ordering of the whole dataset, which nobody has to
store: this table of its stretches is enough. A stretch is 'the records of one length in one shard':

    first     u64  place of the stretch in the whole ordering (ascending)
    shard     u32  the shard
    position  u32  place of the stretch in that shard's `order`

and for each distinct length, `lengths` (u32, ascending) and `starts` (u64, one more than there are
lengths): the records of length `lengths[i]` have places `starts[i]` to `starts[i + 1]`.

So the j-th record of length L has place g = starts[L] + j; bisect `first` for the stretch m; the record is
`order[position[m] + g - first[m]]` of shard `shard[m]`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptError
from penstock.format.container import Chunks, Header, StoredFile, write_container

PARTS = {"lengths": "<u4", "starts": "<u8", "first": "<u8", "shard": "<u4", "position": "<u4"}


def merge_histograms(histograms: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """The table for one field from each shard's (lengths, counts)."""
    shards = np.repeat(np.arange(len(histograms), dtype="<u4"), [len(lengths) for lengths, _ in histograms])
    empty = np.empty(0, dtype="<u4")
    lengths = np.concatenate([empty, *(lengths for lengths, _ in histograms)])
    counts = np.concatenate([empty, *(counts for _, counts in histograms)]).astype("<u8")
    within = [np.cumsum(counts, dtype=np.uint64) - counts for _, counts in histograms]
    position = np.concatenate([empty, *within]).astype("<u4")
    by_length = np.argsort(lengths, kind="stable")
    counts, lengths = counts[by_length], lengths[by_length]
    ends = np.cumsum(counts, dtype="<u8")
    distinct, where = np.unique(lengths, return_index=True)
    first = ends - counts
    starts = np.append(first[where], ends[-1:] if len(ends) else np.zeros(1, "<u8")).astype("<u8")
    return {
        "lengths": distinct.astype("<u4"),
        "starts": starts,
        "first": first.astype("<u8"),
        "shard": shards[by_length],
        "position": position[by_length],
    }


def write_index(directory: Path, tables: Mapping[str, Mapping[str, NDArray[Any]]]) -> StoredFile:
    sections = {f"{name}/{part}": Chunks.of(table[part]) for name, table in tables.items() for part in PARTS}
    return write_container(directory, "index", "index", {"fields": list(tables)}, sections)


def read_table(buffer: NDArray[np.uint8], header: Header, field: str, name: str) -> dict[str, NDArray[Any]]:
    """One field's table as views of the mapped index file."""
    table = {}
    for part, dtype in PARTS.items():
        section = header.sections.get(f"{field}/{part}")
        right = section is not None and section.dtype == np.dtype(dtype) and len(section.shape) == 1
        if header.kind != "index" or section is None or not right:
            raise CorruptError(f"{name}: damaged index: '{field}/{part}' is missing or of another type")
        table[part] = section.view(buffer)
    if len(table["starts"]) != len(table["lengths"]) + 1:
        raise CorruptError(
            f"{name}: damaged index: {len(table['starts'])} starts for {len(table['lengths'])} lengths"
        )
    if not len(table["first"]) == len(table["shard"]) == len(table["position"]):
        raise CorruptError(f"{name}: damaged index: columns of different lengths")
    return table


def check_histogram(table: Mapping[str, NDArray[Any]], records: int, elements: int, name: str) -> None:
    """Check the part of a table that is short, distinct lengths and starts, against the manifest's sums."""
    lengths, starts = table["lengths"].astype(np.int64), table["starts"]
    if (lengths[1:] <= lengths[:-1]).any() or (starts[1:] <= starts[:-1]).any():
        raise CorruptError(f"{name}: damaged index: lengths or starts do not ascend; run `penstock verify`")
    if starts[0] != 0 or starts[-1] != records:
        raise CorruptError(f"{name}: damaged index: it orders {starts[-1]} records, there are {records}")
    # In Python's whole numbers: a forged histogram must not wrap around to the right sum.
    held = sum(a * b for a, b in zip(lengths.tolist(), np.diff(starts).tolist(), strict=True))
    if held != elements:
        raise CorruptError(f"{name}: damaged index: its lengths add up to {held} elements, not {elements}")


class TableCheck:
    """Check a table against the shards' own histograms, one shard after another, in little memory.

    Within a length, stretches follow one another in the order of the shards. So it is enough to keep, for
    each distinct length, the row at which its next stretch must stand.
    """

    def __init__(self, table: Mapping[str, NDArray[Any]], field: str, name: str) -> None:
        self._table, self._what = table, f"{name}: '{field}'"
        first, starts = table["first"], table["starts"]
        if len(first) and (first[0] != 0 or (first[1:] <= first[:-1]).any() or first[-1] >= starts[-1]):
            raise CorruptError(f"{self._what}: places of stretches do not ascend from 0")
        rows = np.searchsorted(first, starts)
        self._next, self._end = rows[:-1].copy(), rows[1:]
        if (self._next >= len(first)).any() or (first[self._next] != starts[:-1]).any():
            raise CorruptError(f"{self._what}: starts of lengths are not starts of stretches")

    def shard(self, number: int, lengths: NDArray[Any], counts: NDArray[Any]) -> None:
        """The next shard has this histogram."""
        table = self._table
        which = np.searchsorted(table["lengths"], lengths)
        known = which < len(table["lengths"])
        if not known.all() or not np.array_equal(table["lengths"][which], lengths):
            raise CorruptError(f"{self._what}: lengths of shard {number} are missing")
        rows = self._next[which]
        if not len(rows):
            return
        if (rows >= self._end[which]).any() or (table["shard"][rows] != number).any():
            raise CorruptError(f"{self._what}: stretches of shard {number} are missing or out of order")
        last = len(table["first"]) - 1
        ends = np.where(rows < last, table["first"][np.minimum(rows + 1, last)], table["starts"][-1])
        within = np.cumsum(counts, dtype=np.uint64) - counts
        if (table["position"][rows] != within).any() or (ends - table["first"][rows] != counts).any():
            raise CorruptError(f"{self._what}: stretches of shard {number} do not follow from its histogram")
        self._next[which] += 1

    def skip(self, number: int) -> None:
        """The next shard is damaged: pass over whatever the table says of it."""
        open_rows = np.flatnonzero(self._next < self._end)
        self._next[open_rows[self._table["shard"][self._next[open_rows]] == number]] += 1

    def finish(self) -> None:
        if (self._next != self._end).any():
            raise CorruptError(f"{self._what}: stretches of shards that do not exist, or out of order")
