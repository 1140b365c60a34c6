"""How fast the storage is at random and at sequential reads, measured on the dataset's own files.

Some files are dropped from the page cache. Then a long piece is read in order, and small pieces from random places. All
of it takes a second or two.
"""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from headrace.measure import clock
from headrace.measure.running.page_cache import UNPROVED, drop_files
from headrace.observe.facts import Reads

SMALL_BYTES, LARGE_BYTES = 4096, 65_536
LEAST_BYTES = 32_000_000
UNKNOWN_FILES = "the files that are read are unknown"
_MOST_FILES = 8
_MOST_READS = 400
_SEQUENTIAL_BYTES = 64_000_000
_CHUNK_BYTES = 1_000_000


def measure_reads(files: Sequence[Path], seconds: float = 1.5) -> Reads | str:
    """What was measured, or why nothing was."""
    sizes = {path: path.stat().st_size for path in files if path.is_file()}
    whole = sum(sizes.values())
    if not sizes:
        return UNKNOWN_FILES
    if whole < LEAST_BYTES:
        return f"{whole / 1e6:,.1f} MB is too small to measure: it stays in the page cache"
    largest = sorted(sizes, key=lambda path: -sizes[path])[:_MOST_FILES]
    problem = drop_files(largest)
    if problem is not None and not problem.startswith(UNPROVED):
        return f"the page cache could not be dropped: {problem}"
    with _opened(largest) as descriptors:
        # First in order, at the beginning of the largest file; random reads go to the rest, which is still cold.
        skipped, rate = _read_in_order(descriptors[0], seconds / 3)
        bounds = [(0, sizes[path]) for path in largest]
        bounds[0] = (skipped, sizes[largest[0]])
        small, large = _read_anywhere(descriptors, bounds, 2 * seconds / 3)
    return Reads(
        reads=len(small) + len(large),
        small_ms=float(np.median(small)) * 1e3,
        random_mb_per_second=LARGE_BYTES * len(large) / max(1e-9, sum(large)) / 1e6,
        sequential_mb_per_second=rate,
        data_bytes=whole,
    )


@contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[list[int]]:
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read_in_order(descriptor: int, seconds: float) -> tuple[int, float]:
    """Read up to half of the file. Returns where the part begins that is still cold, and MB per second."""
    half = min(_SEQUENTIAL_BYTES, os.fstat(descriptor).st_size // 2)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    at, begun = 0, clock.now()
    while at < half and clock.now() - begun < seconds:
        at += len(os.pread(descriptor, _CHUNK_BYTES, at))
    return min(2 * half, at + 4 * _CHUNK_BYTES), at / (clock.now() - begun) / 1e6


def _read_anywhere(
    descriptors: list[int], bounds: list[tuple[int, int]], seconds: float
) -> tuple[list[float], list[float]]:
    """The seconds that each read took: the small ones, and the large ones."""
    for descriptor in descriptors:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    chosen = random.Random(0)
    taken: dict[int, list[float]] = {SMALL_BYTES: [], LARGE_BYTES: []}
    room = [max(1, last - first - LARGE_BYTES) for first, last in bounds]
    deadline = clock.now() + seconds
    for number in range(_MOST_READS):
        size = LARGE_BYTES if number % 2 else SMALL_BYTES
        (which,) = chosen.choices(range(len(descriptors)), room)
        aligned = chosen.randrange(room[which]) // SMALL_BYTES * SMALL_BYTES
        at = bounds[which][0] + aligned
        begun = clock.now()
        os.pread(descriptors[which], size, at)
        ended = clock.now()
        taken[size].append(ended - begun)
        if ended > deadline and number:
            break
    return taken[SMALL_BYTES], taken[LARGE_BYTES]
