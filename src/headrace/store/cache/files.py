"""Cached files: 64 bytes of header, then the bytes themselves.

    offset  0   8 bytes  "hrcache1"
            8   8        how many bytes follow the header
           16   8        XXH3-64 of these bytes, with the hash of the file's name as seed
           24  16        the boot in which the file was written, or last checked
           40  24        zeros

A file is written under a temporary name and renamed, so whoever finds it finds all of it. There is no fsync, which
would cost more than fetching. Therefore a power cut can leave a file with its name and size but with zeros or garbage
in it, and a file of an earlier boot is checked before it is used for the first time.
"""

import contextlib
import functools
import os
import secrets
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.store.cache.directory import HEADER_BYTES, check_folder
from headrace.store.cache.locks import LockFile
from headrace.store.files import TEMPORARY_PREFIX
from headrace.store.maps import map_open_file

_MAGIC = b"hrcache1"
_HEADER = struct.Struct("<8sQQ16s24x")
# Without following links: they lead out of the cache. Without waiting: a pipe would wait for a writer.
_READ_SAFELY = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_BOOT_OFFSET = 24
_BOOT_FILE = "/proc/sys/kernel/random/boot_id"


@functools.cache
def boot_id() -> bytes:
    """16 bytes that are others after a reboot. Where the system does not tell, they are others in each process, which
    then checks every file once."""
    try:
        return uuid.UUID(Path(_BOOT_FILE).read_text().strip()).bytes
    except (OSError, ValueError):
        return secrets.token_bytes(16)


def make_header(name: str, content: memoryview) -> bytes:
    return _HEADER.pack(_MAGIC, len(content), _checksum(name, content), boot_id())


def _checksum(name: str, content: memoryview) -> int:
    seed = xxhash.xxh3_64_intdigest(name.encode())
    return int(xxhash.xxh3_64_intdigest(content, seed))


class DamagedFile(Exception):
    """A cached file that must not be used. It never leaves the cache."""


def map_file(path: str, name: str, count: int) -> NDArray[np.uint8] | None:
    """The bytes of a cached file as a read-only map; None if there is no such file."""
    return _map_checked(path, name, count, always_check=False)


def check_file(path: str, name: str, count: int) -> bool:
    """Read all of a cached file, whenever it was written. False if it is gone by now."""
    return _map_checked(path, name, count, always_check=True) is not None


def _map_checked(path: str, name: str, count: int, *, always_check: bool) -> NDArray[np.uint8] | None:
    try:
        descriptor = os.open(path, _READ_SAFELY)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(descriptor).st_size
        if size != HEADER_BYTES + count:
            raise DamagedFile(f"it has {size:,} bytes instead of {HEADER_BYTES + count:,}")
        # Read and not looked up in the map, where the first look is ten times as dear.
        magic, length, checksum, boot = _HEADER.unpack(os.pread(descriptor, HEADER_BYTES, 0))
        if magic != _MAGIC or length != count:
            raise DamagedFile("its header is damaged")
        content = map_open_file(descriptor, size)[HEADER_BYTES:]
    finally:
        os.close(descriptor)
    is_older = boot != boot_id()
    if (is_older or always_check) and _checksum(name, content.data) != checksum:
        raise DamagedFile("its checksum does not match")
    if is_older:
        _note_boot(path)
    return content


def _note_boot(path: str) -> None:
    """Remember that a file was found whole since the system was started. If that fails, it is checked again."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, boot_id(), _BOOT_OFFSET)
        finally:
            os.close(descriptor)


class UnfinishedFile:
    """A cached file that is being written. It is locked, so that others can tell it from one whose writer has died."""

    def __init__(self, folder: Path, key: str) -> None:
        self._final = folder / key
        self._temporary = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{key}"
        folder.mkdir(exist_ok=True)
        check_folder(folder)
        self._file = LockFile(self._temporary)
        self._file.lock()

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write all parts, and give the file its name."""
        for part in parts:
            _write_fully(self._file.descriptor, part)
        os.replace(self._temporary, self._final)
        self._file.close()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)
        self._file.close()


def _write_fully(descriptor: int, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def is_abandoned(temporary: str) -> bool:
    """Whether the writer of a temporary file has died. Call it with the cache's size locked: files are created and
    locked under that lock."""
    try:
        with LockFile(temporary, create=False) as file:
            return file.lock()
    except OSError:
        return False
