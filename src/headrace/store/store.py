"""The interface of a store. A store is a place that holds files by name: a directory, memory, or a bucket.

All code that reads or writes a dataset uses a store and never a path, so that a new kind of place needs only a new
module here and a line in `address.py`. A store can be pickled, and opened again in another process by its `name`.
"""

import contextlib
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DirectoryInUseError, StorageError

PAUSES = random.SystemRandom()
"""Random pauses must not change what the user's program draws from `random`, nor be the same in forked processes."""
CLAIM_NAME = ".headrace"
"""The empty file that marks a place as claimed."""


@dataclass
class PendingFile:
    """A file that is being written. `name` is its final name, which may still change (to include a checksum)."""

    file: BinaryIO
    name: str


@dataclass(frozen=True)
class FileStatus:
    bytes: int
    modified_ns: int


FileRange = tuple[str, int, int]
"""A file, and which of its bytes: from here to there."""


class Store(Protocol):
    """Names of files are plain, without slashes.

    Methods raise a FileNotFoundError for a file that does not exist, and a StorageError if it cannot be read or written
    for another reason.
    """

    @property
    def name(self) -> str:
        """The store as people write it: a path or an address."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether each read is a request to a server, so that reads should be few, large and early."""
        ...

    def locate(self, file: str) -> str:
        """The full name of a file, for messages."""
        ...

    # Reading

    def exists(self) -> bool:
        """Whether the place exists, with or without files."""
        ...

    def files(self) -> list[str]:
        """The sorted names of all complete files; empty if the place does not exist."""
        ...

    def everything(self) -> dict[str, int]:
        """The names, with folders, and the sizes of all that is here: incomplete files, locks and marks as well."""
        ...

    def has(self, file: str) -> bool:
        """Whether a file of that name exists."""
        ...

    def status(self, file: str) -> FileStatus: ...

    def stamp(self, file: str) -> str | None:
        """A text that is another one when the file has been replaced; None if there is no such file."""
        ...

    def head(self, file: str, count: int) -> tuple[bytes, int]:
        """The first `count` bytes of a file (fewer if it is shorter), and its size."""
        ...

    def read(self, file: str, start: int = 0, count: int | None = None) -> bytes:
        """A range of a file, or all of it; the range is shorter if the file ends before."""
        ...

    def fetch(self, file: str, start: int, stop: int) -> memoryview:
        """Exactly these bytes of a file; a StorageError if it ends before. Many threads may fetch at once."""
        ...

    def fetch_together(self, ranges: Sequence[FileRange]) -> list[memoryview | None]:
        """Several ranges, requested at the same time by this one thread. What is None did not come at the first
        attempt, or cannot be had in this way: `fetch` it, which tries again and says what is wrong."""
        ...

    def view(self, file: str, *, in_memory: bool = False) -> NDArray[np.uint8]:
        """All bytes of a file, read-only: memory-mapped if the store can do that, or read into RAM with `in_memory`."""
        ...

    # Writing

    def create(self) -> None:
        """Create the place, if that is needed before files can be written."""
        ...

    def pending(self, file: str) -> AbstractContextManager[PendingFile]:
        """A file that gets its name when the block ends, complete and durable, or never if the block raises."""
        ...

    def remove(self, file: str) -> None:
        """Delete a file, if it exists. Readers that have it open can go on reading."""
        ...

    def take(self, file: str, folder: Self) -> None:
        """Move a complete file here, from a folder inside this place, in one step. If it is not there any more but
        here, it has been moved before."""
        ...

    def replace(self, file: str, folder: Self, expected: str | None) -> None:
        """Like `take`, but only if the file that is here still has the stamp that is expected (None: there is none).
        Otherwise a DirectoryInUseError says that somebody else has written it."""
        ...

    def claim(self) -> None:
        """Create a place that is ours alone: `remove_all` may then delete it with everything in it. A place that holds
        files and was not claimed before is refused with a StorageError, because they are somebody else's."""
        ...

    def remove_all(self) -> None:
        """Delete the place with all files and folders in it, if it exists. Call it only for a place that is ours."""
        ...

    def remove_leftovers(self) -> None:
        """Delete what crashed writers have left behind. Call it only for a place that is ours, holding the lock."""
        ...

    def folder(self, name: str) -> "Store":
        """A place inside this one."""
        ...

    def lock(self, holder: str) -> AbstractContextManager[None]:
        """Lock the place for one writer; a DirectoryInUseError names the holder. The lock ends with its process."""
        ...

    def scratch(self) -> Path:
        """A local directory for temporary files, with about as much space; `remove_all` removes it too."""
        ...


def write_file(store: Store, file: str, chunks: Iterable[bytes | memoryview]) -> None:
    with store.pending(file) as pending:
        for chunk in chunks:
            pending.file.write(chunk)


@contextlib.contextmanager
def lock_in_turn(store: Store, holder: str, wait_seconds: float) -> Iterator[None]:
    """Lock a store for a moment, after those who have it now; their DirectoryInUseError if that takes too long."""
    deadline = time.monotonic() + wait_seconds
    while True:
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(store.lock(holder))
            except DirectoryInUseError:
                if time.monotonic() > deadline:
                    raise
            else:
                yield
                return
        # Not all at the same moment: many may be waiting.
        time.sleep(PAUSES.uniform(0.05, 0.5))


def written_by_another(place: str) -> DirectoryInUseError:
    """The error of a file that should be replaced, but is not the one that was expected."""
    return DirectoryInUseError(
        f"{place}: was written by somebody else in the meantime, and was not replaced; look at what is there now, and "
        "start again"
    )


def cut_off(place: str, size: int, start: int, stop: int) -> StorageError:
    """The error of a file that ends before the bytes that are needed."""
    return StorageError(
        f"{place}: has {size} bytes, but bytes {start} to {stop} of it are needed; it was cut off or replaced, so copy "
        "or build it again"
    )
