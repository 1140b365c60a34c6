"""The worker processes of a server: they start, are given tasks, die, and are replaced.

A pool lives in an asyncio loop, and all of its methods are called there. A task whose worker has died is given to
another one; only a task that has ended several workers fails.
"""

import asyncio
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace import errors
from headrace.errors import HeadraceError, SettingsError, StageError, StageTimeoutError
from headrace.serve.description import Description, decode, differences
from headrace.serve.messages import ON_THE_SERVER
from headrace.serve.result import Result, Segment
from headrace.serve.worker import CODEC, SERVING_VARIABLE, Served, Task
from headrace.workers import process, wire
from headrace.workers.crew_worker import start_message
from headrace.workers.process import WorkerProcess, ctrl_c_waits, end_workers

_log = logging.getLogger(__name__)

START_SECONDS = 300.0
_LOOK_SECONDS = 1.0
_MOST_DEATHS = 3
"""A task is not tried again if so many workers have died of it."""
_RESTART_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
"""How long to wait before a worker is started again, after so many failures in a row."""


@dataclass(frozen=True)
class Failure:
    """Why a task has no result."""

    kind: str
    message: str
    elsewhere: bool = False
    """Whether another server may well succeed."""


Done = Callable[[Result | Failure], None]


@dataclass(eq=False)
class PoolTask:
    what: Task | None
    """None asks for the packing report."""
    done: Done
    described: str
    deaths: int = 0
    started_at: float = 0.0


class Pool:
    def __init__(
        self,
        served: Served,
        *,
        workers: int,
        threads: int = 1,
        timeout_seconds: float = 600.0,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """`ready` is called whenever a worker may take another task."""
        self._start = start_message(served)
        self._workers_wanted, self.threads = workers, threads
        self._timeout_seconds, self._ready = timeout_seconds, ready
        self._loop = asyncio.get_running_loop()
        self._workers: list[_PoolWorker] = []
        self._again: deque[PoolTask] = deque()
        """Tasks of workers that have died."""
        self._numbers = 0
        self._failures_in_a_row = 0
        self.description: Description | None = None
        self.first = asyncio.Future[Description]()
        """What is served, when the first worker is ready, or why none can be."""
        self.deaths = 0
        self.is_closed = False
        self._end = weakref.finalize(self, end_workers, self._workers, os.getpid())
        # Not while the loop may be using them; workers end when this process does.
        self._end.atexit = False
        for _ in range(workers):
            self._start_worker()
        self._timer = self._loop.call_later(_LOOK_SECONDS, self._look_after_workers)

    # Tasks

    @property
    def slots(self) -> int:
        """How many tasks can run at the same time, when all workers are there."""
        return self._workers_wanted * self.threads

    @property
    def running(self) -> int:
        return sum(len(worker.tasks) for worker in self._workers)

    @property
    def workers_ready(self) -> int:
        return sum(worker.is_ready for worker in self._workers)

    @property
    def free(self) -> int:
        """How many tasks can be given now."""
        return sum(worker.free for worker in self._workers) - len(self._again)

    def give(self, task: PoolTask) -> None:
        """Start a task on the worker with the fewest; only if one is `free`."""
        worker = min((each for each in self._workers if each.free), key=lambda each: len(each.tasks))
        self._numbers += 1
        task.started_at = self._loop.time()
        worker.give(self._numbers, task)
        self._watch(worker)

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._timer.cancel()
        for worker in self._workers:
            self._forget(worker)
        self._end()
        if not self.first.done():
            self.first.cancel()

    # Workers

    def _start_worker(self) -> None:
        if self.is_closed:
            return
        try:
            with ctrl_c_waits():
                worker = _PoolWorker(self._start, self.threads)
        except OSError as error:
            self._fail_to_start(f"cannot start a worker process: {error}")
            return
        self._workers.append(worker)
        self._loop.add_reader(worker.connection, self._receive, worker)
        self._watch(worker)

    def _fail_to_start(self, reason: str, kind: type[Exception] = StageError) -> None:
        if not self.first.done():
            self.first.set_exception(kind(reason))
            return
        self._failures_in_a_row += 1
        self._start_later()

    def _start_later(self) -> None:
        wait = _RESTART_SECONDS[min(self._failures_in_a_row, len(_RESTART_SECONDS)) - 1]
        self._loop.call_later(wait, self._start_worker)

    def _receive(self, worker: "_PoolWorker") -> None:
        received = worker.receive()
        while not worker.is_gone:
            try:
                message = next(received, None)
            except (EOFError, OSError):
                self._lose(worker)
                return
            if message is None:
                return
            self._accept(worker, message)

    def _accept(self, worker: "_PoolWorker", message: wire.Message) -> None:
        what, *rest = message.head
        if what == "ready":
            self._welcome(worker, message.body)
        elif not worker.is_ready:
            _, kind, said, trace = rest
            self._forget(worker, end=True)
            self._fail_to_start(f"{said}\n\n{trace}" if trace else said, _error_class(kind))
        elif what == "failed":
            number, kind, said, trace = rest
            self._finish(
                worker, number, Failure(kind, f"{said}\n\n{ON_THE_SERVER}\n\n{trace}" if trace else said)
            )
        else:
            number, place, spent, dropped = rest
            worker.drop(dropped)
            made = self._loop.time() - worker.tasks[number].started_at
            self._finish(worker, number, worker.result(message, place, spent, made))

    def _welcome(self, worker: "_PoolWorker", described: bytes) -> None:
        description = decode(described)
        if self.description is not None and description.fingerprint != self.description.fingerprint:
            why = "; ".join(differences(self.description, description))
            self._forget(worker, end=True)
            self._fail_to_start(
                f"a worker process makes another Loader than the first one: {why}", SettingsError
            )
            return
        worker.is_ready = True
        self._failures_in_a_row = 0
        self.description = self.description or description
        if not self.first.done():
            self.first.set_result(description)
        self._next()

    def _finish(self, worker: "_PoolWorker", number: int, outcome: Result | Failure) -> None:
        task = worker.tasks.pop(number)
        task.done(outcome)
        self._next()

    def _next(self) -> None:
        while self._again and any(worker.free for worker in self._workers):
            self.give(self._again.popleft())
        if not self._again:
            self._ready()

    def _lose(self, worker: "_PoolWorker") -> None:
        """A worker has died: its tasks are given to others."""
        death = f"a worker process ({worker.pid}) {worker.death()}"
        was_ready, tasks = worker.is_ready, list(worker.tasks.values())
        if was_ready:
            _log.warning("%s, and another one is started", death)
        self._forget(worker, end=True)
        self.deaths += 1
        if not was_ready:
            self._fail_to_start(f"{death} while starting")
        else:
            # One that dies of its tasks is started again at once, and others wait for that if it happens often.
            self._failures_in_a_row += 1
            self._start_later()
        for task in tasks:
            task.deaths += 1
            if task.deaths >= _MOST_DEATHS:
                said = f"{death} while working on {task.described}, as {_MOST_DEATHS - 1} others did before"
                task.done(Failure(StageError.__name__, said))
            else:
                self._again.append(task)
        self._next()

    def _forget(self, worker: "_PoolWorker", *, end: bool = False) -> None:
        if worker.is_gone:
            return
        worker.leave()
        self._loop.remove_reader(worker.connection)
        self._loop.remove_writer(worker.connection)
        worker.tasks = {}
        if end:
            self._workers.remove(worker)
            worker.process.kill()
            end_workers([worker], os.getpid())

    def _watch(self, worker: "_PoolWorker") -> None:
        """Send the rest of what the worker could not take at once, when it can."""
        if worker.has_unsent and not worker.is_gone:
            self._loop.add_writer(worker.connection, self._flush, worker)

    def _flush(self, worker: "_PoolWorker") -> None:
        worker.flush()
        if not worker.has_unsent:
            self._loop.remove_writer(worker.connection)

    def _look_after_workers(self) -> None:
        """End workers that hang, and notice those that have died without closing their connection."""
        at = self._loop.time()
        for worker in list(self._workers):
            late = worker.late_task(at, self._timeout_seconds)
            if late is not None:
                self._end_hanging(worker, late)
            elif not worker.is_ready and process.clock() - worker.heard_at > START_SECONDS:
                stack = worker.stack()
                self._forget(worker, end=True)
                self._fail_to_start(
                    f"a worker process did not start in {START_SECONDS:g} seconds; it was doing this:\n\n{stack}"
                )
            elif not worker.is_running():
                self._receive(worker)
                if not worker.is_gone:
                    self._lose(worker)
        self._timer = self._loop.call_later(_LOOK_SECONDS, self._look_after_workers)

    def _end_hanging(self, worker: "_PoolWorker", late: PoolTask) -> None:
        stack = worker.stack()
        for number, task in list(worker.tasks.items()):
            if task is late:
                del worker.tasks[number]
                task.done(
                    Failure(
                        StageTimeoutError.__name__,
                        f"{task.described} took longer than timeout_seconds={self._timeout_seconds:g}, so the worker "
                        f"process was killed. It was doing this:\n\n{stack}",
                    )
                )
        worker.process.kill()
        worker.process.wait()
        self._lose(worker)


class _PoolWorker(WorkerProcess):
    def __init__(self, start: tuple[tuple[Any, ...], bytes], threads: int) -> None:
        (_, preparation, main), served = start
        # One thread per process unless the user says otherwise, since the processes already use all cores.
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), SERVING_VARIABLE: "1"}
        super().__init__("headrace.serve.worker", CODEC, environment=variables)
        self.threads, self.is_ready, self.is_gone = threads, False, False
        self.tasks: dict[int, PoolTask] = {}
        self._segments: dict[int, Segment] = {}
        self._freed: list[int] = []
        """Segments that nobody reads any more, and that the worker has not been told of."""
        self.send([preparation, main, threads], served)

    @property
    def free(self) -> int:
        return self.threads - len(self.tasks) if self.is_ready and not self.is_gone else 0

    def give(self, number: int, task: PoolTask) -> None:
        self.tasks[number] = task
        what = [] if task.what is None else [task.what.rows, task.what.fields, task.what.stages]
        self.send([number, self._take_freed(), *what])

    def result(self, message: wire.Message, place: list[int] | None, spent: list[Any], made: float) -> Result:
        times = tuple((stage, count, nanoseconds) for stage, count, nanoseconds in spent)
        if place is None:
            return Result(message.body, message.arrays, made_seconds=made, spent=times)
        number, size, body_bytes = place
        if message.descriptors:
            self._segments[number] = Segment(size, message.descriptors[0])
        return Result(
            message.body,
            message.arrays,
            body_bytes=body_bytes,
            segment=self._segments[number],
            free=partial(self._free, number),
            made_seconds=made,
            spent=times,
        )

    def _free(self, number: int) -> None:
        if self.is_gone:
            self._segments.pop(number).close()
            return
        self._freed.append(number)
        if not self.tasks:
            # Otherwise a worker that rests would not know that it may drop memory.
            self.send([None, self._take_freed()])

    def _take_freed(self) -> list[int]:
        freed, self._freed = self._freed, []
        return freed

    def drop(self, numbers: list[int]) -> None:
        """Close segments that the worker uses no more."""
        for number in numbers:
            self._segments.pop(number).close()

    def leave(self) -> None:
        """It is gone. Segments that somebody reads are closed when they are let go."""
        self.is_gone = True
        self.drop(self._freed)
        self._freed = []

    def late_task(self, at: float, timeout_seconds: float) -> PoolTask | None:
        """A task that takes longer than it may."""
        return next((task for task in self.tasks.values() if at - task.started_at > timeout_seconds), None)


def _error_class(name: str) -> type[Exception]:
    found = getattr(errors, name, StageError)
    return found if isinstance(found, type) and issubclass(found, HeadraceError) else StageError
