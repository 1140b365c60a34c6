"""Checksums of blocks: so that a part of a file can be checked without the rest of it.

A file's bytes are divided into blocks of 16 KiB, and a container ends with the XXH3-64 of each block before that list
(the section `blocks`). Whoever reads some bytes reads all blocks that they touch, and compares. The check of a longer
stretch is one number, the XXH3-64 of its blocks' checksums:

    bytes              0 ... 16383 | 16384 ... 32767 | 32768 ... 40959 (where the list begins)
    checksums          a             b                 c
    check of 100..20k  XXH3-64 of the 16 bytes a, b
"""

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

BLOCK_BYTES = 2**14
SECTION = "blocks"
"""The name of the section with the checksums of all blocks before it."""
CHECKSUM_DTYPE = np.dtype("<u8")


class BlockHasher:
    """Computes the checksums of blocks from content that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._checksums: list[int] = []
        self._open = xxhash.xxh3_64()
        self._open_bytes = 0

    def update(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        missing = -self._open_bytes % BLOCK_BYTES
        if missing:
            self._add_to_open(view[:missing])
            view = view[missing:]
        whole = len(view) - len(view) % BLOCK_BYTES
        self._checksums += _checksums(view[:whole])
        self._add_to_open(view[whole:])

    def _add_to_open(self, view: memoryview) -> None:
        self._open.update(view)
        self._open_bytes += len(view)
        if self._open_bytes == BLOCK_BYTES:
            self._close()

    def _close(self) -> None:
        self._checksums.append(self._open.intdigest())
        self._open.reset()
        self._open_bytes = 0

    def finish(self) -> NDArray[np.uint64]:
        """The checksums of all blocks; the last block may be short."""
        if self._open_bytes:
            self._close()
        return np.array(self._checksums, dtype=CHECKSUM_DTYPE)


def count_blocks(count: int) -> int:
    """How many blocks so many bytes have."""
    return -(-count // BLOCK_BYTES)


def touched(start: int, stop: int, end: int) -> tuple[int, int]:
    """Where the blocks that hold the bytes from `start` to `stop` begin and end; the last block ends at `end`."""
    if start == stop:
        return start, start
    first = start - start % BLOCK_BYTES
    last = stop + -stop % BLOCK_BYTES
    return first, min(last, end)


def numbers_of(start: int, stop: int) -> slice:
    """The numbers of the blocks between two places that `touched` has returned."""
    first = start // BLOCK_BYTES
    return slice(first, count_blocks(stop) if start < stop else first)


def checksums_of(content: Any) -> NDArray[np.uint64]:
    """The checksums of content that begins where a block does."""
    return np.array(_checksums(memoryview(content)), dtype=CHECKSUM_DTYPE)


def check_of(checksums: NDArray[np.uint64]) -> int:
    """One number for a stretch of blocks, from their checksums."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(checksums, dtype=CHECKSUM_DTYPE).data)


def _checksums(view: memoryview) -> list[int]:
    digest = xxhash.xxh3_64_intdigest
    return [digest(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)]
