"""The thread in which all requests to object stores run, and why no forked process has it.

The client library (obstore) runs its requests on threads of its own. A process that has used it and forks leaves
children in which every request hangs, so a use in such a child is refused at once. Requests are coroutines on one
event loop, in a thread that all stores of the process share: a request that is not needed any more can be cancelled
there. Callers wait in their own threads.
"""

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.errors import StorageError
from headrace.fork_lock import fork_lock

Result = TypeVar("Result")

_END_SECONDS = 5.0
"""How long a process that ends waits for requests that are under way."""
_DRAIN_SECONDS = 0.05
"""How long the threads of the library may need to notice that their answer was taken."""
before_end: list[Callable[[], None]] = []
"""What is called when a process ends that has used an object store."""
_loop: asyncio.AbstractEventLoop | None = None
_used_by: int | None = None
_loop_lock = fork_lock()


def refuse_forks() -> None:
    if _used_by is not None and _used_by != os.getpid():
        raise StorageError(
            "this process was forked from one that has used an object store, and requests would hang here; start "
            'workers as threads (worker_kind="thread"), or with multiprocessing_context="spawn" or "forkserver"'
        )


def call(start: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine on the event loop of all stores, and wait for its result."""

    async def run() -> Result:
        return await start()

    future: Future[Result] = asyncio.run_coroutine_threadsafe(run(), _running_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop, _used_by
    with _loop_lock:
        refuse_forks()
        if _loop is None:
            _loop, _used_by = asyncio.new_event_loop(), os.getpid()
            thread = threading.Thread(target=_loop.run_forever, name="headrace object stores", daemon=True)
            thread.start()
            atexit.register(_end_loop, _loop, thread, os.getpid())
        return _loop


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, owner: int) -> None:
    if os.getpid() != owner:
        return
    for end in before_end:
        end()
    deadline = time.monotonic() + _END_SECONDS
    # A thread of the library that comes back to an interpreter that has shut down would abort the process.
    while asyncio.all_tasks(loop) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(_DRAIN_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_END_SECONDS)
    if not thread.is_alive() and not asyncio.all_tasks(loop):
        loop.close()
