"""Dropping files from the page cache, so that the next read comes from the disk; and looking whether it worked.

No permission is needed for files that one may read: the kernel is asked file by file. It keeps pages that have not been
written yet, or that some process has mapped.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_KEPT_SHARE = 0.05
"""Of pages still there, up to which a file counts as dropped."""


def drop_files(files: Iterable[Path]) -> str | None:
    """Drop them; what stood in the way, if anything did."""
    if not hasattr(os, "posix_fadvise"):
        return "this OS cannot drop single files from its cache"
    files = list(files)
    if not files:
        return "nobody knows which files are read: give --files"
    refused, resident, size = [], 0, 0
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            refused.append(f"{path}: {error.strerror}")
            continue
        try:
            with contextlib.suppress(OSError):
                # Pages that wait to be written stay; a file on a read-only disk has none.
                os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            size += os.fstat(descriptor).st_size
            resident += resident_bytes(descriptor) or 0
        finally:
            os.close(descriptor)
    if refused:
        return f"{len(refused)} of {len(files)} files could not be opened ({refused[0]})"
    if size and resident / size > _KEPT_SHARE:
        return f"{resident / size:.0%} of the files' pages stayed in memory: another process has them mapped"
    return None


def resident_bytes(descriptor: int) -> int | None:
    """How much of a file is in memory; None if that cannot be asked."""
    size = os.fstat(descriptor).st_size
    if not size:
        return 0
    with contextlib.suppress(OSError, AttributeError, ValueError):
        libc = ctypes.CDLL(None, use_errno=True)
        with mmap.mmap(
            descriptor, size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE
        ) as mapped:
            pages = -(-size // mmap.PAGESIZE)
            vector = (ctypes.c_ubyte * pages)()
            holder = (ctypes.c_char * size).from_buffer(mapped)
            try:
                asked = libc.mincore(ctypes.c_void_p(ctypes.addressof(holder)), ctypes.c_size_t(size), vector)
            finally:
                del holder
            if asked == 0:
                return int((np.frombuffer(bytes(vector), np.uint8) & 1).sum()) * mmap.PAGESIZE
    return None
