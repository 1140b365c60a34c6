"""Memory for a stretch of a file of which only some blocks are read: those that someone has asked for.

It has as many bytes as the stretch, so that everything has its usual place in it, but takes no memory where nothing was
read. All blocks that are missing are requested at once, neighbours with one request, and so are their checksums. When
all of that has arrived, the blocks are compared with them and put in their place.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.reads import Place, Reads
from headrace.errors import CorruptError
from headrace.fork_lock import fork_lock
from headrace.format.blocks import BLOCK_BYTES, CHECKSUM_DTYPE, check_of, checksums_of, count_blocks
from headrace.store.maps import sealed


@dataclass(frozen=True)
class BlockList:
    """Where the checksums of some blocks of a file stand: in its section `blocks`, from `begin` on."""

    file: int
    begin: int
    first: int
    """The number of the first of these blocks, and of the one after the last."""
    last: int
    check: int
    """The check of the blocks, which is also that of their checksums."""
    name: str

    @property
    def place(self) -> Place:
        size = CHECKSUM_DTYPE.itemsize
        return self.file, self.begin + self.first * size, self.begin + self.last * size

    def checked(self, content: NDArray[np.uint8], reads: Reads) -> NDArray[np.uint64]:
        """The checksums that were read from `place`, or that come when it is read once more."""
        if not self._is_right(content):
            content = reads.unchecked(*self.place, again=True)
            if not self._is_right(content):
                raise CorruptError(
                    f"{self.name}: the checksums of blocks {self.first} to {self.last} of file {self.file} do not "
                    "match the units; run `headrace verify`"
                )
        return content.view(CHECKSUM_DTYPE)

    def _is_right(self, content: NDArray[np.uint8]) -> bool:
        size = (self.last - self.first) * CHECKSUM_DTYPE.itemsize
        return len(content) == size and check_of(content.view(CHECKSUM_DTYPE)) == self.check


class SparseBytes:
    """The bytes from `start` to `stop` of a file, which begin and end where blocks do."""

    def __init__(self, reads: Reads, start: int, stop: int, blocks: BlockList) -> None:
        self.reads, self.blocks = reads, blocks
        self._start, self._stop = start, stop
        self.checksums: NDArray[np.uint64] | None = None
        """Of all blocks, once they were needed."""
        self._memory = empty_memory(stop - start)
        self.content = sealed(self._memory)
        """Zeros where nothing was read."""
        self._is_there = np.zeros(count_blocks(stop - start), dtype=bool)
        self._filling = fork_lock()

    def missing(self, needs: Sequence[tuple[int, int]]) -> list["_Run"]:
        """Runs of blocks that are missing between places, which are counted from the first byte."""
        wanted = np.zeros(len(self._is_there), dtype=bool)
        for start, stop in needs:
            wanted[start // BLOCK_BYTES : count_blocks(stop)] = True
        numbers = np.flatnonzero(wanted & ~self._is_there)
        if not len(numbers):
            return []
        cuts = np.flatnonzero(np.diff(numbers) > 1) + 1
        return [_Run(self, int(run[0]), int(run[-1]) + 1) for run in np.split(numbers, cuts)]

    def put(self, run: "_Run", content: NDArray[np.uint8]) -> None:
        """Check blocks that have come, and put them in their place. The checksums are there by now."""
        if self.checksums is None:
            raise RuntimeError("blocks came before their checksums")
        expected = self.checksums[run.first : run.last]
        if not np.array_equal(checksums_of(content), expected):
            content = self.reads.unchecked(*run.place, again=True)
            if not np.array_equal(checksums_of(content), expected):
                raise self.reads.damaged(*run.place)
        begin = run.first * BLOCK_BYTES
        # Readers of the same blocks see the same bytes before and after.
        with self._filling:
            self._memory[begin : begin + len(content)] = content
            self._is_there[run.first : run.last] = True

    def place_of(self, first: int, last: int) -> Place:
        stop = min(self._start + last * BLOCK_BYTES, self._stop)
        return self.blocks.file, self._start + first * BLOCK_BYTES, stop


@dataclass(frozen=True)
class _Run:
    """Consecutive blocks that are missing."""

    sparse: SparseBytes
    first: int
    last: int

    @property
    def place(self) -> Place:
        return self.sparse.place_of(self.first, self.last)


def empty_memory(count: int) -> NDArray[np.uint8]:
    """Zeros that take no memory until something is written to them."""
    memory = mmap.mmap(-1, max(1, count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype=np.uint8)[:count]


Need = tuple[SparseBytes, int, int]
"""Bytes that must be there: from one place to another, counted from the first byte of the sparse stretch."""


def fill(reads: Reads, needs: Sequence[Need]) -> None:
    """Read everything that is needed and missing, with all requests at once."""
    by_stretch: dict[int, tuple[SparseBytes, list[tuple[int, int]]]] = {}
    for sparse, start, stop in needs:
        if start < stop:
            by_stretch.setdefault(id(sparse), (sparse, []))[1].append((start, stop))
    runs = [run for sparse, places in by_stretch.values() for run in sparse.missing(places)]
    lacking = list({id(run.sparse): run.sparse for run in runs if run.sparse.checksums is None}.values())
    places = [*(sparse.blocks.place for sparse in lacking), *(run.place for run in runs)]
    contents = iter(reads.unchecked_together(places))
    for sparse in lacking:
        sparse.checksums = sparse.blocks.checked(next(contents), reads)
    for run, content in zip(runs, contents, strict=True):
        run.sparse.put(run, content)
