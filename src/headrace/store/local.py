"""A directory of the local file system as a store."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import StorageError
from headrace.store.files import (
    TEMPORARY_PREFIX,
    atomic_file,
    flush_directory,
    read_stretch,
    reading,
    remove_leftovers,
    writing,
)
from headrace.store.locks import LOCK_NAME, directory_lock
from headrace.store.maps import map_bytes, read_bytes
from headrace.store.store import (
    CLAIM_NAME,
    FileRange,
    FileStatus,
    PendingFile,
    cut_off,
    written_by_another,
)


class LocalStore:
    is_remote = False

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
            with reading(self.directory), os.scandir(self.directory) as entries:
                return sorted(entry.name for entry in entries if entry.is_file() and _is_content(entry.name))
        except FileNotFoundError:
            return []

    def everything(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for folder, _, names in os.walk(self.directory):
            for name in names:
                path = Path(folder) / name
                # A file that goes away meanwhile is not there.
                with contextlib.suppress(FileNotFoundError), reading(path):
                    found[path.relative_to(self.directory).as_posix()] = os.lstat(path).st_size
        return found

    def has(self, file: str) -> bool:
        return os.path.isfile(self.path(file))

    def status(self, file: str) -> FileStatus:
        with reading(self.path(file)):
            status = os.stat(self.path(file))
        return FileStatus(status.st_size, status.st_mtime_ns)

    def stamp(self, file: str) -> str | None:
        try:
            with reading(self.path(file)):
                status = os.stat(self.path(file))
        except FileNotFoundError:
            return None
        return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"

    def head(self, file: str, count: int) -> tuple[bytes, int]:
        return read_stretch(self.path(file), 0, count)

    def read(self, file: str, start: int = 0, count: int | None = None) -> bytes:
        return read_stretch(self.path(file), start, count)[0]

    def fetch(self, file: str, start: int, stop: int) -> memoryview:
        content, size = read_stretch(self.path(file), start, stop - start)
        if len(content) != stop - start:
            raise cut_off(self.locate(file), size, start, stop)
        return memoryview(content)

    def fetch_together(self, ranges: Sequence[FileRange]) -> list[memoryview | None]:
        return [None] * len(ranges)  # there are no requests that could be made at the same time

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
        with writing(self.path(file)):
            self.path(file).unlink(missing_ok=True)

    def take(self, file: str, folder: "LocalStore") -> None:
        with writing(self.path(file)):
            try:
                os.replace(folder.path(file), self.path(file))
            except FileNotFoundError:
                if not self.has(file):
                    raise
            flush_directory(self.directory)

    def replace(self, file: str, folder: "LocalStore", expected: str | None) -> None:
        # The lock is what keeps others away; this finds those who do not hold it.
        if folder.has(file) and self.stamp(file) != expected:
            raise written_by_another(self.locate(file))
        self.take(file, folder)

    def claim(self) -> None:
        self.create()
        with writing(self.directory):
            held = os.listdir(self.directory)
            if self.directory.is_symlink() or (held and CLAIM_NAME not in held):
                raise StorageError(
                    f"{self.name}: is not a folder of Headrace, which needs this name for its own work; "
                    "rename the folder, or choose another output directory"
                )
            if CLAIM_NAME not in held:
                self.path(CLAIM_NAME).touch()
                flush_directory(self.directory)

    def remove_all(self) -> None:
        # The mark goes last: if this is interrupted, what is left is still known to be ours.
        for entry in _entries(self.directory):
            if entry.name != CLAIM_NAME:
                _remove_entry(entry)
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


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


def _remove_entry(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        os.unlink(entry.path)


def _is_content(name: str) -> bool:
    """Whether a file is part of the content: not the lock, the mark of a claim, or an incomplete file."""
    return name not in (LOCK_NAME, CLAIM_NAME) and not name.startswith(TEMPORARY_PREFIX)
