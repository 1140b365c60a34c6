"""The bytes of one input, wherever they are. Everything that readers know about where an input is stored is in here.

A raw file is a path of this machine or an object of a store. Readers ask it for its size and for any of its bytes, and
say which bytes they will need next: a remote file fetches those ahead.
"""

import contextlib
import io
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import StorageError
from headrace.format.checksum import checksum
from headrace.store.maps import map_bytes
from headrace.store.remote_address import parse_address

if TYPE_CHECKING:
    from headrace.store.remote_content import RemoteContent

ByteRange = tuple[int, int]
"""The first byte, and the one after the last."""
_BUFFER_BYTES = 2**18


class Content(Protocol):
    """The bytes of a file: an array over a map, or an object that reads them on demand."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> NDArray[np.uint8]: ...


class RawFile(Protocol):
    """As a string, it is what messages call it: a path or an address."""

    @property
    def path(self) -> Path | None:
        """Where the file is on this machine; None if it is elsewhere."""
        ...

    @property
    def endings(self) -> list[str]:
        """The endings of its name, in lower case: `.jsonl` and `.gz`."""
        ...

    def size(self) -> int:
        """Raises StorageError if the file is not there, cannot be read or is not a regular file."""
        ...

    def version(self) -> str | None:
        """A text that changes when the content does, if it can be had without reading the content."""
        ...

    def content(self) -> Content:
        """All bytes. Those of a local file are mapped."""
        ...

    def reading(self) -> AbstractContextManager[Content]:
        """The same, but never a map, which would crash the process if the file became shorter."""
        ...

    def open(self) -> AbstractContextManager[BinaryIO]:
        """The file, to be read from its beginning."""
        ...

    def expect(self, ranges: Iterable[ByteRange]) -> None:
        """These ranges will be read soon, each from beginning to end, and no others that were expected before."""
        ...


class LocalRawFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def endings(self) -> list[str]:
        return [suffix.lower() for suffix in self._path.suffixes]

    def size(self) -> int:
        try:
            status = self._path.stat()
        except OSError as error:
            raise StorageError(f"{self}: cannot be read: {error.strerror}") from error
        if stat.S_ISDIR(status.st_mode):
            raise StorageError(f"{self}: is a directory; give the files to read")
        if not stat.S_ISREG(status.st_mode):
            kind = "a pipe" if stat.S_ISFIFO(status.st_mode) else "a device or socket"
            raise StorageError(
                f"{self}: is {kind}, and only regular files can be read; leave it out, or copy its content to a file "
                "(a build can also read its standard input)"
            )
        if not os.access(self._path, os.R_OK):
            raise StorageError(
                f"{self}: cannot be read: permission denied; check the permissions of the file"
            )
        return status.st_size

    def version(self) -> None:
        """Only the content tells: a time of modification may be set by anyone, and may be too coarse."""

    def content(self) -> NDArray[np.uint8]:
        self.size()
        return map_bytes(self._path)

    @contextlib.contextmanager
    def reading(self) -> Iterator["FileBytes"]:
        # Unbuffered, because it is read in large pieces at given positions.
        with self._opened(buffering=0) as file:
            yield FileBytes(file, str(self))

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        with self._opened() as file:
            yield file

    def _opened(self, buffering: int = -1) -> BinaryIO:
        try:
            return open(self._path, "rb", buffering=buffering)
        except OSError as error:
            raise StorageError(f"{self}: cannot be read: {error.strerror}") from error

    def expect(self, ranges: Iterable[ByteRange]) -> None:
        """The system reads ahead by itself."""


class FileBytes:
    """The bytes of an open file, read on demand."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._descriptor, self._name = file.fileno(), name
        self._size = os.fstat(self._descriptor).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, where: slice) -> NDArray[np.uint8]:
        start, stop, _ = where.indices(self._size)
        count = max(0, stop - start)
        content = os.pread(self._descriptor, count, start)
        if len(content) == count:
            return np.frombuffer(content, dtype=np.uint8)
        # One call gives at most 2 GiB.
        pieces = [content]
        while pieces[-1] and (left := count - sum(map(len, pieces))):
            pieces.append(os.pread(self._descriptor, left, stop - left))
        if not pieces[-1]:
            raise StorageError(f"{self._name}: became shorter while it was being read; start again")
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)


class RemoteRawFile:
    """What was fetched for one of its readers is there for the next one, so it is for one slice or span, and for one
    thread at a time."""

    path = None

    def __init__(self, address: str, size: int, stamp: str) -> None:
        self._address, self._size, self._stamp = address, size, stamp
        self._fetched: RemoteContent | None = None

    def __str__(self) -> str:
        return self._address

    @property
    def endings(self) -> list[str]:
        return [suffix.lower() for suffix in PurePosixPath(self._address).suffixes]

    def size(self) -> int:
        return self._size

    def version(self) -> str:
        return checksum(f"{self._size} {self._stamp}".encode())

    def content(self) -> "RemoteContent":
        if self._fetched is None:
            # Only here: most uses of Headrace need no object store, nor what that imports.
            from headrace.store.remote_content import RemoteContent
            from headrace.store.remote_object import RemoteObject

            address = parse_address(self._address)
            self._fetched = RemoteContent(RemoteObject(address, self._size, self._stamp))
        return self._fetched

    @contextlib.contextmanager
    def reading(self) -> Iterator["RemoteContent"]:
        yield self.content()

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        from headrace.store.remote_file import RemoteFile

        with io.BufferedReader(RemoteFile(self.content()), _BUFFER_BYTES) as file:
            yield cast(BinaryIO, file)

    def expect(self, ranges: Iterable[ByteRange]) -> None:
        self.content().expect(ranges)
