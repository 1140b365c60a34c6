"""Locks and forks of this process, in which the thread that held one is not there to let go of it."""

import os
import threading
import weakref
from typing import Any

_locks: "weakref.WeakSet[threading.Lock]" = weakref.WeakSet()


def fork_lock() -> threading.Lock:
    """A lock for what is right after every single step: a fork finds it open, and may find the rest half-way."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def lock_that_forks_wait_for() -> Any:
    """A lock for what must not be half-way in a fork. The thread that holds it may take it again, and fork."""
    lock = threading.RLock()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


def _open_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_open_all)
