"""The compiled inner loops (kernel*.c) if they are installed, else the same loops in NumPy (reference.py)."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.pack import best_fit
from headrace.pack.best_fit import BestFit
from headrace.pack.documents import DocumentPacking, PackedDocuments, Pieces
from headrace.rows import reference

try:
    from headrace.rows import _kernel as loops  # type: ignore[attr-defined, unused-ignore]

    COMPILED = True
except ImportError:
    loops = reference
    COMPILED = False
    logging.getLogger(__name__).warning(
        "headrace was installed without its compiled kernel, so loading short documents is several times slower; "
        "install a C compiler and reinstall headrace"
    )

__all__ = [
    "COMPILED",
    "count_best_fit_rows",
    "look_up",
    "loops",
    "pack",
    "pack_groups",
    "permute",
    "plan_best_fit",
]


def permute(positions: Any, size: Any, key: Any) -> NDArray[np.int64]:
    """`order.permutation.permute` for flat arrays; a single size or key applies to all positions."""
    positions = np.ascontiguousarray(positions, dtype=np.int64)
    sizes = np.atleast_1d(np.asarray(size, dtype=np.int64))
    keys = np.atleast_1d(np.asarray(key, dtype=np.uint64))
    out = np.empty(len(positions), dtype=np.int64)
    if loops.permute(positions, sizes, keys, out) >= 0:
        raise SettingsError("positions must be inside their permutation")
    return out


def pack(documents: DocumentPacking, rows: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Pieces:
    """`documents.pieces_of(rows, keys)`, compiled for best fit, which looks up every single document."""
    return pack_groups([documents], np.zeros(len(rows), dtype=np.int64), rows, keys)


def pack_groups(
    groups: Sequence[DocumentPacking],
    which: NDArray[np.int64],
    rows: NDArray[np.int64],
    keys: NDArray[np.uint64] | None,
) -> Pieces:
    """The pieces of rows of several packings of one `seq_len`: row i is the row `rows[i]` of `groups[which[i]]`."""
    packed = [documents for documents in groups if isinstance(documents, PackedDocuments)]
    if not packed or len(packed) < len(groups) or not COMPILED:
        return reference.pack_groups(groups, which, rows, keys)
    which = np.ascontiguousarray(which, dtype=np.int64)
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    keys = None if keys is None else np.ascontiguousarray(keys, dtype=np.uint64)
    tables = tuple(documents.tables for documents in packed)
    pieces_of_row = np.array([documents.pieces / max(1, documents.rows) for documents in packed])
    # A generous guess; the call says how many there really are.
    room = int(1.25 * pieces_of_row[which].sum()) + 64
    while True:
        columns = [np.empty(room, dtype=np.int64) for _ in range(5)]
        count = loops.pack(rows, keys, which, packed[0].seq_len, tables, *columns)
        if count <= room:
            return Pieces(*(column[:count] for column in columns))
        room = count


def look_up(
    tables: Sequence[NDArray[np.int64]], which: NDArray[np.int64], index: NDArray[np.int64]
) -> NDArray[np.int64]:
    """`tables[which[i]][index[i]]` for each i."""
    if len(tables) == 1:
        return tables[0][index]
    found = np.empty(len(index), dtype=np.int64)
    bad = loops.look_up(tuple(tables), which, index, found)
    if bad >= 0:
        raise SettingsError(f"number {index[bad]} is not in table {which[bad]}")
    return found


def plan_best_fit(lengths: Any, counts: Any, seq_len: int) -> BestFit:
    """`pack.best_fit.plan_best_fit`, compiled."""
    if not COMPILED:
        return best_fit.plan_best_fit(lengths, counts, seq_len)
    lengths, counts = best_fit.longest_first(lengths, counts, seq_len)
    moves, leaves = loops.plan(lengths, counts, seq_len)
    parent, first, length, per_row, offset = np.frombuffer(moves, dtype=np.int64).reshape(5, -1)
    of_leaves = np.frombuffer(leaves, dtype=np.int64)
    leaf_count = len(of_leaves) // 3
    return BestFit(
        seq_len=seq_len,
        tokens=int(lengths @ counts),
        parent=parent,
        first=first,
        length=length,
        per_row=per_row,
        offset=offset,
        leaf_node=of_leaves[:leaf_count],
        leaf_first=of_leaves[leaf_count : 2 * leaf_count],
        leaf_start=of_leaves[2 * leaf_count :],
    )


def count_best_fit_rows(lengths: Any, bounds: Any, seq_lens: Any) -> NDArray[np.int64]:
    """How many rows the documents of each unit make if they are packed by best fit and longer ones are split.

    The documents of all units lie end to end: unit u has those from `bounds[u]` to `bounds[u + 1]`. The result has a
    row for each unit and a column for each `seq_len`.
    """
    lengths, bounds, seq_lens = (
        np.ascontiguousarray(each, dtype=np.int64) for each in (lengths, bounds, seq_lens)
    )
    if seq_lens.min(initial=1) < 1:
        raise SettingsError(f"seq_len={seq_lens.min()}: must be at least 1")
    if not len(bounds) or bounds[0] < 0 or bounds[-1] > len(lengths) or (np.diff(bounds) < 0).any():
        raise SettingsError(f"bounds of units: must ascend, from 0 at least to {len(lengths)} at most")
    if lengths.min(initial=0) < 0:
        raise SettingsError(f"lengths from {lengths.min()} to {lengths.max()}: must be at least 0")
    tokens = float(lengths.sum(dtype=np.float64))
    if tokens > best_fit.MOST_TOKENS:
        raise SettingsError(f"documents of {tokens:.3g} tokens: must be at most {best_fit.MOST_TOKENS}")
    rows = np.empty((len(bounds) - 1, len(seq_lens)), dtype=np.int64)
    loops.count_rows(lengths, bounds, seq_lens, rows)
    return rows
