"""A directory of the local file system as a store."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import StorageError
from headrace.store.files import TEMPORARY_PREFIX, atomic_file, read_stretch, reading, remove_leftovers
from headrace.store.locks import LOCK_NAME, directory_lock
from headrace.store.maps import map_bytes, read_bytes
from headrace.store.store import FileStatus, PendingFile


class LocalStore:
    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.name = os.fspath(directory)
        # Absolute from the start: files are opened later, perhaps from another working directory.
        self.directory = Path(directory).absolute()

    def __repr__(self) -> str:
        return f"LocalStore({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalStore) and self.directory == other.directory

    def __hash__(self) -> int:
        return hash(self.directory)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalStore, (str(self.directory),)

    def path(self, file: str) -> Path:
        return self.directory / file

    def locate(self, file: str) -> str:
        return str(Path(self.name) / file)

    # Reading

    def exists(self) -> bool:
        return self.directory.is_dir()

    def files(self) -> list[str]:
        try:
            with os.scandir(self.directory) as entries:
                return sorted(entry.name for entry in entries if entry.is_file() and not _is_ours(entry.name))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def has(self, file: str) -> bool:
        return os.path.isfile(self.path(file))

    def status(self, file: str) -> FileStatus:
        with reading(self.path(file)):
            status = os.stat(self.path(file))
        return FileStatus(status.st_size, status.st_mtime_ns)

    def head(self, file: str, count: int) -> tuple[bytes, int]:
        return read_stretch(self.path(file), 0, count)

    def read(self, file: str, start: int = 0, count: int | None = None) -> bytes:
        return read_stretch(self.path(file), start, count)[0]

    def view(self, file: str, *, in_memory: bool = False) -> NDArray[np.uint8]:
        return read_bytes(self.path(file)) if in_memory else map_bytes(self.path(file))

    # Writing

    def create(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{self.name}: cannot be created: {error.strerror}; choose a directory that you can write to"
            ) from error

    def pending(self, file: str) -> AbstractContextManager[PendingFile]:
        return atomic_file(self.path(file))

    def remove(self, file: str) -> None:
        self.path(file).unlink(missing_ok=True)

    def remove_all(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def remove_leftovers(self) -> None:
        remove_leftovers(self.directory)

    def folder(self, name: str) -> "LocalStore":
        return LocalStore(os.path.join(self.name, name))

    @contextlib.contextmanager
    def lock(self, holder: str) -> Iterator[None]:
        with directory_lock(self.directory, holder):
            yield

    def scratch(self) -> Path:
        return self.directory


def _is_ours(name: str) -> bool:
    """Whether a file is the lock or an incomplete file, and so not part of the content."""
    return name == LOCK_NAME or name.startswith(TEMPORARY_PREFIX)
