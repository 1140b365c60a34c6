"""The cache as one process uses it."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import StorageError
from headrace.store.cache.admission import WAIT_SECONDS, Admission, locked_size
from headrace.store.cache.datasets import Lease
from headrace.store.cache.directory import CacheDirectory, check_group, check_key
from headrace.store.cache.files import DamagedFile, make_header, map_file
from headrace.store.cache.turns import turn
from headrace.store.files import writing

_log = logging.getLogger(__name__)
_warned: set[str] = set()
"""The kinds of problems that this process has warned of."""
_LONGEST_REST = 1024


class Cache:
    """Bytes by name on the local disk, for all processes of the machine. Threads and forked children may use one
    object, and a pickled one is the same cache elsewhere.

    A problem of the disk is no error here: it is logged once, and the caller goes on with the bytes that it has.
    """

    def __init__(self, directory: Path, limit_bytes: int, *, keep_free_bytes: int = 0) -> None:
        """A SettingsError says that the directory is somebody else's, a StorageError that it cannot be written.
        `keep_free_bytes` of the disk are left to others, whatever the limit is."""
        self.directory = CacheDirectory(Path(directory))
        self.limit_bytes = limit_bytes
        self.keep_free_bytes = keep_free_bytes
        with _usable(self.directory):
            self.directory.claim()
            # Where files cannot be locked there can be no cache, and this is the time to find out.
            with contextlib.suppress(BlockingIOError), locked_size(self.directory, WAIT_SECONDS):
                pass
        self._admission = Admission(self.directory, limit_bytes, keep_free_bytes)
        self._leases: dict[str, Lease] = {}
        self._is_full = False
        self._failures = 0
        self._rest = 0

    def __repr__(self) -> str:
        return f"Cache({str(self.directory.path)!r}, {self.limit_bytes})"

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = self.directory.path, self.limit_bytes, self.keep_free_bytes, tuple(self._leases)
        return _reopen, arguments

    def for_dataset(self, dataset_id: str, groups: Sequence[str], description: str = "") -> None:
        """Say which groups belong to a dataset, and keep them in the cache as long as this object exists."""
        try:
            lease = self._leases.get(dataset_id) or Lease(self.directory, dataset_id)
            lease.note(groups, description)
        except OSError as error:
            _warn("lease", f"{self.directory.path}: the cache cannot note what is in use: {error}")
            return
        self._leases[dataset_id] = lease

    def get(self, group: str, key: str, count: int) -> NDArray[np.uint8] | None:
        """The cached bytes as a read-only memory map, or None. A damaged file is removed."""
        check_group(group)
        check_key(key, count)
        try:
            return map_file(self.directory.file(group, key), f"{group}/{key}", count)
        except DamagedFile as error:
            self.remove(group, key, count, str(error))
        except OSError as error:
            _warn("read", f"{error}; the cache is not used for it")
        return None

    def remove(self, group: str, key: str, count: int, reason: str = "its bytes are wrong") -> None:
        """Remove a file that turned out to be damaged."""
        _log.info("%s: removed from the cache: %s", self.directory.file(group, key), reason)
        self._admission.remove(group, key, count)

    def put(self, group: str, key: str, content: memoryview | bytes) -> NDArray[np.uint8] | None:
        """Write bytes and return them as `get` does, or None if they were not admitted."""
        view = memoryview(content).cast("B")
        found = self.get(group, key, len(view))
        if found is not None:
            return found
        if self._rest > 0:
            self._rest -= 1
            return None
        try:
            written = self._write(group, key, view)
        except OSError as error:
            self._take_a_rest(error)
            return None
        self._failures = 0
        self._is_full = not written
        if self._is_full and self._admission.disk_is_full:
            _warn("full", f"{self.directory.path}: the disk is nearly full, so nothing more is cached there")
        return self.get(group, key, len(view)) if written else None

    def _write(self, group: str, key: str, content: memoryview) -> bool:
        file = self._admission.admit(group, key, len(content))
        if file is None:
            return False
        try:
            header = make_header(f"{group}/{key}", content)
            file.write([header, content])
        except BaseException:
            self._admission.give_back(file, len(content))
            raise
        return True

    def _take_a_rest(self, error: OSError) -> None:
        """Do not try again at once, but after ever more files: a full disk would fail all of them, slowly."""
        self._failures += 1
        self._rest = min(2**self._failures, _LONGEST_REST)
        self._is_full = True
        if not isinstance(error, BlockingIOError):
            reason = os.strerror(error.errno) if error.errno else str(error)
            _warn("write", f"{self.directory.path}: cannot be written: {reason}; going on without caching")

    @contextlib.contextmanager
    def fetching(self, group: str, key: str) -> Iterator[bool]:
        """Around a fetch: True if the caller is to fetch, False if another thread or process has just done so, and the
        bytes may be in the cache by now. If they are not, fetch them: a full cache takes nothing."""
        if self._is_full:
            # What is fetched will not be cached, so there is nothing to wait for.
            yield True
            return
        with turn(self.directory.locks, f"{group}/{key}") as ours:
            yield ours


def _reopen(path: Path, limit_bytes: int, keep_free_bytes: int, dataset_ids: Sequence[str]) -> Cache:
    cache = Cache(path, limit_bytes, keep_free_bytes=keep_free_bytes)
    for dataset_id in dataset_ids:
        with contextlib.suppress(OSError):
            # The note is there: only the lock is needed.
            cache._leases[dataset_id] = Lease(cache.directory, dataset_id)
    return cache


@contextlib.contextmanager
def _usable(directory: CacheDirectory) -> Iterator[None]:
    try:
        with writing(directory.path):
            yield
    except StorageError as error:
        raise StorageError(f"the cache cannot be used: {error}") from error


def _warn(kind: str, message: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        _log.warning("%s", message)
