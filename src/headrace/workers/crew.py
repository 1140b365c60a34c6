"""A crew of worker processes that evaluates one pure function for numbered tickets.

    crew = Crew(tokenize, workers=2, slots=4, timeout_seconds=60, stage="map")
    crew.put(0, "a text")
    crew.put(1, "another")
    crew.get(1)     # {"tokens": array(...)}, whichever was done first
    crew.close()

Each worker is a fresh interpreter with a socket to the crew. It has up to `ahead` tasks: one that it does, and others
that wait with it, so that it goes on while nobody calls; further ones wait here. Messages are read and tasks handed
out inside `put` and `get`, in the thread that calls them: a crew has no threads of its own, and is for one thread.

Arrays come through shared memory without a name, cut into equal slots. The first result comes through the socket
and tells how large a slot must be; from then on a task goes out with a free slot, the worker writes its arrays
there, and `get` gives views of it:

    put(7) -> waits -> idle worker, free slot 2 -> done -> get(7): views of slot 2 -> let go of -> slot 2 is free

Nobody is asked to let go. One array stands for each slot, and NumPy makes it the base of every view of a view: its
reference count tells whether the slot is free. With no free slot, or a result that is too large for one, the
arrays come through the socket. A worker waits there until they are read, so a task without a slot is its only one.

An exception in the function is the failure of its ticket; a worker that dies or hangs is the end of the crew.
"""

import contextlib
import logging
import math
import mmap
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import SettingsError, StageError, StageTimeoutError
from headrace.observe.counting import Counters, now
from headrace.workers import crew_worker, wire

START_SECONDS = 300.0
"""How long a worker may take to start: it imports what the function needs, perhaps from a slow disk."""
_GRACE_SECONDS = 0.3
_REAP_SECONDS = 10.0
"""For a worker that was killed: gone at once, unless the machine is very busy or the worker's disk hangs."""
_STACK_SECONDS = 5.0
_STACK_ENDED_SECONDS = 0.2
"""A stack is whole if nothing was added to it for so long."""
_LOOK_SECONDS = 1.0
clock = time.monotonic
"""Seconds, by which the deadlines of tasks are reckoned."""
_log = logging.getLogger(__name__)


class Crew:
    def __init__(
        self,
        work: crew_worker.Work,
        *,
        workers: int,
        slots: int,
        timeout_seconds: float,
        stage: str,
        ahead: int = 1,
        counters: Counters | None = None,
    ) -> None:
        for name, value in (("workers", workers), ("slots", slots), ("ahead", ahead)):
            if value < 1:
                raise SettingsError(f"{name}={value}: must be at least 1")
        if not timeout_seconds > 0:
            raise SettingsError(f"timeout_seconds={timeout_seconds}: must be more than 0")
        start = crew_worker.start_message(work)
        self._stage, self._timeout_seconds, self._slot_count = stage, timeout_seconds, slots
        self._ahead, self._counters = ahead, counters or Counters()
        self._tickets: set[int] = set()
        self._waiting: deque[_Task] = deque()
        self._outcomes: dict[int, dict[str, Any] | _Failure] = {}
        self._failure: _Failure | None = None
        self._closed = False
        self._slots: list[_Slot] = []
        self._slot_bytes = 0
        self._process = os.getpid()
        self._selector = selectors.PollSelector()
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end, self._workers, self._selector, self._process)
        try:
            with crew_worker.ctrl_c_waits():
                for number in range(workers):
                    self._workers.append(_Worker(number, start))
            for worker in self._workers:
                self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        except OSError as error:
            self.close()
            raise StageError(f"stage={stage}: cannot start a worker process: {error}") from error

    def put(self, ticket: int, task: Any) -> None:
        """Have a task done; never waits. Tasks are pickled, and should be small."""
        self._check_usable()
        if ticket in self._tickets:
            raise SettingsError(f"ticket={ticket}: was put already; get its result first")
        try:
            pickled = pickle.dumps(task)
        except Exception as error:
            raise SettingsError(f"task={crew_worker.short(task)}: cannot be pickled: {error}") from error
        self._tickets.add(ticket)
        self._waiting.append(_Task(ticket, crew_worker.short(task), pickled))
        if self._failure is None:
            self._converse(0)

    def get(self, ticket: int) -> dict[str, Any]:
        """The result of a ticket, once; or its failure, or the crew's."""
        self._check_usable()
        if ticket not in self._tickets:
            raise SettingsError(f"ticket={ticket}: was not put, or its result was taken already")
        while ticket not in self._outcomes:
            if self._failure is not None:
                raise self._failure.error()
            deadline = min(worker.deadline(self._timeout_seconds) for worker in self._workers)
            came = self._converse(min(max(deadline - clock(), 0), _LOOK_SECONDS))
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
        """How many results are here and were not taken."""
        return len(self._outcomes)

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End the workers. Results that were handed over stay valid; the others are gone."""
        self._end()
        self._closed = True
        self._waiting.clear()
        self._outcomes.clear()
        self._slots = []

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise StageError(
                f"stage={self._stage}: its crew belongs to process {self._process}, and this is a fork of it; "
                "make a new one here"
            )
        if self._closed:
            raise StageError(f"stage={self._stage}: its crew is closed")

    def _converse(self, seconds: float) -> bool:
        """Read what workers said, waiting so long for the first word, and hand out tasks. Whether any spoke."""
        events = self._selector.select(seconds)
        try:
            for key, mask in events:
                if self._failure is None and mask & selectors.EVENT_WRITE:
                    key.data.outbox.flush()
                if self._failure is None and mask & selectors.EVENT_READ:
                    self._receive(key.data)
            if self._failure is None:
                self._hand_out()
                self._watch()
        except BaseException:
            # Ctrl-C in here may have lost half a message, and nothing after it would be right.
            self.close()
            raise
        return bool(events)

    def _receive(self, worker: "_Worker") -> None:
        while self._failure is None:
            try:
                message = worker.inbox.receive()
            except BlockingIOError:
                return
            except (EOFError, ConnectionError):
                self._fail(StageError, worker.death())
                return
            worker.heard_at = clock()
            if message is not None:
                self._accept(worker, message)

    def _accept(self, worker: "_Worker", message: wire.Message) -> None:
        if not worker.ready:
            if message.head[0] == "failed":
                _, kind, said, trace = message.head
                what = f"a worker cannot start: {kind}: {said}; if it does not find the function, {crew_worker.REMEDY}"
                self._fail(StageError, f"{what}\n\n{trace}", crew_worker.open_error(message.body))
            worker.ready = True
            return
        task, slot = worker.tasks.popleft()
        if message.head[0] == "failed":
            _, kind, said, trace = message.head
            what = f"{kind} in {task}: {said}\n\n{trace}"
            self._outcomes[task.ticket] = self._described(
                StageError, what, crew_worker.open_error(message.body)
            )
        else:
            _, in_slot, used, spent = message.head
            self._counters.receive(spent, f"worker {worker.number}")
            begun = now()
            try:
                memory = slot.owner if slot is not None and in_slot else message.arrays
                self._outcomes[task.ticket] = crew_worker.open_result(message.body, memory)
            except Exception as error:
                what = f"the result of {task} cannot be unpickled here: {error}"
                self._outcomes[task.ticket] = self._described(StageError, what, error.with_traceback(None))
            self._counters.add("transport", begun, now())
            if used > self._slot_bytes:
                self._allocate(used)
        if slot is not None:
            slot.taken = False

    def _allocate(self, used: int) -> None:
        """New slots, with room for somewhat larger results. The old ones live as long as someone has views of them."""
        slot_bytes = wire.round_up(used + used // 4, mmap.PAGESIZE)
        self._slots, self._slot_bytes = [], slot_bytes
        try:
            with open(wire.anonymous_file(), "r+b") as file:
                file.truncate(slot_bytes * self._slot_count)
                mapped = mmap.mmap(file.fileno(), slot_bytes * self._slot_count)
                for worker in self._workers:
                    message = wire.encode(("memory", slot_bytes, self._slot_count))
                    worker.outbox.send(message, [os.dup(file.fileno())])
            self._slots = [_Slot(number, mapped, slot_bytes) for number in range(self._slot_count)]
        except OSError as error:
            _log.warning("no shared memory of %d bytes (%s): slower", slot_bytes * self._slot_count, error)

    def _hand_out(self) -> None:
        """To each worker one task, then to each a second, and so on."""
        for already in range(self._ahead):
            for worker in self._workers:
                if not self._waiting or not worker.ready or len(worker.tasks) != already:
                    continue
                slot = next((slot for slot in self._slots if slot.is_free()), None)
                if already and (slot is None or worker.tasks[-1][1] is None):
                    continue
                worker.give(self._waiting.popleft(), slot)

    def _watch(self) -> None:
        for worker in self._workers:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
            if self._selector.get_key(worker.connection).events != wanted:
                self._selector.modify(worker.connection, wanted, worker)

    def _look_after_workers(self, came: bool) -> None:
        at = clock()
        for worker in list(self._workers):
            if self._failure is not None:
                return
            if at > worker.deadline(self._timeout_seconds):
                self._fail(StageTimeoutError, self._hang(worker))
            elif not came and worker.process.poll() is not None:
                # Its socket is still open in a process that the user's function started.
                self._receive(worker)
                if self._failure is None:
                    self._fail(StageError, worker.death())

    def _hang(self, worker: "_Worker") -> str:
        stack = worker.stack() or "(its stack could not be had)\n"
        worker.process.kill()
        if not worker.ready:
            return f"a worker did not start in {START_SECONDS:g} seconds; it was doing this:\n\n{stack}"
        return (
            f"{worker.task} took longer than timeout_seconds={self._timeout_seconds:g}, and its worker was killed; "
            f"raise timeout_seconds if it only needs longer. It was doing this:\n\n{stack}"
        )

    def _fail(self, kind: type[StageError], message: str, cause: BaseException | None = None) -> None:
        self._failure = self._described(kind, message, cause)
        self._end()

    def _described(self, kind: type[StageError], message: str, cause: BaseException | None) -> "_Failure":
        return _Failure(kind, f"stage={self._stage}: {message}", cause)


@dataclass(frozen=True)
class _Failure:
    kind: type[StageError]
    message: str
    cause: BaseException | None = None

    def error(self) -> StageError:
        error = self.kind(self.message)
        error.__cause__ = self.cause
        return error


@dataclass(frozen=True)
class _Task:
    ticket: int
    shown: str
    pickled: bytes

    def __str__(self) -> str:
        return f"ticket {self.ticket} (task={self.shown})"


class _Slot:
    def __init__(self, number: int, mapped: mmap.mmap, slot_bytes: int) -> None:
        self.number, self.taken = number, False
        """Taken: a worker may write to it."""
        # Not a slice of one large array: that would be the base of the views, instead of this one.
        self.owner = np.frombuffer(mapped, np.uint8, slot_bytes, number * slot_bytes)
        self._references_unused = self._references()

    def _references(self) -> int:
        return sys.getrefcount(self.owner)

    def is_free(self) -> bool:
        return not self.taken and self._references() <= self._references_unused


class _Worker:
    """The crew's end of one worker process."""

    def __init__(self, number: int, start: bytes) -> None:
        self.number, self.ready = number, False
        self.tasks: deque[tuple[_Task, _Slot | None]] = deque()
        """What it was given and has not answered, each with the slot for its result; it does the first."""
        self.heard_at = clock()
        """When it last gave a sign of life, or was given a task to begin with."""
        self.connection, theirs = socket.socketpair()
        self._stacks = -1
        try:
            self._stacks = wire.anonymous_file()
            self.process = crew_worker.spawn(theirs.fileno(), self._stacks)
        except BaseException:
            self.connection.close()
            if self._stacks >= 0:
                os.close(self._stacks)
            raise
        finally:
            theirs.close()
        self.connection.setblocking(False)
        self.inbox, self.outbox = wire.Inbox(self.connection), wire.Outbox(self.connection)
        self.outbox.send(start)

    @property
    def task(self) -> _Task | None:
        """What it is doing."""
        return self.tasks[0][0] if self.tasks else None

    def give(self, task: _Task, slot: _Slot | None) -> None:
        if not self.tasks:
            self.heard_at = clock()
        self.tasks.append((task, slot))
        if slot is not None:
            slot.taken = True
        self.outbox.send(
            wire.encode(("task", crew_worker.NO_SLOT if slot is None else slot.number), task.pickled)
        )

    def deadline(self, timeout_seconds: float) -> float:
        if not self.ready:
            return self.heard_at + START_SECONDS
        return math.inf if self.task is None else self.heard_at + timeout_seconds

    def death(self) -> str:
        doing = "starting" if not self.ready else f"working on {self.task}" if self.task else "idle"
        return f"worker {self.number} (process {self.process.pid}) {crew_worker.ending(self.process)} while {doing}"

    def stack(self) -> str:
        """What its threads are doing, if it tells soon: its fault handler writes into a file that both have."""
        self.process.send_signal(signal.SIGUSR1)
        size, changed_at = 0, time.monotonic()
        deadline = changed_at + _STACK_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.02)
            before, size = size, os.fstat(self._stacks).st_size
            if size != before:
                changed_at = time.monotonic()
            elif size and time.monotonic() > changed_at + _STACK_ENDED_SECONDS:
                break
        return os.pread(self._stacks, size, 0).decode(errors="replace")

    def hang_up(self, mine: bool) -> None:
        if mine:
            # Reaches the worker even if a fork of this process has the socket too.
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        os.close(self._stacks)
        self.outbox.close()


def _end(workers: list[_Worker], selector: selectors.BaseSelector, process: int) -> None:
    """Hang up, which ends the workers; kill those that are not gone soon; reap them all."""
    mine = os.getpid() == process
    for worker in workers:
        worker.hang_up(mine)
    deadline = time.monotonic() + _GRACE_SECONDS
    for worker in workers if mine else ():
        try:
            worker.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            worker.process.kill()
    deadline = time.monotonic() + _REAP_SECONDS
    for worker in workers if mine else ():
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(deadline - time.monotonic(), 0))
    workers.clear()
    selector.close()
