"""Locks that a fork of this process finds open. A thread that held one is not there to let go of it."""

import os
import threading
import weakref
from typing import Any

_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()


def fork_lock() -> threading.Lock:
    """A lock for what is right after every single step: a fork may find it half-way."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def reentrant_fork_lock() -> Any:
    """The same, which the thread that holds it may take again."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _open_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_open_all)
