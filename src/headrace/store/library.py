"""Calls of the client library (obstore), in threads of their own.

Such a call cannot be interrupted, so whoever makes it waits where Ctrl-C is noticed. The library has its own threads,
too: a process that has used it and forks leaves children in which every request hangs, so a use in such a child is
refused at once. And a call that came back to an interpreter that has shut down would abort the process, so a process
that ends waits for those that are under way, as it does for every `ThreadPoolExecutor`.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import TypeVar

from headrace.errors import StorageError
from headrace.fork_lock import fork_lock

Result = TypeVar("Result")

_AT_ONCE = 100
_hedges = threading.BoundedSemaphore(4)
"""Few calls are made twice at the same time: a store that is slow for all of them would only get slower."""
_pool: ThreadPoolExecutor | None = None
_used_by: int | None = None
_lock = fork_lock()


def call(function: Callable[[], Result]) -> Result:
    """Make a call that uses the library, and wait for its result."""
    future = _submit(function)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def call_hedged(function: Callable[[], Result], patience: float | None) -> Result:
    """The same, but the call is made twice if it takes longer than `patience`. The first result counts."""
    first = _submit(function)
    if patience is None or wait([first], patience).done or not _hedges.acquire(blocking=False):
        return first.result()
    second = _submit(function)
    try:
        failure: BaseException | None = None
        for future in as_completed([first, second]):
            failure = future.exception()
            if failure is None:
                return future.result()
        raise failure or RuntimeError("no call was made")
    finally:
        first.cancel()
        second.cancel()
        _hedges.release()


def _submit(function: Callable[[], Result]) -> "Future[Result]":
    global _pool, _used_by
    with _lock:
        if _used_by is not None and _used_by != os.getpid():
            raise StorageError(
                "this process was forked from one that has used an object store, and this request would hang here; "
                'start workers as threads (worker_kind="thread"), or with multiprocessing_context="spawn" or '
                '"forkserver"'
            )
        if _pool is None:
            _pool, _used_by = ThreadPoolExecutor(_AT_ONCE, "headrace-library"), os.getpid()
        return _pool.submit(function)
