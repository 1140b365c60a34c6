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

UNPROVED = "nobody can tell whether"
"""How a problem begins that does not keep anyone from measuring."""
_KEPT_SHARE = 0.05
"""Of pages still there, up to which a file counts as dropped."""


def drop_files(files: Iterable[Path]) -> str | None:
    """Drop them; what stood in the way of measuring, or of being sure, if anything did."""
    if not hasattr(os, "posix_fadvise"):
        return "not measured: this OS cannot drop single files from its cache"
    files = list(files)
    if not files:
        return "not measured: nobody knows which files are read: give --files"
    refused, unproved, resident, size = [], 0, 0, 0
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
            found = resident_bytes(descriptor)
            if found is None:
                unproved += 1
            else:
                size += os.fstat(descriptor).st_size
                resident += found
        finally:
            os.close(descriptor)
    if refused:
        return f"not measured: {len(refused)} of {len(files)} files could not be opened ({refused[0]})"
    if size and resident / size > _KEPT_SHARE:
        return (
            f"not measured: {resident / size:.0%} of the files' pages stayed in memory: another process has them "
            "mapped, or their file system is in memory"
        )
    if unproved:
        return f"{UNPROVED} {unproved} of {len(files)} files were dropped: the kernel tells that only to their owner"
    return None


def resident_bytes(descriptor: int) -> int | None:
    """How much of a file is in memory; None if that cannot be asked."""
    status = os.fstat(descriptor)
    size = status.st_size
    if not size:
        return 0
    if os.geteuid() not in (0, status.st_uid):
        # To others the kernel says that all of it is, since that would tell what someone else reads.
        return None
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
