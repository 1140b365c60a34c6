"""Local files: atomic writes, read-only maps, and one lock a directory.

A file appears under its name only when it is whole: it is written beside its place under a temporary
name, flushed to the disk, renamed, and the directory is flushed too. What a crash leaves behind is a
file whose name starts with `.tmp-`, which `remove_leftovers` deletes under the lock.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DirectoryInUseError, StorageError

TEMPORARY_PREFIX = ".tmp-"
LOCK_NAME = ".lock"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class PendingFile:
    """A file being written; `path` is the name it will get, and may still change (to hold a checksum)."""

    file: BinaryIO
    path: Path


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[PendingFile]:
    """Write a file that takes its name when the block ends, or leaves no trace if the block raises."""
    # Random, because process numbers repeat across machines that share a disk, and threads share one.
    temporary = path.parent / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(4)}-{path.name}"
    try:
        with open(temporary, "xb") as file:
            pending = PendingFile(file, path)
            yield pending
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, pending.path)
        flush_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        with no_space(path):
            raise


@contextlib.contextmanager
def no_space(path: Path) -> Iterator[None]:
    """Say in our words that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise StorageError(
            f"{path}: cannot write, {os.strerror(error.errno or 0)}: nothing is lost; "
            "free some space and run the same command again to continue"
        ) from error


def write_atomic(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    with atomic_file(path) as pending:
        for chunk in chunks:
            pending.file.write(chunk)


def flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(directory: Path) -> None:
    """Delete the temporary files of writers that died. Call it only while holding the directory's lock."""
    for leftover in directory.glob(f"{TEMPORARY_PREFIX}*"):
        leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the system says of an unreadable file into a StorageError. A missing file stays a
    FileNotFoundError: the caller knows what its absence means."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StorageError(f"{path}: cannot be read: {reason}; check its permissions and the disk") from error


def read_head(path: Path, count: int) -> tuple[bytes, int]:
    """The first `count` bytes (fewer if there are no more) and the size of a file, in four system calls."""
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            # `pread` takes memory for all it is asked for, so never ask for more than there is.
            return os.pread(descriptor, min(count, size), 0), size
        finally:
            os.close(descriptor)


def read_bytes(path: Path) -> NDArray[np.uint8]:
    """A whole file in RAM, read-only."""
    with reading(path):
        return _sealed(np.fromfile(path, dtype=np.uint8))


def map_bytes(path: Path) -> NDArray[np.uint8]:
    """A whole file as a read-only memory map, which lives as long as any view of it.

    Python's `mmap.mmap` keeps a file descriptor open for each map (until 3.13), and a thousand shards
    would meet the usual limit of 1,024 open files. A map needs no descriptor, so we call mmap(2)
    ourselves and close the file at once.
    """
    with reading(path), open(path, "rb") as file:
        count = os.fstat(file.fileno()).st_size
        if count == 0:
            return _sealed(np.empty(0, dtype=np.uint8))
        if sys.platform == "win32":
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        try:
            memory = _map(file.fileno(), count, mmap.PROT_READ, mmap.MAP_SHARED)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be memory-mapped: {error.strerror}; open it with in_memory=True"
            ) from error
    return np.frombuffer(memoryview(memory).toreadonly(), dtype=np.uint8)


def map_memory(descriptor: int, count: int, *, private: bool = False) -> Any:
    """An open file as memory to write to, which lives as long as any view of it; the descriptor may be closed.
    What is written is seen by all who have mapped the file, and all its pages are there at once, which is cheaper than
    one fault for each; or with `private` nobody else sees it, and pages come as they are asked for."""
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return _map(descriptor, count, mmap.PROT_READ | mmap.PROT_WRITE, flags)


def _map(descriptor: int, count: int, protection: int, flags: int) -> Any:
    libc = _libc()
    address = libc.mmap(None, count, protection, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_ubyte * count).from_address(address)
    _maps[address] = memory
    # At interpreter exit views may still be in use by daemon threads; the kernel unmaps better than we do.
    weakref.finalize(memory, libc.munmap, address, count).atexit = False
    return memory


_maps: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The maps there are, by their address."""


def expect_random_reads(array: NDArray[Any]) -> None:
    """Tell the kernel that a view of a map will be read here and there: else each read may bring megabytes with it."""
    root: Any = array
    while isinstance(root, np.ndarray) and root.base is not None:
        root = root.base
    memory = root.obj if isinstance(root, memoryview) else None
    if not isinstance(memory, ctypes.Array) or _maps.get(ctypes.addressof(memory)) is not memory:
        return
    if not array.nbytes or not hasattr(mmap, "MADV_RANDOM"):
        return
    address = array.ctypes.data
    first = address - address % mmap.PAGESIZE
    _libc().madvise(first, address + array.nbytes - first, mmap.MADV_RANDOM)


def _sealed(content: NDArray[Any]) -> NDArray[Any]:
    """A view that nobody can make writeable again (an array's own flag can simply be set back)."""
    return np.asarray(content.data.toreadonly())


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    numbers = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *numbers]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


@contextlib.contextmanager
def directory_lock(directory: Path, what: str) -> Iterator[None]:
    """Hold `directory` for one writer. The kernel releases the lock if the holder dies."""
    path = directory / LOCK_NAME
    file = _lock_file(path)
    try:
        file.truncate(0)
        file.write(f"{what}, process {os.getpid()}")
        file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _lock_file(path: Path) -> TextIO:
    import fcntl

    while True:
        file = _open_lock(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise DirectoryInUseError(
                f"{path.parent}: in use by {holder}; wait for it to finish, or choose another directory"
            ) from None
        except OSError as error:
            file.close()
            raise StorageError(f"{path}: cannot be locked: {error.strerror}; choose another disk") from error
        # The holder before us may have deleted the file between our open and our lock: then others
        # see a new file, and ours protects nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


def _open_lock(path: Path) -> TextIO:
    try:
        return open(path, "a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise StorageError(
            f"{path.parent}: cannot be locked: {error.strerror}; choose a directory you can write to"
        ) from error
