"""Megatron's pair: `<prefix>.bin` holds raw tokens, `<prefix>.idx` says where sequences and documents are.

    9   magic "MMIDIDX\\0\\0"
    8   u64 version (1)
    1   u8  dtype code
    8   u64 number of sequences, S
    8   u64 number of entries of the document index, D
    4S  i32 tokens of each sequence
    8S  i64 byte of the .bin at which each sequence begins
    8D  i64 document index: document d is sequences index[d] to index[d + 1], so D - 1 documents
    S   i8  modes, in multimodal files only; not used here

A Headrace record is one document. Its sequences, and the documents themselves, must be contiguous in the .bin, as
Megatron writes them. Some tools never mark documents and write a document index of [0]: then each sequence is a
document.
"""

import logging
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.sidecar import Documents
from headrace.errors import CorruptError, FormatError, VersionError
from headrace.store.store import Store

DTYPE_CODES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
MAX_SEQUENCE_LENGTH = 2**31 - 1
BLOCK = 2**20
"""How many sequences or documents are checked at a time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IdxHeader:
    dtype: str
    sequences: int
    entries: int
    file_bytes: int


def read_header(store: Store, file: str) -> IdxHeader:
    """Read the header of an `.idx`, which may be damaged or forged: counts are checked against the file's size."""
    path = store.locate(file)
    head, size = store.head(file, HEADER.size)
    if head[: len(MAGIC)] != MAGIC:
        raise FormatError(
            f"{path}: not a Megatron index: it starts with {head[: len(MAGIC)]!r} instead of {MAGIC!r}"
        )
    if len(head) < HEADER.size:
        raise CorruptError(f"{path}: {size} bytes, truncated inside its header; copy it again")
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != VERSION:
        raise VersionError(
            f"{path}: Megatron index version {version}, but Headrace reads only version {VERSION}"
        )
    if code not in DTYPE_CODES:
        raise CorruptError(
            f"{path}: unknown dtype code {code}; Megatron has codes 1 to {max(DTYPE_CODES)}, so copy the file again"
        )
    expected = HEADER.size + 12 * sequences + 8 * entries
    if size not in (expected, expected + sequences):
        raise CorruptError(
            f"{path}: {size} bytes, but {sequences} sequences and {entries} document entries take {expected}"
            ": truncated or overwritten; copy it again"
        )
    return IdxHeader(DTYPE_CODES[code], sequences, entries, size)


@dataclass(frozen=True)
class MegatronPair:
    """`file` is the .bin; the .idx is next to it."""

    store: Store
    file: str

    @property
    def idx_file(self) -> str:
        return self.file.removesuffix(".bin") + ".idx"

    @property
    def files(self) -> Sequence[str]:
        return [self.file, self.idx_file]

    @property
    def _path(self) -> str:
        return self.store.locate(self.file)

    @property
    def _idx_path(self) -> str:
        return self.store.locate(self.idx_file)

    @cached_property
    def header(self) -> IdxHeader:
        return read_header(self.store, self.idx_file)

    @property
    def dtype(self) -> str:
        return self.header.dtype

    @property
    def eos_id(self) -> None:
        return None

    def documents(self) -> Documents:
        header, raw = self.header, self.store.view(self.idx_file)
        if len(raw) != header.file_bytes:
            raise CorruptError(
                f"{self._idx_path}: changed while it was being read; open it again when it is complete"
            )
        lengths_end = HEADER.size + 4 * header.sequences
        pointers_end = lengths_end + 8 * header.sequences
        lengths = raw[HEADER.size : lengths_end].view("<i4")
        pointers = raw[lengths_end:pointers_end].view("<i8")
        entries = raw[pointers_end : pointers_end + 8 * header.entries].view("<i8")
        begin, end = self._check_sequences(lengths, pointers)
        self._check_entries(entries)
        return Documents(begin, self._ends(pointers, entries, begin, end))

    def _check_sequences(self, lengths: NDArray[Any], pointers: NDArray[Any]) -> tuple[int, int]:
        """The first byte of the tokens and the one after the last, once the sequences are known to be contiguous."""
        available, itemsize = self.store.status(self.file).bytes, np.dtype(self.dtype).itemsize
        begin = end = int(pointers[0]) if len(pointers) else 0
        for start in range(0, len(lengths), BLOCK):
            sizes = lengths[start : start + BLOCK].astype(np.int64) * itemsize
            begins = pointers[start : start + BLOCK].astype(np.int64)
            if (sizes < 0).any():
                raise CorruptError(
                    f"{self._idx_path}: a sequence has a negative length; the file is damaged, so copy it again"
                )
            if (begins < 0).any() or (begins > available).any() or (begins + sizes > available).any():
                raise CorruptError(
                    f"{self._path}: {available} bytes, but the index points past that: "
                    "it is truncated, or not the .bin of this .idx; copy both again"
                )
            expected = np.concatenate([[end], begins[:-1] + sizes[:-1]])
            gaps = np.flatnonzero(begins != expected)
            if len(gaps):
                at = int(gaps[0])
                raise FormatError(
                    f"{self._idx_path}: sequence {start + at} begins at byte {begins[at]}, but the one before "
                    f"it ends at {expected[at]}: Headrace reads only pairs whose sequences are contiguous; "
                    "write the pair again with Megatron's tools"
                )
            end = int(begins[-1] + sizes[-1])
        if end - begin < available:
            _log.warning("%s: %s bytes belong to no sequence", self._path, available - (end - begin))
        return begin, end

    def _check_entries(self, entries: NDArray[Any]) -> None:
        if not self._grouped(entries):
            if self.header.sequences:
                _log.warning(
                    "%s: no documents are marked, so each sequence is read as a document", self._idx_path
                )
            return
        problem = ""
        if entries[0] != 0 or entries[-1] != self.header.sequences:
            problem = f"goes from sequence {entries[0]} to {entries[-1]} instead of from 0 to {self.header.sequences}"
        for start in range(0, len(entries), BLOCK):
            block = entries[start : start + BLOCK + 1]
            if (block[1:] < block[:-1]).any():
                problem = "decreases"
        if problem:
            raise CorruptError(
                f"{self._idx_path}: its document index {problem}, so it is damaged; copy or write it again"
            )

    @staticmethod
    def _grouped(entries: NDArray[Any]) -> bool:
        return len(entries) > 1 or (len(entries) == 1 and entries[0] != 0)

    def _ends(
        self, pointers: NDArray[Any], entries: NDArray[Any], begin: int, end: int
    ) -> Iterator[NDArray[np.int64]]:
        """Document d ends where sequence entries[d + 1] begins, or with the last sequence."""
        itemsize = np.dtype(self.dtype).itemsize
        grouped = self._grouped(entries)
        count = len(entries) - 1 if grouped else len(pointers)
        for start in range(0, count, BLOCK):
            stop = min(start + BLOCK, count)
            next_sequence = entries[start + 1 : stop + 1] if grouped else np.arange(start + 1, stop + 1)
            ends = np.full(stop - start, end, dtype=np.int64)
            inside = next_sequence < len(pointers)
            ends[inside] = pointers[next_sequence[inside]]
            yield (ends - begin) // itemsize
