"""Memory for a stretch of a file of which only some blocks are read: those that someone has asked for.

It has as many bytes as the stretch, so that everything has its usual place in it, but takes no memory where nothing was
read. All blocks that are missing are requested at once, neighbours with one request, and so are their checksums. When
all of that has arrived, the blocks are compared with them and put in their place.
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.reads import Reads
from headrace.fork_lock import fork_lock
from headrace.format.blocks import BLOCK_BYTES, checksums_of, count_blocks
from headrace.store.fetching import fetching
from headrace.store.maps import sealed

LoadChecksums = Callable[[], NDArray[np.uint64]]


class SparseBytes:
    """The bytes from `start` to `stop` of a file, which begin and end where blocks do.

    `load_checksums` reads the checksums of all of these blocks, once they are needed.
    """

    def __init__(self, reads: Reads, file: int, start: int, stop: int, load_checksums: LoadChecksums) -> None:
        self._reads, self._file, self._start, self._stop = reads, file, start, stop
        self._load_checksums = load_checksums
        self._checksums: NDArray[np.uint64] | None = None
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

    @property
    def lacks_checksums(self) -> bool:
        return self._checksums is None

    def read_checksums(self) -> NDArray[np.uint64]:
        if self._checksums is None:
            self._checksums = self._load_checksums()
        return self._checksums

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """Blocks as they come, unchecked."""
        return self._reads.unchecked(self._file, *self._places(first, last))

    def put(self, first: int, last: int, content: NDArray[np.uint8]) -> None:
        """Check blocks, and put them in their place."""
        expected, places = self.read_checksums()[first:last], self._places(first, last)
        if not np.array_equal(checksums_of(content), expected):
            content = self._reads.unchecked(self._file, *places, again=True)
            if not np.array_equal(checksums_of(content), expected):
                raise self._reads.damaged(self._file, *places)
        begin = first * BLOCK_BYTES
        # Readers of the same blocks see the same bytes before and after.
        with self._filling:
            self._memory[begin : begin + len(content)] = content
            self._is_there[first:last] = True

    def _places(self, first: int, last: int) -> tuple[int, int]:
        stop = min(self._start + last * BLOCK_BYTES, self._stop)
        return self._start + first * BLOCK_BYTES, stop


@dataclass
class _Run:
    """Consecutive blocks that are on their way."""

    sparse: SparseBytes
    first: int
    last: int
    content: NDArray[np.uint8] | None = None

    def read(self) -> None:
        self.content = self.sparse.read(self.first, self.last)

    def put(self) -> None:
        if self.content is not None:
            self.sparse.put(self.first, self.last, self.content)


def empty_memory(count: int) -> NDArray[np.uint8]:
    """Zeros that take no memory until something is written to them."""
    memory = mmap.mmap(-1, max(1, count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype=np.uint8)[:count]


Need = tuple[SparseBytes, int, int]
"""Bytes that must be there: from one place to another, counted from the first byte of the sparse stretch."""


def fill(needs: Sequence[Need]) -> None:
    """Read everything that is needed and missing, with all requests at once."""
    by_stretch: dict[int, tuple[SparseBytes, list[tuple[int, int]]]] = {}
    for sparse, start, stop in needs:
        if start < stop:
            by_stretch.setdefault(id(sparse), (sparse, []))[1].append((start, stop))
    runs = [run for sparse, places in by_stretch.values() for run in sparse.missing(places)]
    lacking = {id(run.sparse): run.sparse for run in runs if run.sparse.lacks_checksums}
    calls: list[Callable[[], object]] = [sparse.read_checksums for sparse in lacking.values()]
    fetching().urgent([*calls, *(run.read for run in runs)])
    for run in runs:
        run.put()
