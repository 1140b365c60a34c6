"""Reading, checking and copying many files at once, so that a store that answers slowly is used well.

Each file is read in ranges, a few of them ahead of need, which pass through a checksum on their way. Memory stays
bounded: so many files, so many ranges of each, and only a few large files, which stores upload in parts.
"""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from headrace.errors import CorruptError, HeadraceError, RebuiltError
from headrace.format.checksum import hasher
from headrace.format.container import StoredFile
from headrace.format.manifest import Manifest, read_version
from headrace.store.store import Store

RANGE_BYTES = 4 << 20
_LARGE_BYTES = 16 << 20
_FILES_AT_ONCE = 8
_LARGE_AT_ONCE = 3
_RANGES_AHEAD = 4
_RANGES_AT_ONCE = 16
_SECONDS_BETWEEN_REPORTS = 0.1
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class CopyProgress:
    stage: str
    """"checking" for files that are there already, then "copying"."""
    bytes: int
    total_bytes: int
    files: int
    total_files: int


OnCopyProgress = Callable[[CopyProgress], object]


class _StoppedError(Exception):
    """Another file has failed, or the user has pressed Ctrl-C."""


class FileRun:
    """Work on several files at once, in threads. The caller's own thread reports how far it is."""

    def __init__(self, stage: str, files: Sequence[StoredFile], progress: OnCopyProgress) -> None:
        self._files, self._progress = files, progress
        total_bytes = sum(stored.bytes for stored in files)
        self._state = CopyProgress(
            stage=stage, bytes=0, total_bytes=total_bytes, files=0, total_files=len(files)
        )
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._large = threading.BoundedSemaphore(_LARGE_AT_ONCE)
        self._ranges = ThreadPoolExecutor(_RANGES_AT_ONCE, "headrace-copy-range")

    def carry_out(self, work: Callable[[StoredFile], _Result]) -> list[_Result]:
        """The results of `work` for all files. The first error ends it all."""
        with self._ranges, ThreadPoolExecutor(_FILES_AT_ONCE, "headrace-copy-file") as threads:
            futures = [threads.submit(self._work, work, stored) for stored in self._files]
            try:
                self._wait(futures)
            except BaseException:
                self._stopped.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def _wait(self, futures: "list[Future[_Result]]") -> None:
        left = set(futures)
        self._progress(self._state)
        while left:
            done, left = wait(left, _SECONDS_BETWEEN_REPORTS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            self._progress(self._state)

    def _work(self, work: Callable[[StoredFile], _Result], stored: StoredFile) -> _Result:
        is_large = stored.bytes > _LARGE_BYTES
        with self._large if is_large else contextlib.nullcontext():
            result = work(stored)
        self._count(files=1)
        return result

    def _count(self, *, bytes: int = 0, files: int = 0) -> None:
        with self._lock:
            now = self._state
            self._state = replace(now, bytes=now.bytes + bytes, files=now.files + files)

    def skip(self, stored: StoredFile) -> None:
        """Count a file that needs no reading."""
        self._count(bytes=stored.bytes)

    def read(self, store: Store, stored: StoredFile) -> Iterator[memoryview]:
        """All bytes that a file should have, in order, with a few ranges under way."""
        starts = iter(range(0, stored.bytes, RANGE_BYTES))

        def begin(count: int) -> list[Future[memoryview]]:
            return [
                self._ranges.submit(self._fetch, store, stored, start)
                for start in itertools.islice(starts, count)
            ]

        waiting = deque(begin(_RANGES_AHEAD))
        while waiting:
            content = waiting.popleft().result()
            waiting.extend(begin(1))
            self._count(bytes=len(content))
            yield content

    def _fetch(self, store: Store, stored: StoredFile, start: int) -> memoryview:
        if self._stopped.is_set():
            raise _StoppedError
        return store.fetch(stored.file, start, min(start + RANGE_BYTES, stored.bytes))

    def checksum(self, store: Store, stored: StoredFile) -> str:
        digest = hasher()
        for content in self.read(store, stored):
            digest.update(content)
        return str(digest.hexdigest())

    def take_back(self, stored: StoredFile) -> None:
        """Forget the bytes of a file that is read once more."""
        self._count(bytes=-stored.bytes)


def copy_files(
    source: Store, manifest: Manifest, into: Store, files: Sequence[StoredFile], progress: OnCopyProgress
) -> None:
    """Copy files of a dataset. A file gets its name when all of its bytes have passed the check."""
    run = FileRun("copying", files, progress)

    def copy_one(stored: StoredFile) -> None:
        try:
            _copy_checked(run, source, into, stored)
        except HeadraceError:
            raise
        except FileNotFoundError:
            raise _missing(source, manifest, stored) from None

    run.carry_out(copy_one)


def _copy_checked(run: FileRun, source: Store, into: Store, stored: StoredFile) -> None:
    try:
        _copy_once(run, source, into, stored)
    except _WrongContentError:
        # Bytes may change on their way: what is wrong is read once more.
        run.take_back(stored)
        try:
            _copy_once(run, source, into, stored)
        except _WrongContentError as wrong:
            raise CorruptError(
                f"{source.locate(stored.file)}: checksum {wrong}, but the manifest says {stored.checksum}; the file is "
                "damaged and was not copied. Restore it from another copy, or build the dataset again"
            ) from None


class _WrongContentError(Exception):
    """The checksum of what was read is another one."""


def _copy_once(run: FileRun, source: Store, into: Store, stored: StoredFile) -> None:
    digest = hasher()
    with into.pending(stored.file) as pending:
        for content in run.read(source, stored):
            digest.update(content)
            pending.file.write(content)
        if digest.hexdigest() != stored.checksum:
            raise _WrongContentError(digest.hexdigest())


def _missing(source: Store, manifest: Manifest, stored: StoredFile) -> HeadraceError:
    if read_version(source, manifest.checksum) is None:
        return RebuiltError(f"{source.name}: was built again while it was copied; do the same copy again")
    return CorruptError(
        f"{source.locate(stored.file)}: is missing, although the manifest names it; restore it from another copy, or "
        "build the dataset again"
    )
