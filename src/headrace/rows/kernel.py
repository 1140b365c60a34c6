"""The compiled inner loops (kernel*.c) if they are installed, else the same loops in NumPy (reference.py)."""

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
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

__all__ = ["COMPILED", "loops", "pack", "permute"]


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
    if not COMPILED or not isinstance(documents, PackedDocuments):
        return documents.pieces_of(rows, keys)
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    keys = None if keys is None else np.ascontiguousarray(keys, dtype=np.uint64)
    # A generous guess; the call says how many there really are.
    room = int(1.25 * len(rows) * documents.pieces / max(1, documents.rows)) + 64
    while True:
        columns = [np.empty(room, dtype=np.int64) for _ in range(5)]
        count = loops.pack(rows, keys, documents.seq_len, documents.tables, *columns)
        if count <= room:
            return Pieces(*(column[:count] for column in columns))
        room = count
