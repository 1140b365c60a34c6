"""One writer at a time for a directory.

The lock is on a file `.lock`, which holds one line, `<holder>, process <number>`. A file with anything else in it is
somebody else's: it can be locked as well, but it is neither changed nor deleted.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from headrace.errors import DirectoryInUseError, StorageError

LOCK_NAME = ".lock"
_LINE = re.compile(r"[^\n]+, process \d+ *")
_LONGEST_LINE = 200
# Without following links: a link could lead to any file. Without waiting: a pipe would wait for a writer.
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NEW = os.O_CREAT | os.O_EXCL


@contextlib.contextmanager
def directory_lock(directory: Path, holder: str) -> Iterator[None]:
    """Lock `directory` for one writer. The kernel releases the lock if the holder dies."""
    path = directory / LOCK_NAME
    line = f"{holder}, process {os.getpid()}"
    file = _lock_file(path, line)
    try:
        left_by_another = _line_in(file)
        if left_by_another:
            # In place, and never truncated: a shorter line is filled up with spaces.
            os.pwrite(file.fileno(), line.ljust(len(left_by_another)).encode(), 0)
        yield
    finally:
        if _line_in(file):
            # If it cannot be deleted, it means nothing: the lock is on the open file.
            with contextlib.suppress(OSError):
                path.unlink()
        file.close()


def _lock_file(path: Path, line: str) -> FileIO:
    """A locked file. It is an object, and no bare descriptor, so that it cannot stay locked if nobody holds it."""
    while True:
        file = _open_lock(path, line)
        try:
            if _has_locked(path, file):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _has_locked(path: Path, file: FileIO) -> bool:
    """Lock the open file. False if the previous holder deleted it between our opening and our locking: then others see
    a new file, and ours protects nothing."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False
    except BlockingIOError:
        holder = _line_in(file).strip() or "another process"
        raise DirectoryInUseError(
            f"{path.parent}: in use by {holder}; wait for it to finish, or choose another directory"
        ) from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be locked: {error.strerror}; choose another disk") from error


def _line_in(file: FileIO) -> str:
    """The line of a holder; empty if the file holds something else."""
    content = os.pread(file.fileno(), _LONGEST_LINE, 0).decode(errors="replace")
    return content if _LINE.fullmatch(content) else ""


def _open_lock(path: Path, line: str) -> FileIO:
    while True:
        try:
            return _create_lock(path, line)
        except FileExistsError:
            pass
        except OSError as error:
            raise _cannot_be_locked(path, error) from error
        # If it is gone by now, the previous holder has just deleted it.
        with contextlib.suppress(FileNotFoundError):
            return _open_existing(path)


def _create_lock(path: Path, line: str) -> FileIO:
    file = FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | _NEW | _SAFELY, 0o666))
    # At once, whoever will be the first to lock it: the line says that the file is ours to delete.
    file.write(line.encode())
    return file


def _open_existing(path: Path) -> FileIO:
    if path.is_symlink():
        raise StorageError(
            f"{path}: is a symbolic link, which a lock cannot be; remove it or choose another directory"
        )
    try:
        file = FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | _SAFELY))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _cannot_be_locked(path, error) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise StorageError(f"{path}: is not a file, which a lock must be; choose another directory")
    return file


def _cannot_be_locked(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path.parent}: cannot be locked: {error.strerror}; choose a directory that you can write to"
    )
