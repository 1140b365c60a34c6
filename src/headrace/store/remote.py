"""A prefix of a bucket as a store: S3 and what is compatible with it, GCS, Azure, and HTTP(S) to read from.

A store is pickled as its address and options, and never with credentials: the other process finds them in its own
environment.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import StorageError
from headrace.store.client import Client, RemoteOptions, client_for
from headrace.store.lease import HeldLease, Lease, is_lock_name
from headrace.store.objects import Objects
from headrace.store.remote_address import RemoteAddress, parse_address
from headrace.store.scratch import Scratch
from headrace.store.store import CLAIM_NAME, FileRange, FileStatus, PendingFile
from headrace.store.upload import Spool, is_content_name


class RemoteStore:
    is_remote = True

    def __init__(self, address: str, options: RemoteOptions | None = None) -> None:
        parsed = parse_address(address)
        options = options or RemoteOptions.from_environment()
        self._open(parsed, client_for(parsed, options), HeldLease())

    def _open(self, address: RemoteAddress, client: Client, held: HeldLease) -> None:
        self.address, self.options = address, client.options
        self.name = str(address)
        self._objects = Objects(client, address)
        self._held = held
        """The lease of the store that was locked, which all folders inside it share."""
        self._scratch = Scratch()
        self._created = False

    def __repr__(self) -> str:
        return f"RemoteStore({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteStore) and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, (self.name, self.options)

    @property
    def client(self) -> Client:
        return self._objects.client

    def locate(self, file: str) -> str:
        return f"{self.name}/{file}"

    # Reading

    def fetch(self, file: str, start: int, stop: int) -> memoryview:
        """Exactly these bytes of a file. Any thread may call it, and many at once."""
        return self._objects.get_exactly(file, start, stop).toreadonly()

    def fetch_together(self, ranges: Sequence[FileRange]) -> list[memoryview | None]:
        found = self._objects.get_together(ranges)
        return [None if content is None else content.toreadonly() for content in found]

    def exists(self) -> bool:
        if self.address.is_http:
            return False  # a web server has no folders: only files can be found there
        return self._created or self._objects.has_any()

    def files(self) -> list[str]:
        if self.address.is_http:
            raise StorageError(
                f"{self.name}: cannot be listed over HTTP; name the files one by one, or use s3://"
            )
        return sorted(name for name in self._objects.names() if _is_content(name))

    def everything(self) -> dict[str, int]:
        start = len(self.address.key(""))
        return {key[start:]: size for key, size in self._objects.all_sizes().items()}

    def has(self, file: str) -> bool:
        return self._objects.find(file) is not None

    def status(self, file: str) -> FileStatus:
        found = self._objects.describe(file)
        return FileStatus(found.size, found.modified_ns)

    def stamp(self, file: str) -> str | None:
        found = self._objects.find(file)
        return None if found is None else found.stamp

    def head(self, file: str, count: int) -> tuple[bytes, int]:
        found = self._objects.get_range(file, 0, count)
        return bytes(found.content), found.size

    def read(self, file: str, start: int = 0, count: int | None = None) -> bytes:
        if count is None:
            return bytes(self._objects.get_from(file, start))
        return bytes(self._objects.get_range(file, start, start + count).content)

    def view(self, file: str, *, in_memory: bool = False) -> NDArray[np.uint8]:
        content = self._objects.get_from(file, 0)
        return np.frombuffer(content.toreadonly(), dtype=np.uint8)

    # Writing

    def create(self) -> None:
        """A bucket needs nothing for that; a bucket that is not there is noticed here already."""
        self._refuse_http()
        if not self.client.has_answered:
            self._objects.names()
        self._created = True

    @contextlib.contextmanager
    def pending(self, file: str) -> Iterator[PendingFile]:
        self._before_write()
        with Spool() as spool:
            pending = PendingFile(spool.file, file)
            yield pending
            self._before_write()
            if is_content_name(pending.name):
                self._objects.put_new(pending.name, spool)
            else:
                self._objects.put(pending.name, spool)

    def remove(self, file: str) -> None:
        self._before_write()
        self._objects.delete([file])

    def take(self, file: str, folder: "RemoteStore") -> None:
        self._before_write()
        try:
            self._objects.copy_from(folder._objects, file)
        except FileNotFoundError:
            if not self.has(file):
                raise
        else:
            folder._objects.delete([file])

    def replace(self, file: str, folder: "RemoteStore", expected: str | None) -> None:
        self._before_write()
        try:
            content = folder.read(file)
        except FileNotFoundError:
            if not self.has(file):
                raise
            return
        self._objects.put_expecting(file, content, expected)
        folder._objects.delete([file])

    def claim(self) -> None:
        self._before_write()
        if self._objects.find(CLAIM_NAME) is None:
            if self._objects.has_any():
                raise StorageError(
                    f"{self.name}: is not a folder of Headrace, which needs this name for its own work; "
                    "choose another place"
                )
            self._objects.put(CLAIM_NAME, b"")
        self.create()

    def remove_all(self) -> None:
        self._before_write()
        mark = self.address.key(CLAIM_NAME)
        keys = [key for key in self._objects.all_sizes() if key != mark]
        # The mark goes last: if this is interrupted, what is left is still known to be ours.
        self._objects.delete_keys(keys)
        self._objects.delete_keys([mark])
        self._scratch.remove()
        self._created = False

    def remove_leftovers(self) -> None:
        """Does nothing: an incomplete file is not in the store yet. Unfinished uploads are `uploads.py`'s."""

    def folder(self, name: str) -> "RemoteStore":
        inner = RemoteStore.__new__(RemoteStore)
        inner._open(self.address.inside(name), self.client, self._held)
        return inner

    @contextlib.contextmanager
    def lock(self, holder: str) -> Iterator[None]:
        self._refuse_http()
        with Lease(self._objects, holder) as lease, self._held.during(lease):
            yield

    def scratch(self) -> Path:
        return self._scratch.path()

    def _before_write(self) -> None:
        self._refuse_http()
        self._held.check()

    def _refuse_http(self) -> None:
        if self.address.is_http:
            raise StorageError(f"{self.name}: can only be read over HTTP; write to s3://, gs:// or az://")


def _is_content(name: str) -> bool:
    return name != CLAIM_NAME and not is_lock_name(name)
