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
        if header.kind != "index" or section is None or section.dtype != np.dtype(dtype) or len(section.shape) != 1:
            raise CorruptError(f"{name}: damaged index: '{field}/{part}' is missing or of another type")
        table[part] = section.view(buffer)
    if len(table["starts"]) != len(table["lengths"]) + 1:
        raise CorruptError(f"{name}: damaged index: {len(table['starts'])} starts for {len(table['lengths'])} lengths")
    if not len(table["first"]) == len(table["shard"]) == len(table["position"]):
        raise CorruptError(f"{name}: damaged index: columns of different lengths")
    return table
