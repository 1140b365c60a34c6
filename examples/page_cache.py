"""Drop a file's pages from the page cache, and see which are still there, for experiments that need a cold cache.

    drop(path)                  # asks the kernel to drop the file's pages; needs only permission to read the file
    resident_share(path)        # 0.0 if all pages were dropped, 1.0 if all of them are in memory

The kernel may keep some pages: those that are not written yet (so `drop` writes them first), those that a process has
mapped, and all pages of a file system in memory. So check before you assume that the cache is cold.
"""

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_UNDER_WAY_SECONDS = 0.05
"""Read-ahead continues in the background: pages that are still being read can neither be dropped nor counted."""


def drop(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        time.sleep(_UNDER_WAY_SECONDS)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident_share(path: Path) -> float:
    pages = _pages(path)
    return float(pages.mean()) if len(pages) else 0.0


def resident_bytes(path: Path) -> int:
    """How much of the file is in memory once the reads in progress have finished."""
    time.sleep(_UNDER_WAY_SECONDS)
    return int(_pages(path).sum()) * mmap.PAGESIZE


def _pages(path: Path) -> NDArray[np.uint8]:
    """For each page of a file, 1 if it is in the page cache: asks mincore(2) about a map that is never touched."""
    size = path.stat().st_size
    if not size:
        return np.empty(0, np.uint8)
    found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        library = ctypes.CDLL(None, use_errno=True)
        failed = library.mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)
        )
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    return np.bitwise_and(found, 1, out=found)
