"""Numbered results made ahead of time by threads, handed over in order.

Any thread can make any number: workers take the next few numbers, and the consumer waits for the one that is due. At
most `depth` results are made ahead. Results are handed over in groups, since waking up another thread costs as much as
a small batch. `make` may have a method `many` for a group, and a method `ahead`, called in between, to prepare.

The number of threads is given, or found out (`ThreadCount`). Where `make` is known to be fast, threads may also rest. A
loop that does nothing but ask leaves no time to make anything ahead: it would wait for each result, and handing that
over would cost more than making it. Then the loop makes its results itself:

    the loop steps 5 ms, asks, steps 5 ms, asks      a thread makes the next results meanwhile
    the loop asks, asks, asks                        each is made when it is asked for; the threads rest

Threads refer to the shared state and never to the iterator that the user holds: when that is closed or dropped, they
stop.
"""

import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.errors import HeadraceError, StageError, StageTimeoutError
from headrace.observe.counting import Counters, now, working_for
from headrace.workers.stacks import stacks_of
from headrace.workers.thread_count import Stretch, ThreadCount

_JOIN_SECONDS = 5.0
_SHORT_STEP_NANOSECONDS = 200_000
"""In less time than this, a thread can hardly wake up."""
_SHORT_STEPS = 16
"""After this many short steps in a row, the threads rest."""
_HICCUP_STEPS = 64
"""A long step after this many short ones is taken for a hiccup; two that are closer together are the loop's own."""
_QUICK_NANOSECONDS = 1_000_000
"""A result that takes longer than this is never made by the loop itself."""


Result = tuple[Any, BaseException | None]


class _PrefetchState:
    """What the threads and the consumer share; one lock guards it all."""

    def __init__(
        self, make: Callable[[int], Any], count: int | None, depth: int, at_once: int, counters: Counters
    ) -> None:
        self.make, self.count, self.depth, self.at_once = make, count, depth, at_once
        self.counters = counters
        self.waiting = 0
        """How many results are ready."""
        self.lock = threading.Lock()
        self.came: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Something comes when a group of results is ready and the consumer waits for one. No condition: Ctrl-C in the
        middle of its `wait` would leave the lock as nobody expects it, and come out as another error."""
        self.awaited = 0
        """How many wait."""
        self.work = threading.Condition(self.lock)
        """Notified when there may be work for a thread."""
        self.results: dict[int, list[Result]] = {}
        """Groups of results, by the number of their first."""
        self.threads = 0
        """How many threads should be working."""
        self.resting = False
        """Whether the consumer makes its results itself."""
        self.next_made = 0
        self.handed = 0
        self.stopped = False

    def claim(self, thread: int) -> range:
        """Wait for room, and return the numbers that a thread makes next; empty when nothing is left to do."""
        with self.lock:
            while not self._is_over(thread) and (self.resting or not self._has_room()):
                self.work.wait()
            if self._is_over(thread):
                return range(0)
            first = self.next_made
            last = first + self._group()
            self.next_made = last if self.count is None else min(last, self.count)
            return range(first, self.next_made)

    def _is_over(self, thread: int) -> bool:
        return self.stopped or self.next_made == self.count or thread >= self.threads

    def _group(self) -> int:
        # The first results one by one, so that they are ready soon; then groups, to wake up threads less often.
        return self.at_once if self.next_made >= self.at_once else 1

    def _has_room(self) -> bool:
        return self.next_made + self._group() <= self.handed + max(self.depth, self.threads)

    @property
    def capacity(self) -> int:
        """How many results can be ready: those made ahead, and the rest of the group that was taken last."""
        return max(self.depth, self.threads) + self.at_once - 1

    def claim_here(self, most: int) -> range:
        """The numbers that are due, for the consumer to make, if the threads rest and none of them is making these."""
        with self.lock:
            if not self.resting or self.stopped or self.next_made != self.handed:
                return range(0)
            first, last = self.handed, self.handed + most
            self.next_made = self.handed = last if self.count is None else min(last, self.count)
            return range(first, self.handed)

    def put(self, first: int, results: list[Result]) -> None:
        with self.lock:
            if not self.stopped:
                self.results[first] = results
                self.waiting += len(results)
                self._wake_consumer()

    def _wake_consumer(self) -> None:
        for _ in range(self.awaited):
            self.came.put(None)
        self.awaited = 0

    def is_there(self) -> bool:
        """Whether the group that is due can be taken at once."""
        with self.lock:
            return self.handed in self.results

    def take(self, timeout_seconds: float) -> list[Result]:
        """Wait for the group that is due, and take it."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            with self.lock:
                if self.handed in self.results:
                    return self._take()
                if self.stopped:
                    return []
                self.awaited += 1
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            wait(self.came, left)

    def _take(self) -> list[Result]:
        results = self.results.pop(self.handed)
        self.handed += len(results)
        self.waiting -= len(results)
        if self._has_room():
            self.work.notify_all()
        return results

    def rest(self, resting: bool) -> None:
        with self.lock:
            self.resting = resting
            self.work.notify_all()

    def set_threads(self, count: int) -> None:
        with self.lock:
            self.threads = count
            self.work.notify_all()

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            self.results.clear()
            self._wake_consumer()
            self.work.notify_all()


def wait(came: "queue.SimpleQueue[None]", seconds: float) -> None:
    with contextlib.suppress(queue.Empty):
        came.get(timeout=seconds)


class Prefetch:
    """`next()` gives make(0), make(1), ... up to make(count - 1)."""

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        count: int | None,
        depth: int,
        threads: int | ThreadCount,
        timeout_seconds: float,
        stage: str,
        counters: Counters | None = None,
        at_once: int = 4,
        at_once_here: int = 1,
        may_rest: bool = False,
        describe: Callable[[int], str] | None = None,
        clock: Callable[[], int] = now,
    ) -> None:
        self._found_out = threads if isinstance(threads, ThreadCount) else None
        number = threads.count if isinstance(threads, ThreadCount) else threads
        at_once = min(at_once, depth // (2 * number)) if hasattr(make, "many") else 1
        self._counters = counters or Counters()
        self._shared = _PrefetchState(make, count, depth, max(1, at_once), self._counters)
        self._timeout_seconds, self._stage = timeout_seconds, stage
        self._describe = describe or (lambda number: f"batch {number}")
        self._ready: deque[Result] = deque()
        self._may_rest, self._at_once_here, self._clock = may_rest, at_once_here, clock
        self._left: int | None = None
        self._short_steps = 0
        self._begin_stretch()
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []
        # Also at exit: threads must have left the compiled loops before the interpreter shuts down.
        self._finalizer = weakref.finalize(self, _shut_down, self._shared, self._threads, self._pid)
        self._set_threads(number)

    def __next__(self) -> Any:
        if os.getpid() != self._pid:
            raise StageError(
                f"{self._stage}: this iteration was started in process {self._pid}, and its threads run there; "
                "after a fork, start a new one with iter(loader)"
            )
        if self._left is not None:
            self._notice(short=self._clock() - self._left < _SHORT_STEP_NANOSECONDS)
        shared = self._shared
        if not shared.resting and (self._ready or shared.handed != shared.count):
            self._counters.see_queue("ready", len(self._ready) + shared.waiting, shared.capacity)
        if not self._ready:
            self._refill()
        result, error = self._ready.popleft()
        if error is not None:
            self.close()
            raise error
        self._handed += 1
        if self._may_rest:
            self._left = self._clock()
        return result

    def _refill(self) -> None:
        """Get the results that are due, from the threads or by making them here."""
        if self._shared.resting:
            self._make_here()
        else:
            self._wait()
        if not self._ready:
            # Another thread closed the iteration while this one was waiting.
            raise StopIteration

    def is_ready(self) -> bool:
        """Whether the next result (or error) has arrived, so that `next` would not wait for it."""
        return bool(self._ready) or self._shared.is_there()

    def _notice(self, short: bool) -> None:
        """Let the threads rest after enough steps too short to make anything ahead; wake them after long ones."""
        before = resting = self._shared.resting
        if short:
            self._short_steps += 1
            resting = resting or self._short_steps >= _SHORT_STEPS
        else:
            resting = resting and self._short_steps >= _HICCUP_STEPS
            self._short_steps = 0
        if resting != before:
            self._shared.rest(resting)
            self._counters.workers = 0 if resting else self._shared.threads

    def _make_here(self) -> None:
        numbers = self._shared.claim_here(self._at_once_here)
        if not numbers:
            # A thread was still making it when the threads began to rest, or this is the end.
            self._wait()
            return
        begun = self._clock()
        try:
            self._ready.extend(_make(self._shared.make, numbers, Exception))
        except BaseException:
            # Ctrl-C: these results are lost, and the next ones would be taken for them.
            self.close()
            raise
        if self._clock() - begun > _QUICK_NANOSECONDS * len(numbers):
            # It may read from a slow disk, for which several threads can wait at once.
            self._notice(short=False)

    def _wait(self) -> None:
        shared = self._shared
        if shared.stopped or shared.handed == shared.count:
            self.close()
            raise StopIteration
        begun = self._clock()
        try:
            self._ready.extend(shared.take(self._timeout_seconds))
        except TimeoutError:
            stacks = stacks_of(self._threads)
            shared.stop()
            # Do not wait for a thread that hangs.
            self._finalizer.detach()
            raise StageTimeoutError(
                f"{self._stage}: {self._describe(shared.handed)} took longer than "
                f"timeout_seconds={self._timeout_seconds:g}; this is where its threads are:\n{stacks}"
            ) from None
        ended = self._clock()
        self._waited += ended - begun
        if self._found_out is not None:
            self._judge(self._found_out, ended)

    def _judge(self, found_out: ThreadCount, at: int) -> None:
        stretch = Stretch(self._handed, at - self._begun, self._waited)
        if stretch.tells:
            found_out.judge(stretch)
            self._set_threads(found_out.count)
            self._begin_stretch()

    def _begin_stretch(self) -> None:
        self._begun, self._handed, self._waited = self._clock(), 0, 0

    def _set_threads(self, count: int) -> None:
        shared, before = self._shared, self._shared.threads
        self._counters.workers = count
        if count == before:
            return
        shared.set_threads(count)
        for number in range(before, count):
            name = f"headrace-{self._stage}-{number}"
            thread = threading.Thread(target=_work, args=(shared, number), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        self._ready.clear()
        self._finalizer()


def _work(shared: _PrefetchState, thread: int) -> None:
    with working_for(shared.counters):
        _make_all(shared, thread)


def _make_all(shared: _PrefetchState, thread: int) -> None:
    ahead = getattr(shared.make, "ahead", None)
    while numbers := shared.claim(thread):
        results = _make(shared.make, numbers)
        failed = results[-1][1] is not None
        shared.put(numbers.start, results)
        # Otherwise the thread would keep these results alive until it has made the next ones.
        del results
        if failed:
            return
        if ahead is not None:
            # An error here comes again, and is reported, when its batch is due.
            with contextlib.suppress(Exception):
                ahead()


def _make(make: Any, numbers: range, failures: type[BaseException] = BaseException) -> list[Result]:
    """A result for each number, up to the first that fails. `failures` are the exceptions to hand over as results."""
    if len(numbers) > 1 and hasattr(make, "many"):
        # If this fails, the loop below finds out which number failed, and keeps the results before it.
        with contextlib.suppress(failures):
            return [(result, None) for result in make.many(numbers)]
    results: list[Result] = []
    for number in numbers:
        try:
            results.append((make(number), None))
        except failures as caught:
            results.append((None, _named(caught, number)))
            break
    return results


def _named(error: BaseException, number: int) -> BaseException:
    if isinstance(error, HeadraceError):
        return error
    named = StageError(f"batch {number} could not be made: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def _shut_down(shared: _PrefetchState, threads: list[threading.Thread], owner: int) -> None:
    if os.getpid() != owner:
        # A fork has none of the threads, and one of them may have held the lock.
        return
    shared.stop()
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
