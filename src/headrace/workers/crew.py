"""A crew of worker processes that evaluates one pure function for numbered tickets.

    crew = Crew(tokenize, workers=2, timeout_seconds=60, stage="map")
    crew.put(0, "a text")
    crew.put(1, "another")
    crew.get(1)     # {"tokens": array(...)}, whichever was done first
    crew.close()

Each worker is a fresh interpreter (`process.py`). It holds up to `ahead` tasks: the one it is doing, and others that
wait in its queue, so that it continues while nobody calls; further tasks wait here. Messages are read and tasks handed
out inside `put` and `get`, in the calling thread: a crew has no threads of its own, and only one thread may use it.

Arrays come through shared memory, which is reused when the last view of it is gone (`segments.py`).

An exception in the function fails only its ticket; a worker that dies or hangs ends the whole crew.
"""

import math
import os
import pickle
import selectors
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.errors import HeadraceError, SettingsError, StageError, StageTimeoutError
from headrace.observe.counting import Counters, now
from headrace.workers import crew_worker, process, wire
from headrace.workers.process import WorkerProcess, ctrl_c_waits, end_workers
from headrace.workers.segments import ParentSegments

START_SECONDS = 300.0
"""How long a worker may take to start: it imports what the function needs, perhaps from a slow disk."""
_LOOK_SECONDS = 1.0


class Crew:
    def __init__(
        self,
        work: crew_worker.Work,
        *,
        workers: int,
        timeout_seconds: float,
        stage: str,
        ahead: int = 1,
        counters: Counters | None = None,
        describe: Callable[[int], str] | None = None,
    ) -> None:
        """`stage` and `describe(ticket)` say in errors what failed, and on what: "map(augment)", "rows 0 to 9"."""
        for name, value in (("workers", workers), ("ahead", ahead)):
            if value < 1:
                raise SettingsError(f"{name}={value}: must be at least 1")
        if not timeout_seconds > 0:
            raise SettingsError(f"timeout_seconds={timeout_seconds}: must be more than 0")
        start = crew_worker.start_message(work)
        self._stage, self._timeout_seconds = stage, timeout_seconds
        self._ahead, self._counters = ahead, counters or Counters()
        self._describe = describe or (lambda ticket: f"ticket {ticket}")
        self._tickets: set[int] = set()
        self._waiting: deque[_Ticket] = deque()
        self._outcomes: dict[int, dict[str, Any] | _Failure] = {}
        self._failure: _Failure | None = None
        self._closed = False
        self._owner = os.getpid()
        self._selector = selectors.PollSelector()
        self._workers: list[_CrewMember] = []
        self._end = weakref.finalize(self, _end, self._workers, self._selector, self._owner)
        try:
            with ctrl_c_waits():
                for number in range(workers):
                    self._workers.append(_CrewMember(number, *start))
            for worker in self._workers:
                self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        except OSError as error:
            self.close()
            raise StageError(f"{stage}: cannot start a worker process: {error}") from error

    def put(self, ticket: int, task: Any) -> None:
        """Queue a task; never waits. Tasks are pickled, and should be small."""
        self._check_usable()
        if ticket in self._tickets:
            raise SettingsError(f"ticket={ticket}: is already queued; get its result first")
        try:
            pickled = pickle.dumps(task)
        except Exception as error:
            raise SettingsError(f"task={crew_worker.short(task)}: cannot be pickled: {error}") from error
        self._tickets.add(ticket)
        self._waiting.append(_Ticket(ticket, self._describe(ticket), pickled))
        if self._failure is None:
            self._converse(0)

    def get(self, ticket: int) -> dict[str, Any]:
        """The result of a ticket, which can be taken once. Raises if the ticket or the crew has failed."""
        self._check_usable()
        if ticket not in self._tickets:
            raise SettingsError(f"ticket={ticket}: was not queued, or its result was already taken")
        while ticket not in self._outcomes:
            if self._failure is not None:
                raise self._failure.error()
            deadline = min(worker.deadline(self._timeout_seconds) for worker in self._workers)
            came = self._converse(min(max(deadline - process.clock(), 0), _LOOK_SECONDS))
            self._look_after_workers(came)
        self._tickets.remove(ticket)
        outcome = self._outcomes.pop(ticket)
        if isinstance(outcome, _Failure):
            raise outcome.error()
        return outcome

    def is_done(self, ticket: int) -> bool:
        """Whether `get` would return (or raise) at once."""
        self._check_usable()
        if ticket not in self._outcomes and self._failure is None:
            self._converse(0)
        return ticket in self._outcomes or self._failure is not None

    @property
    def done(self) -> int:
        """How many results have arrived and were not taken."""
        return len(self._outcomes)

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """End the workers. Results that were taken stay valid; all others are lost."""
        self._end()
        self._closed = True
        self._waiting.clear()
        self._outcomes.clear()

    def _check_usable(self) -> None:
        if os.getpid() != self._owner:
            raise StageError(
                f"{self._stage}: its worker processes belong to process {self._owner}, and this is a fork of it; "
                "begin a new iteration here"
            )
        if self._closed:
            raise StageError(f"{self._stage}: its worker processes have been closed")

    def _converse(self, seconds: float) -> bool:
        """Read messages, waiting `seconds` for the first, and hand out tasks. Returns whether there were any."""
        events = self._selector.select(seconds)
        try:
            for key, mask in events:
                if self._failure is None and mask & selectors.EVENT_WRITE:
                    key.data.flush()
                if self._failure is None and mask & selectors.EVENT_READ:
                    self._receive(key.data)
            if self._failure is None:
                self._hand_out()
                self._watch()
        except BaseException:
            # Ctrl-C may have lost half a message here, and nothing after it would be right.
            self.close()
            raise
        return bool(events)

    def _receive(self, worker: "_CrewMember") -> None:
        try:
            for message in worker.receive():
                self._accept(worker, message)
                if self._failure is not None:
                    return
        except (EOFError, ConnectionError):
            if self._failure is None:
                self._fail(StageError, worker.describe_death())

    def _accept(self, worker: "_CrewMember", message: wire.Message) -> None:
        if not worker.ready:
            worker.ready = True
            if message.head[0] == "failed":
                _, said, trace = message.head
                what = f"a worker process cannot start: {said}; if it cannot find the function, {crew_worker.REMEDY}"
                self._failure = self._described(StageError, what, crew_worker.open_error(message.body), trace)
                self._end()
            return
        task = worker.tasks.popleft()
        if message.head[0] == "failed":
            self._outcomes[task.ticket] = self._failure_of(task, message)
            return
        _, parcel, spent = message.head
        self._counters.receive(spent, f"worker {worker.number}")
        begun = now()
        try:
            buffers = worker.segments.receive(parcel, message.descriptors, message.arrays)
            self._outcomes[task.ticket] = crew_worker.open_result(message.body, buffers)
        except Exception as error:
            what = f"the result for {task} cannot be unpickled here: {error}"
            self._outcomes[task.ticket] = self._described(StageError, what, error.with_traceback(None))
        self._counters.add("transport", begun, now())

    def _failure_of(self, task: "_Ticket", message: wire.Message) -> "_Failure":
        """An error of ours already names the function and the rows; the user's own error is its cause."""
        _, said, trace = message.head
        error = crew_worker.open_error(message.body)
        if isinstance(error, HeadraceError):
            return _Failure(type(error), str(error), error.__cause__, trace)
        return self._described(StageError, f"failed on {task}: {said}", error, trace)

    def _hand_out(self) -> None:
        """Give each worker a first task, then each a second one, and so on."""
        for already in range(self._ahead):
            for worker in self._workers:
                if self._waiting and worker.ready and len(worker.tasks) == already:
                    worker.give(self._waiting.popleft())

    def _watch(self) -> None:
        for worker in self._workers:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.has_unsent else 0)
            if self._selector.get_key(worker.connection).events != wanted:
                self._selector.modify(worker.connection, wanted, worker)

    def _look_after_workers(self, came: bool) -> None:
        at = process.clock()
        for worker in list(self._workers):
            if self._failure is not None:
                return
            if at > worker.deadline(self._timeout_seconds):
                self._fail(StageTimeoutError, self._hang(worker))
            elif not came and not worker.is_running():
                # A process that the user's function started still has the socket open.
                self._receive(worker)
                if self._failure is None:
                    self._fail(StageError, worker.describe_death())

    def _hang(self, worker: "_CrewMember") -> str:
        stack = worker.stack()
        worker.process.kill()
        if not worker.ready:
            return (
                f"a worker process did not start in {START_SECONDS:g} seconds; it was doing this:\n\n{stack}"
            )
        return (
            f"{worker.task} took longer than timeout_seconds={self._timeout_seconds:g}, so the worker process was "
            f"killed; increase timeout_seconds if it just needs more time. It was doing this:\n\n{stack}"
        )

    def _fail(self, kind: type[StageError], message: str) -> None:
        self._failure = self._described(kind, message)
        self._end()

    def _described(
        self, kind: type[StageError], message: str, cause: BaseException | None = None, trace: str = ""
    ) -> "_Failure":
        return _Failure(kind, f"{self._stage}: {message}", cause, trace)


@dataclass(frozen=True)
class _Failure:
    kind: type[HeadraceError]
    message: str
    cause: BaseException | None = None
    trace: str = ""
    """The traceback in the worker process: an exception that is sent from there comes without its own."""

    def error(self) -> HeadraceError:
        error = self.kind(self.message)
        error.__cause__ = self.cause
        if self.trace:
            self._add_trace_to(self.cause or error)
        return error

    def _add_trace_to(self, shown: BaseException) -> None:
        note = f"\nIn the worker process:\n\n{self.trace}"
        if note not in getattr(shown, "__notes__", ()):
            shown.add_note(note)


@dataclass(frozen=True)
class _Ticket:
    ticket: int
    description: str
    pickled: bytes

    def __str__(self) -> str:
        return self.description


class _CrewMember(WorkerProcess):
    """The crew's end of one worker process."""

    def __init__(self, number: int, start: tuple[Any, ...], work: bytes) -> None:
        # One thread per process unless the user says otherwise, since the processes already use all cores.
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        super().__init__("headrace.workers.crew_worker", environment={"OMP_NUM_THREADS": threads})
        self.number, self.ready = number, False
        self.tasks: deque[_Ticket] = deque()
        """The tasks that it was given and has not answered; it is doing the first."""
        self.segments = ParentSegments()
        self.send(start, work)

    @property
    def task(self) -> _Ticket | None:
        """The task that it is doing."""
        return self.tasks[0] if self.tasks else None

    def give(self, task: _Ticket) -> None:
        if not self.tasks:
            self.heard_at = process.clock()
        self.tasks.append(task)
        self.send(("task", self.segments.take_freed(), self.segments.take_lost()), task.pickled)

    def deadline(self, timeout_seconds: float) -> float:
        if not self.ready:
            return self.heard_at + START_SECONDS
        return math.inf if self.task is None else self.heard_at + timeout_seconds

    def describe_death(self) -> str:
        doing = "starting" if not self.ready else f"working on {self.task}" if self.task else "idle"
        return f"a worker process ({self.pid}) {self.death()} while {doing}"


def _end(workers: list[_CrewMember], selector: selectors.BaseSelector, owner: int) -> None:
    end_workers(workers, owner)
    workers.clear()
    selector.close()
