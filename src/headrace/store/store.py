"""What a store must offer. A store is one place that holds files by name: a directory, memory, next a bucket's prefix.

Everything that reads or writes a dataset asks a store and never a path, so that a new kind of place is one new module
here and one line in `address.py`. A store can be pickled, and opened again in another process by its `name`.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass
class PendingFile:
    """A file that is being written; `name` is the one it will get, and may still change (to hold a checksum)."""

    file: BinaryIO
    name: str


@dataclass(frozen=True)
class FileStatus:
    bytes: int
    modified_ns: int


class Store(Protocol):
    """Names of files are plain, without slashes. Whoever asks for a file that is not there gets a FileNotFoundError,
    and a StorageError if it cannot be read or written for another reason."""

    @property
    def name(self) -> str:
        """The store as people write it: a path or an address."""
        ...

    def locate(self, file: str) -> str:
        """The full name of a file, for messages."""
        ...

    # Reading

    def exists(self) -> bool:
        """Whether there is such a place at all, with files or without."""
        ...

    def files(self) -> list[str]:
        """The names of all files that are whole, sorted; none, if the place does not exist."""
        ...

    def has(self, file: str) -> bool:
        """Whether there is a file of that name."""
        ...

    def status(self, file: str) -> FileStatus: ...

    def head(self, file: str, count: int) -> tuple[bytes, int]:
        """The first `count` bytes of a file (fewer, if there are no more), and its size."""
        ...

    def read(self, file: str, start: int = 0, count: int | None = None) -> bytes:
        """A stretch of a file, or all of it; shorter where the file ends."""
        ...

    def view(self, file: str, *, in_memory: bool = False) -> NDArray[np.uint8]:
        """All bytes of a file, read-only: mapped where the store can do that, unless they are wanted in RAM."""
        ...

    # Writing

    def create(self) -> None:
        """Make the place, if it has to be made before files can be written."""
        ...

    def pending(self, file: str) -> AbstractContextManager[PendingFile]:
        """A file that takes its name when the block ends, whole and durable, or leaves no trace if the block raises."""
        ...

    def remove(self, file: str) -> None:
        """Delete a file, if it is there. Who has it open keeps it."""
        ...

    def remove_all(self) -> None:
        """Delete the place with all files and folders in it, if it is there."""
        ...

    def remove_leftovers(self) -> None:
        """Delete what writers that died have left behind. Call it only while holding the lock."""
        ...

    def folder(self, name: str) -> "Store":
        """A place inside this one."""
        ...

    def lock(self, holder: str) -> AbstractContextManager[None]:
        """Hold the place for one writer; a DirectoryInUseError names another holder. Death releases the lock."""
        ...

    def scratch(self) -> Path:
        """A local directory for temporary files, with about as much room; `remove_all` removes it too."""
        ...


def write_file(store: Store, file: str, chunks: Iterable[bytes | memoryview]) -> None:
    with store.pending(file) as pending:
        for chunk in chunks:
            pending.file.write(chunk)
