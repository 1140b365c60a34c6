"""Locks that end with their process: `flock` on files, without ever waiting for an unlimited time.

A lock belongs to an open file, so threads exclude each other just as processes do. A fork copies the open files of the
parent: the child closes its copies at once, and the parent unlocks explicitly, so that a lock never outlives its use
because some child has a copy of it.
"""

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

# Without following links: a link could lead to any file. Without waiting: a pipe would wait for a writer.
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.02


def open_to_lock(path: str | Path, *, create: bool = True) -> int:
    """The descriptor of a file that is there to be locked, open for reading and writing."""
    flags = os.O_RDWR | _SAFELY | (os.O_CREAT if create else 0)
    return os.open(path, flags, 0o666)


def flocked(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file, if nobody else has done so. Locking it again changes the kind of the lock."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class LockFile:
    """An open file that can be locked exclusively; closing it ends the lock, and so does forgetting the object."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.descriptor = -1
        self.descriptor = open_to_lock(path, create=create)
        _open_files.add(self)

    def __enter__(self) -> "LockFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def lock(self) -> bool:
        return flocked(self.descriptor)

    def lock_within(self, seconds: float) -> bool:
        return any(self.lock() for _ in pauses(seconds))

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: close the copy, and leave the lock to the parent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_open_files: "weakref.WeakSet[LockFile]" = weakref.WeakSet()


def _forget_all() -> None:
    for file in list(_open_files):
        file.forget()


os.register_at_fork(after_in_child=_forget_all)


def pauses(seconds: float) -> Iterator[None]:
    """One item at once, and one after each of ever longer pauses, for at least this many seconds altogether."""
    pause = _FIRST_PAUSE_SECONDS
    deadline = time.monotonic() + seconds
    yield
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        yield
