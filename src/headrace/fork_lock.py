"""Locks that survive a fork: in the child process, the thread that held a lock no longer exists to release it."""

import os
import threading
import weakref
from typing import Any

_locks: "weakref.WeakSet[threading.Lock]" = weakref.WeakSet()


def fork_lock() -> threading.Lock:
    """A lock that a forked process finds released.

    Use it for data that is valid after every single step, since the fork may find an operation half done.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def lock_that_forks_wait_for() -> Any:
    """A lock that a fork waits for, for operations that a forked process must not find half done.

    The thread that holds it may take it again, and may fork.
    """
    lock = threading.RLock()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


def _open_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_open_all)
