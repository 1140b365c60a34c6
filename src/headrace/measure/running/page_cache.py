"""Dropping files from the page cache, so that the next read comes from the disk; and checking that it worked.

No special permission is needed for readable files: the kernel is asked file by file. It keeps pages that have not been
written yet, or that a process has mapped.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

UNPROVED = "it is uncertain whether"
"""How a problem begins that is no obstacle to measuring."""
_KEPT_SHARE = 0.05
"""The largest share of pages still in memory with which files count as dropped."""


def drop_files(files: Iterable[Path]) -> str | None:
    """Drop files. Returns the problem, if they are still in memory or if nobody can be sure that they are not."""
    if not hasattr(os, "posix_fadvise"):
        return "this OS cannot drop single files from its cache"
    dropped = _Dropped()
    for path in files:
        dropped.drop(path)
    return dropped.problem


@dataclass
class _Dropped:
    """What became of the files that were to be dropped."""

    files: int = 0
    refused: list[str] = field(default_factory=list)
    """Those that could not be opened, and why."""
    unproved: int = 0
    checked_bytes: int = 0
    resident_bytes: int = 0

    def drop(self, path: Path) -> None:
        self.files += 1
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            self.refused.append(f"{path}: {error.strerror}")
            return
        try:
            with contextlib.suppress(OSError):
                # Pages that wait to be written would stay; a file on a read-only disk has none.
                os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._check(descriptor)
        finally:
            os.close(descriptor)

    def _check(self, descriptor: int) -> None:
        found = resident_bytes(descriptor)
        if found is None:
            self.unproved += 1
        else:
            self.checked_bytes += os.fstat(descriptor).st_size
            self.resident_bytes += found

    @property
    def problem(self) -> str | None:
        if not self.files:
            return "the files that are read are unknown; give --files"
        if self.refused:
            return f"{len(self.refused)} of {self.files} files could not be opened ({self.refused[0]})"
        kept = self.resident_bytes / self.checked_bytes if self.checked_bytes else 0.0
        if kept > _KEPT_SHARE:
            return (
                f"{kept:.0%} of the files' pages stayed in memory: another process has mapped them, or their file "
                "system is in memory"
            )
        if self.unproved:
            return (
                f"{UNPROVED} {self.unproved} of {self.files} files were dropped: the kernel says so only to the "
                "owner of a file"
            )
        return None


def resident_bytes(descriptor: int) -> int | None:
    """How much of a file is in memory; None if that cannot be found out."""
    status = os.fstat(descriptor)
    size = status.st_size
    if not size:
        return 0
    if os.geteuid() not in (0, status.st_uid):
        # To anyone else the kernel reports all pages as resident, so as not to reveal what others read.
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
