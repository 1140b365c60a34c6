"""One writer at a time for a directory."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from headrace.errors import DirectoryInUseError, StorageError

LOCK_NAME = ".lock"


@contextlib.contextmanager
def directory_lock(directory: Path, what: str) -> Iterator[None]:
    """Lock `directory` for one writer. The kernel releases the lock if the holder dies."""
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
        # The previous holder may have deleted the file between our open and our lock: then others
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
            f"{path.parent}: cannot be locked: {error.strerror}; choose a directory that you can write to"
        ) from error
