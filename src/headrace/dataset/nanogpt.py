"""nanoGPT's `.bin`: raw tokens, no header, no index.

A document ends after each end-of-sequence token, which belongs to it. What follows the last such token is one more
document. With eos_id 9, the tokens

    5 6 9 7 9 9 8   ->   [5 6 9] [7 9] [9] [8]
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.sidecar import Documents
from headrace.errors import CorruptError, FormatError, SettingsError
from headrace.format.fields import DTYPES, MAX_LENGTH
from headrace.store.store import Store

DEFAULT_DTYPE = "uint16"
BLOCK_BYTES = 16 * 2**20
_LLMC_MAGIC, _LLMC_HEADER_BYTES = 20240520, 1024


@dataclass(frozen=True)
class NanogptFile:
    """`block_bytes` is how much of the file is read at a time to find its documents."""

    store: Store
    file: str
    dtype: str = DEFAULT_DTYPE
    eos_id: int | None = None
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        if self.eos_id is not None:
            object.__setattr__(self, "eos_id", parse_eos_id(self.eos_id, self.dtype))

    @property
    def files(self) -> Sequence[str]:
        return [self.file]

    def documents(self) -> Documents:
        path = self.store.locate(self.file)
        head, size = self.store.head(self.file, 12)
        _refuse_llmc(path, head, size)
        count, rest = divmod(size, self._numpy_dtype.itemsize)
        if rest:
            raise CorruptError(
                f"{path}: {size} bytes are not a whole number of {self.dtype} tokens: "
                "the file is truncated, or has another dtype"
            )
        if self.eos_id is None and count > MAX_LENGTH:
            raise SettingsError(
                f"{path}: {count:,} tokens are too many for one document (at most {MAX_LENGTH:,}); "
                "give eos_id, the token that ends a document, like eos_id=50256"
            )
        return Documents(0, self._ends(count))

    def _ends(self, count: int) -> Iterator[NDArray[np.int64]]:
        last = position = 0
        if self.eos_id is None:
            position = count
        else:
            while position < count:
                block = self._block(position, count)
                ends = np.flatnonzero(block == self.eos_id) + (position + 1)
                position += len(block)
                if len(ends):
                    last = int(ends[-1])
                    yield ends
        if last < position:
            yield np.array([position], dtype=np.int64)

    def _block(self, position: int, count: int) -> NDArray[Any]:
        """The next tokens, out of `count` in all."""
        size = self._numpy_dtype.itemsize
        wanted = min(max(1, self.block_bytes // size), count - position) * size
        content = self.store.read(self.file, position * size, wanted)
        if len(content) < wanted:
            raise CorruptError(
                f"{self.store.locate(self.file)}: became shorter while it was being read; "
                "open it again when it is complete"
            )
        return np.frombuffer(content, self._numpy_dtype)

    @property
    def _numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")


def parse_dtype(value: Any) -> str:
    """'uint16' or np.uint16 -> 'uint16'; tokens are whole numbers, stored in little-endian order."""
    try:
        dtype = np.dtype(value)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "iu" or dtype.name not in DTYPES or dtype.str.startswith(">"):
        raise SettingsError(
            f"dtype={value!r}: must be the integer type of the file's tokens, like 'uint16' or 'uint32'"
        )
    return str(dtype.name)


def parse_eos_id(value: Any, dtype: str) -> int:
    limits = np.iinfo(dtype)
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= int(limits.max):
        raise SettingsError(f"eos_id={value!r}: must be a token id from 0 to {limits.max} ({dtype})")
    return number


def _refuse_llmc(path: str, head: bytes, size: int) -> None:
    # llm.c and modded-nanogpt put 256 int32 before the tokens; read as tokens, they would be garbage.
    if len(head) < 12:
        return
    magic, version, count = np.frombuffer(head, dtype="<i4").tolist()
    if magic == _LLMC_MAGIC and size in (_LLMC_HEADER_BYTES + 2 * count, _LLMC_HEADER_BYTES + 4 * count):
        raise FormatError(
            f"{path}: an llm.c file (version {version}, {count:,} tokens after {_LLMC_HEADER_BYTES} bytes of "
            f"header), not raw tokens; write it without the header: tail -c +{_LLMC_HEADER_BYTES + 1} FILE"
        )
