"""A store in the memory of this process, for tests and for data that should never touch a disk."""

import contextlib
import io
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DirectoryInUseError, StorageError
from headrace.store.scratch import Scratch
from headrace.store.store import (
    CLAIM_NAME,
    FileRange,
    FileStatus,
    PendingFile,
    cut_off,
    written_by_another,
)

SCHEME = "memory://"


class MemoryStore:
    """A pickle has copies of the files: what is written later on one side does not appear on the other."""

    is_remote = False

    def __init__(self, name: str = f"{SCHEME}unnamed") -> None:
        self.name = name
        self._files: dict[str, bytes] = {}
        self._modified: dict[str, int] = {}
        self._folders: dict[str, MemoryStore] = {}
        self._created = False
        self._scratch = Scratch()
        self._holder = ""
        self._holding = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore({self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scratch": None, "_holder": "", "_holding": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._holding = threading.Lock()
        self._scratch = Scratch()

    def locate(self, file: str) -> str:
        return f"{self.name}/{file}"

    # Reading

    def exists(self) -> bool:
        return self._created or bool(self._files)

    def files(self) -> list[str]:
        return sorted(self._files.keys() - {CLAIM_NAME})

    def everything(self) -> dict[str, int]:
        found = {file: len(content) for file, content in self._files.items()}
        for name, folder in self._folders.items():
            found |= {f"{name}/{file}": size for file, size in folder.everything().items()}
        return found

    def has(self, file: str) -> bool:
        return file in self._files

    def status(self, file: str) -> FileStatus:
        return FileStatus(len(self._content(file)), self._modified[file])

    def stamp(self, file: str) -> str | None:
        return f"{len(self._files[file])} {self._modified[file]}" if file in self._files else None

    def head(self, file: str, count: int) -> tuple[bytes, int]:
        content = self._content(file)
        return content[:count], len(content)

    def read(self, file: str, start: int = 0, count: int | None = None) -> bytes:
        content = self._content(file)
        return content[start:] if count is None else content[start : start + count]

    def fetch(self, file: str, start: int, stop: int) -> memoryview:
        content = self._content(file)
        if stop > len(content):
            raise cut_off(self.locate(file), len(content), start, stop)
        return memoryview(content)[start:stop]

    def fetch_together(self, ranges: Sequence[FileRange]) -> list[memoryview | None]:
        return [None] * len(ranges)  # there are no requests that could be made at the same time

    def view(self, file: str, *, in_memory: bool = False) -> NDArray[np.uint8]:
        return np.frombuffer(self._content(file), dtype=np.uint8)

    def _content(self, file: str) -> bytes:
        try:
            return self._files[file]
        except KeyError:
            raise FileNotFoundError(f"{self.locate(file)}: no such file") from None

    # Writing

    def create(self) -> None:
        self._created = True

    @contextlib.contextmanager
    def pending(self, file: str) -> Iterator[PendingFile]:
        pending = PendingFile(io.BytesIO(), file)
        yield pending
        pending.file.seek(0)
        self._modified[pending.name] = time.time_ns()
        self._files[pending.name] = pending.file.read()

    def remove(self, file: str) -> None:
        self._files.pop(file, None)

    def take(self, file: str, folder: "MemoryStore") -> None:
        if file in folder._files:
            # Taken out last: an interrupt may leave a copy behind, but never loses the file.
            self._files[file] = folder._files[file]
            self._modified[file] = folder._modified[file]
            folder._files.pop(file)
        elif file not in self._files:
            raise FileNotFoundError(f"{folder.locate(file)}: no such file")

    def replace(self, file: str, folder: "MemoryStore", expected: str | None) -> None:
        if folder.has(file) and self.stamp(file) != expected:
            raise written_by_another(self.locate(file))
        self.take(file, folder)

    def claim(self) -> None:
        if self._files and CLAIM_NAME not in self._files:
            raise StorageError(
                f"{self.name}: is not a folder of Headrace, which needs this name for its own work; "
                "choose another place"
            )
        self.create()
        self._files[CLAIM_NAME] = b""

    def remove_all(self) -> None:
        self._files.clear()
        self._folders.clear()
        self._created = False
        self._scratch.remove()

    def remove_leftovers(self) -> None:
        """Does nothing: an incomplete file is not in the store yet."""

    def folder(self, name: str) -> "MemoryStore":
        return self._folders.setdefault(name, MemoryStore(f"{self.name}/{name}"))

    @contextlib.contextmanager
    def lock(self, holder: str) -> Iterator[None]:
        if not self._holding.acquire(blocking=False):
            raise DirectoryInUseError(
                f"{self.name}: in use by {self._holder}; wait for it to finish, or choose another place"
            )
        try:
            self._holder = f"{holder}, process {os.getpid()}"
            yield
        finally:
            self._holding.release()

    def scratch(self) -> Path:
        return self._scratch.path()
