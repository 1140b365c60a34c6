"""How fast the storage is at random reads, and at reading on: measured on the dataset's own files.

Some files are dropped from the page cache; then small pieces are read from anywhere in them, and a long piece in order.
All of it ends after a second or two.
"""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.measure import clock
from headrace.measure.running.page_cache import drop_files
from headrace.observe.facts import Reads

SMALL_BYTES, LARGE_BYTES = 4096, 65_536
LEAST_BYTES = 32_000_000
_MOST_FILES = 8
_MOST_READS = 400
_SEQUENTIAL_BYTES = 64_000_000
_CHUNK_BYTES = 1_000_000


def measure_reads(files: Sequence[Path], seconds: float = 1.5) -> Reads | str:
    """What was measured, or why nothing was."""
    sizes = {path: path.stat().st_size for path in files if path.is_file()}
    whole = sum(sizes.values())
    if not sizes:
        return "nobody knows which files are read"
    if whole < LEAST_BYTES:
        return f"{whole / 1e6:,.1f} MB are too little to measure: they stay in the page cache"
    largest = sorted(sizes, key=lambda path: -sizes[path])[:_MOST_FILES]
    refused = drop_files(largest)
    if refused is not None:
        return f"the page cache could not be dropped: {refused}"
    chosen = random.Random(0)
    descriptors = [os.open(path, os.O_RDONLY) for path in largest]
    try:
        # First in order, at the beginning of the largest; random reads go to the rest, which is still cold.
        skipped, rate = _read_on(descriptors[0], seconds / 3)
        for descriptor in descriptors:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        bounds = [(skipped if number == 0 else 0, sizes[path]) for number, path in enumerate(largest)]
        small, large = _read_anywhere(descriptors, bounds, chosen, 2 * seconds / 3)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return Reads(
        reads=len(small) + len(large),
        small_ms=float(np.median(small)) * 1e3,
        random_mb_per_second=LARGE_BYTES * len(large) / max(1e-9, sum(large)) / 1e6,
        sequential_mb_per_second=rate,
        data_bytes=whole,
    )


def _read_on(descriptor: int, seconds: float) -> tuple[int, float]:
    """How far it got, at most half of the file, and MB a second."""
    half = min(_SEQUENTIAL_BYTES, os.fstat(descriptor).st_size // 2)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    at, begun = 0, clock.now()
    while at < half and clock.now() - begun < seconds:
        at += len(os.pread(descriptor, _CHUNK_BYTES, at))
    return min(2 * half, at + 4 * _CHUNK_BYTES), at / (clock.now() - begun) / 1e6


def _read_anywhere(
    descriptors: list[int], bounds: list[tuple[int, int]], chosen: random.Random, seconds: float
) -> tuple[list[float], list[float]]:
    """Seconds of each read: small ones, and larger ones."""
    taken: dict[int, list[float]] = {SMALL_BYTES: [], LARGE_BYTES: []}
    room = [max(1, last - first - LARGE_BYTES) for first, last in bounds]
    deadline = clock.now() + seconds
    for number in range(_MOST_READS):
        size = LARGE_BYTES if number % 2 else SMALL_BYTES
        (which,) = chosen.choices(range(len(descriptors)), room)
        at = bounds[which][0] + chosen.randrange(room[which]) // SMALL_BYTES * SMALL_BYTES
        begun = clock.now()
        os.pread(descriptors[which], size, at)
        ended = clock.now()
        taken[size].append(ended - begun)
        if ended > deadline and number:
            break
    return taken[SMALL_BYTES], taken[LARGE_BYTES]
