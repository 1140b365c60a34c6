"""Who may write into the cache: how much there is, and whether more fits.

What counts is what the directories hold. Counting that takes milliseconds for some thousand files, so the result is
kept in the file `size`, and everyone who adds or removes files changes it under a lock: first the number grows, then a
file is written; first a file is removed, then the number shrinks. A process that dies in between leaves a number that
is too high, never one that is too low. When the number says that the cache is full, and it has changed since the last
count, it is counted again. A number that was written before the system was started last is not believed.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.store.cache.directory import HEADER_BYTES, CacheDirectory, check_folder
from headrace.store.cache.eviction import evict
from headrace.store.cache.files import UnfinishedFile, boot_id, is_abandoned
from headrace.store.cache.locks import LockFile

WAIT_SECONDS = 1.0
"""How long a reader waits to write into the cache. After that it goes on without caching."""
_REFUSALS_PER_EVICTION = 64
"""How often a full cache looks for datasets that nobody uses any more: at every so-manieth refusal."""
_SHARE_PER_EVICTION = 64
"""An eviction frees at least this part of the limit, so that it is seldom needed."""


@dataclass
class CacheSize:
    """The file `size`, locked."""

    file: LockFile
    total_bytes: int
    counted_bytes: int
    """What the last count has found; the same as the total if nothing has changed since."""
    is_known: bool
    """Whether the numbers can be believed."""

    def add(self, count: int) -> None:
        if not self.is_known:
            return  # whoever needs the numbers will count
        self.total_bytes = max(0, self.total_bytes + count)
        self._write()

    def set_counted(self, total: int) -> None:
        self.total_bytes = self.counted_bytes = total
        self.is_known = True
        self._write()

    def _write(self) -> None:
        numbers = self.total_bytes, self.counted_bytes
        os.pwrite(self.file.descriptor, b"%020d %020d %s\n" % (*numbers, boot_id().hex().encode()), 0)


@contextlib.contextmanager
def locked_size(directory: CacheDirectory, wait_seconds: float) -> Iterator[CacheSize]:
    """The size of the cache, for one process at a time. A BlockingIOError says that another one has it for long."""
    with LockFile(directory.size) as file:
        if not file.lock_within(wait_seconds):
            raise BlockingIOError(f"{directory.size}: is locked by another process")
        total, counted, boot = _read_size(file.descriptor)
        yield CacheSize(file, total, counted, boot == boot_id().hex())


def noted_bytes(directory: CacheDirectory) -> int:
    """How much there is at most, as far as it was written down; 0 if it never was."""
    try:
        descriptor = os.open(directory.size, os.O_RDONLY)
    except OSError:
        return 0
    try:
        return _read_size(descriptor)[0]
    finally:
        os.close(descriptor)


def _read_size(descriptor: int) -> tuple[int, int, str]:
    """The total, what was counted last, and in which boot that was written."""
    try:
        total, counted, boot = os.pread(descriptor, 200, 0).decode().split()
        return int(total), int(counted), boot
    except ValueError:
        return 0, 0, ""


class Admission:
    """Decides for one process which files are written, so that the cache keeps to its limit."""

    def __init__(self, directory: CacheDirectory, limit_bytes: int, keep_free_bytes: int) -> None:
        self._directory = directory
        self._limit = limit_bytes
        self._keep_free = keep_free_bytes
        self._own_groups: set[str] = set()
        self._has_counted = False
        self._refusals = 0
        self.disk_is_full = False
        """Whether the last refusal was for lack of space on the disk, with room below the limit."""

    def admit(self, group: str, key: str, length: int) -> UnfinishedFile | None:
        """A file to write the bytes to, or None if there is no room for them."""
        needed = HEADER_BYTES + length
        self._own_groups.add(group)
        with locked_size(self._directory, WAIT_SECONDS) as size:
            if not self._make_room(size, needed):
                return None
            size.add(needed)
            try:
                return UnfinishedFile(self._directory.data / group, key)
            except BaseException:
                size.add(-needed)
                raise

    def give_back(self, file: UnfinishedFile, length: int) -> None:
        """Remove a file that could not be written."""
        file.discard()
        self._shrink(HEADER_BYTES + length)

    def remove(self, group: str, key: str, length: int) -> None:
        """Remove a damaged file."""
        with contextlib.suppress(OSError):
            check_folder(self._directory.data / group)
            os.unlink(self._directory.file(group, key))
            self._shrink(HEADER_BYTES + length)

    def _shrink(self, count: int) -> None:
        # If it fails the number stays too high, until somebody counts.
        with contextlib.suppress(OSError), locked_size(self._directory, WAIT_SECONDS) as size:
            size.add(-count)

    def _make_room(self, size: CacheSize, needed: int) -> bool:
        if not size.is_known:
            self._count(size)
        if self._fits(size, needed):
            return True
        # Every process counts at its first refusal: somebody may have removed files by hand.
        if size.total_bytes != size.counted_bytes or not self._has_counted:
            self._count(size)
            if self._fits(size, needed):
                return True
        return self._evict(size, needed)

    def _count(self, size: CacheSize) -> None:
        size.set_counted(count_bytes(self._directory))
        self._has_counted = True

    def _fits(self, size: CacheSize, needed: int) -> bool:
        below_limit = size.total_bytes + needed <= self._limit
        self.disk_is_full = below_limit and self._missing_space(needed) > 0
        return below_limit and not self.disk_is_full

    def _missing_space(self, needed: int) -> int:
        """How many bytes must be freed before the disk has room for so many more."""
        if not self._keep_free:
            return 0
        disk = os.statvfs(self._directory.path)
        return self._keep_free + needed - disk.f_bavail * disk.f_frsize

    def _evict(self, size: CacheSize, needed: int) -> bool:
        self._refusals += 1
        worthwhile = needed <= self._limit and self._refusals % _REFUSALS_PER_EVICTION == 1
        if not worthwhile:
            return False
        goal = max(
            size.total_bytes + needed - self._limit,
            self._missing_space(needed),
            self._limit // _SHARE_PER_EVICTION,
        )
        freed = evict(self._directory, goal, spared=self._own_groups)
        size.add(-freed)
        if not self._fits(size, needed):
            return False
        self._refusals = 0
        return True


def count_bytes(directory: CacheDirectory) -> int:
    """What the cached files take, with those that are being written. What dead writers have left is removed. Call it
    with the size locked."""
    total = 0
    for group in directory.groups():
        listing = directory.listing(group)
        total += sum(listing.complete.values())
        for name, size in listing.temporary.items():
            path = directory.file(group, name)
            if not is_abandoned(path):
                total += size
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    return total
