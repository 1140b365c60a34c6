"""Numbered results made ahead of time by threads, handed over in order.

Any thread makes any number: workers take the next few, and the consumer waits for the one it is due. At most
`depth` results are made ahead. Results travel in groups, since waking up another thread costs as much as a small
batch. A `make` may have a method `many` for a group, and one `ahead` to prepare what comes, called in between.

Threads hold this module's state and never the iterator that the user holds: when
that is closed or dropped, they stop.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.errors import PenstockError, StageError, StageTimeoutError
from penstock.load.counting import Counters, working_for

_JOIN_SECONDS = 5.0


Result = tuple[Any, BaseException | None]


class _Shared:
    """What the threads and the consumer share; `changed` guards it all."""

    def __init__(
        self, make: Callable[[int], Any], count: int | None, depth: int, at_once: int, counters: Counters
    ) -> None:
        self.make, self.count, self.depth, self.at_once = make, count, depth, at_once
        self.counters = counters
        self.waiting = 0
        """Results that are there."""
        self.changed = threading.Condition()
        self.results: dict[int, list[Result]] = {}
        """Groups of results, by the number of their first."""
        self.next_made = 0
        self.handed = 0
        self.stopped = False

    def claim(self) -> range:
        """The numbers that a thread makes next, once there is room for them; empty when nothing is left to do."""
        with self.changed:
            while not self.stopped and self.next_made - self.handed >= self.depth:
                self.changed.wait()
            if self.stopped or self.next_made == self.count:
                return range(0)
            first = self.next_made
            # The first ones alone, so that they are there soon; then several, which costs less waking up.
            room = self.handed + self.depth - first
            last = first + min(room, self.at_once if first >= self.at_once else 1)
            self.next_made = last if self.count is None else min(last, self.count)
            return range(first, self.next_made)

    def put(self, first: int, results: list[Result]) -> None:
        with self.changed:
            if not self.stopped:
                self.results[first] = results
                self.waiting += len(results)
                self.changed.notify_all()

    def take(self, timeout_seconds: float) -> list[Result]:
        """The group that is due."""
        deadline = time.monotonic() + timeout_seconds
        with self.changed:
            while self.handed not in self.results:
                if self.stopped:
                    return []
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self.changed.wait(left)
            results = self.results.pop(self.handed)
            self.handed += len(results)
            self.waiting -= len(results)
            self.changed.notify_all()
            return results

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.results.clear()
            self.changed.notify_all()


class Prefetch:
    """`next()` gives make(0), make(1), ... up to make(count - 1)."""

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        count: int | None,
        depth: int,
        threads: int,
        timeout_seconds: float,
        stage: str,
        counters: Counters | None = None,
        at_once: int = 4,
        describe: Callable[[int], str] | None = None,
    ) -> None:
        at_once = min(at_once, depth // (2 * threads)) if hasattr(make, "many") else 1
        self._counters = counters or Counters()
        self._shared = _Shared(make, count, depth, max(1, at_once), self._counters)
        self._timeout_seconds, self._stage = timeout_seconds, stage
        self._describe = describe or (lambda number: f"batch {number}")
        self._ready: deque[Result] = deque()
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(
                target=_work, args=(self._shared,), name=f"penstock-{stage}-{number}", daemon=True
            )
            for number in range(threads)
        ]
        # Also at exit: threads must be out of the kernel's loops before the interpreter goes.
        self._finalizer = weakref.finalize(self, _shut_down, self._shared, self._threads)
        for thread in self._threads:
            thread.start()

    def __next__(self) -> Any:
        if os.getpid() != self._pid:
            raise StageError(
                f"{self._stage}: this iteration was begun in process {self._pid}, and its threads are there; "
                "after a fork, begin one of your own with iter(loader)"
            )
        shared = self._shared
        if self._ready or shared.handed != shared.count:
            self._counters.see_queue("ready", len(self._ready) + shared.waiting, shared.depth)
        if not self._ready:
            self._wait()
        if not self._ready:
            # Closed by another thread while this one was waiting.
            raise StopIteration
        result, error = self._ready.popleft()
        if error is not None:
            self.close()
            raise error
        return result

    def _wait(self) -> None:
        shared = self._shared
        if shared.stopped or shared.handed == shared.count:
            self.close()
            raise StopIteration
        try:
            self._ready.extend(shared.take(self._timeout_seconds))
        except TimeoutError:
            stacks = self._stacks()
            shared.stop()
            # A thread that hangs cannot be waited for.
            self._finalizer.detach()
            raise StageTimeoutError(
                f"{self._stage}: {self._describe(shared.handed)} not ready after "
                f"timeout_seconds={self._timeout_seconds:g}; its threads are here:\n{stacks}"
            ) from None

    def close(self) -> None:
        self._ready.clear()
        self._finalizer()

    def _stacks(self) -> str:
        frames = sys._current_frames()
        alive = [thread for thread in self._threads if thread.ident in frames]
        return "\n".join(
            f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident or 0]))}"
            for thread in alive
        )


def _work(shared: _Shared) -> None:
    with working_for(shared.counters):
        _make_all(shared)


def _make_all(shared: _Shared) -> None:
    ahead = getattr(shared.make, "ahead", None)
    while numbers := shared.claim():
        results = _make(shared.make, numbers)
        failed = results[-1][1] is not None
        shared.put(numbers.start, results)
        # Else the thread would hold these results until it has made the next ones.
        del results
        if failed:
            return
        if ahead is not None:
            # What fails here fails again, and is reported, when its batch is due.
            with contextlib.suppress(Exception):
                ahead()


def _make(make: Any, numbers: range) -> list[Result]:
    """A result for each number, up to the first that fails."""
    if len(numbers) > 1 and hasattr(make, "many"):
        # If one fails it shows below which one, and those before it are not lost.
        with contextlib.suppress(BaseException):
            return [(result, None) for result in make.many(numbers)]
    results: list[Result] = []
    for number in numbers:
        try:
            results.append((make(number), None))
        except BaseException as caught:
            results.append((None, _named(caught, number)))
            break
    return results


def _named(error: BaseException, number: int) -> BaseException:
    if isinstance(error, PenstockError):
        return error
    named = StageError(f"batch {number} could not be made: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def _shut_down(shared: _Shared, threads: list[threading.Thread]) -> None:
    shared.stop()
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
