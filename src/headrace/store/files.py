"""Local files that are written completely or not at all, and errors that say what went wrong with them.

A file gets its name only when it is complete: it is written in the same directory under a temporary name, flushed to
disk and renamed, and the directory is flushed too. A crash may leave a file whose name starts with `.tmp-`. Writers of
datasets therefore write in a folder of their own, which goes with everything in it, and move complete files from there.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.errors import StorageError
from headrace.store.store import PendingFile

TEMPORARY_PREFIX = ".tmp-"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[PendingFile]:
    """Write a file that gets its name when the block ends, and leaves no trace if the block raises."""
    directory = path.parent
    # Random, because machines that share a disk may have equal process ids, and threads share theirs.
    temporary = directory / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(4)}-{path.name}"
    try:
        with writing(path):
            file = open(temporary, "xb")  # noqa: SIM115
        with file:
            pending = PendingFile(file, path.name)
            yield pending
            with writing(path):
                file.flush()
                os.fsync(file.fileno())
        with writing(path):
            os.replace(temporary, directory / pending.name)
            flush_directory(directory)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        with no_space(path):
            raise


@contextlib.contextmanager
def no_space(path: Path) -> Iterator[None]:
    """Turn the system's errors about a full disk into a StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE or isinstance(error, StorageError):
            raise
        raise _cannot_be_written(path, error) from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn all of the system's errors about writing or deleting a file into a StorageError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise _cannot_be_written(path, error) from error


def _cannot_be_written(path: Path, error: OSError) -> StorageError:
    if error.errno in _NO_SPACE:
        remedy = "nothing is lost: free some space, and do the same again to continue"
    else:
        remedy = "choose a place that you can write to"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return StorageError(f"{path}: cannot be written: {reason}; {remedy}")


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
    """Delete the temporary files of writers that died. Call it only for a directory that nobody else uses."""
    for leftover in directory.glob(f"{TEMPORARY_PREFIX}*"):
        leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the system's errors about an unreadable file into a StorageError.

    A missing file stays a FileNotFoundError, because the caller knows what that means.
    """
    try:
        yield
    except (FileNotFoundError, StorageError):
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StorageError(f"{path}: cannot be read: {reason}; check its permissions and the disk") from error


def read_head(path: Path, count: int) -> tuple[bytes, int]:
    """The first `count` bytes (fewer if there are no more) and the size of a file, in four system calls."""
    return read_stretch(path, 0, count)


def read_stretch(path: Path, start: int, count: int | None) -> tuple[bytes, int]:
    """A stretch of a file, shorter where the file ends, and the size of the file."""
    with opened(path) as (descriptor, size):
        # `pread` takes memory for all it is asked for, so never ask for more than there is.
        left = max(0, size - start)
        return _read_fully(descriptor, start, left if count is None else min(count, left)), size


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """The descriptor of a file that is open for reading, and its size."""
    with reading(path):
        # Opening a pipe would wait for its other end without O_NONBLOCK, which makes no difference to files.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(f"{path}: cannot be read: it is a pipe or a device, not a file")
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)


def _read_fully(descriptor: int, start: int, count: int) -> bytes:
    """Read in several calls if needed: one call returns at most 2 GiB, and less if a signal comes."""
    content = os.pread(descriptor, count, start)
    if len(content) == count:
        return content
    pieces = [content]
    while pieces[-1] and (left := count - sum(map(len, pieces))):
        pieces.append(os.pread(descriptor, left, start + count - left))
    return b"".join(pieces)
