"""Threads that make requests: those that a batch is waiting for, and those that are made ahead of need.

A request mostly waits for its answer, so a process has many more of these threads than processors. Requests made ahead
move megabytes each and fill the network with a few at a time. Urgent ones are small, and as many as possible go out at
once, since each round trip to a store takes as long as all of them together. Neither waits for the other.
"""

import _thread
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.errors import StorageError
from headrace.fork_lock import fork_lock

SMALL_BYTES = 1 << 20
"""To fetch so much takes hardly longer than to fetch any part of it."""
_URGENT_AT_ONCE = 64
_AHEAD_AT_ONCE = int(__import__("os").environ.get("X_AHEAD","12"))
_Result = TypeVar("_Result")


class Fetching:
    """The threads of one process."""

    def __init__(self, urgent_at_once: int = _URGENT_AT_ONCE, ahead_at_once: int = _AHEAD_AT_ONCE) -> None:
        self._urgent = _Threads(urgent_at_once, "headrace-fetch")
        self._ahead = _Threads(ahead_at_once, "headrace-fetch-ahead")

    def urgent(self, calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """The results of all calls, in their order. The first error is raised, once all of them have ended."""
        if len(calls) <= 1 or self._ahead.is_this_thread():
            # Nobody waits yet for what is fetched ahead, and each thread more would cost processor time.
            return [call() for call in calls]
        futures = [self._urgent.submit(call) for call in calls]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def ahead(self, call: Callable[[], _Result]) -> "Future[_Result]":
        """Make a call soon; at once in a thread that fetches ahead, since all of them may be waiting for others."""
        if not self._ahead.is_this_thread():
            return self._ahead.submit(call)
        future: Future[_Result] = Future()
        _carry_out(future, call)
        return future


class _Threads:
    """Nobody waits for these threads, unlike for those of a ThreadPoolExecutor: a process may end although megabytes
    are on their way that nobody needs any more."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._starting = threading.Lock()
        self._started = 0

    def submit(self, call: Callable[[], _Result]) -> "Future[_Result]":
        future: Future[_Result] = Future()
        self._calls.put((future, call))
        if not self._idle.acquire(blocking=False):
            self._start()
        return future

    def is_this_thread(self) -> bool:
        """Whether the code that asks runs in one of these threads."""
        return threading.current_thread().name.startswith(f"{self._name}-")

    def _start(self) -> None:
        with self._starting:
            if self._started == self._most:
                return
            name = f"{self._name}-{self._started}"
            self._started += 1
        try:
            # Unlike `Thread.start`, this does not wait until the thread runs: the first batch needs many at once.
            _thread.start_new_thread(self._work, (name,))
        except RuntimeError:
            # There may be no more threads. Those that there are do the work.
            with self._starting:
                self._started -= 1
                if not self._started:
                    raise StorageError(
                        "no thread can be started to fetch data; allow this process more threads (`ulimit -u`, or the "
                        "limit of the container)"
                    ) from None

    def _work(self, name: str) -> None:
        threading.current_thread().name = name
        while True:
            future, call = self._calls.get()
            _carry_out(future, call)
            # Otherwise the thread would keep the result alive until it has the next one.
            del future, call
            self._idle.release()


def _carry_out(future: "Future[Any]", call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


_lock = fork_lock()
_of_process: tuple[int, Fetching] | None = None


def fetching() -> Fetching:
    """The threads of this process, which are started when they are first needed, and again after a fork."""
    global _of_process
    with _lock:
        if _of_process is None or _of_process[0] != os.getpid():
            _of_process = os.getpid(), Fetching()
        return _of_process[1]
