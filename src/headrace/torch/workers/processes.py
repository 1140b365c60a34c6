"""Worker processes as the loader sees them: it sends tasks and receives what became of them.

Nothing here waits but `receive`, and that only for workers: their sockets show at once when one has died. What a worker
does not read yet, because its code holds the interpreter's lock or because it was stopped, is sent later. There are no
threads, queues or signal handlers; all memory is without a name and gone with the processes.
"""

import contextlib
import multiprocessing
import os
import pickle
import selectors
import signal
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

from torch._utils import ExceptionWrapper

from headrace.errors import StageError
from headrace.observe.counting import Counters, now
from headrace.torch.workers import parcels
from headrace.torch.workers.children import Children, start_children
from headrace.torch.workers.job import BEGUN, Job, NextEpoch, WorkerResult, end_now, other_process
from headrace.workers import wire
from headrace.workers.segments import ParentSegments

_LOOK_SECONDS = 5.0


class _WorkerConnection:
    """The loader's end of one worker process."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        connection.setblocking(False)
        self.inbox = wire.Inbox(connection, wait=False)
        self.outbox = wire.Outbox(connection)
        self.is_behind = False
        """Whether it did not take all that was sent to it, so that the selector says when it can take more."""
        self.segments = ParentSegments()
        self.stopped = False
        """Told to end: that it does is no failure."""


class ProcessWorkers:
    def __init__(self, job: Job, context: Any, counters: Counters | None = None) -> None:
        self._process, self._counters = os.getpid(), counters or Counters()
        pairs = [socket.socketpair() for _ in range(job.num_workers)]
        self._workers = [_WorkerConnection(number, mine) for number, (mine, _) in enumerate(pairs)]
        # One thread may send while another one, which pins memory, receives and sends the rest.
        self._sending = threading.Lock()
        self._selector = selectors.PollSelector()
        for worker in self._workers:
            self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        # Before they start: a fork closes this side of all that live.
        _living.add(self)
        try:
            context = context or multiprocessing.get_context()
            self._children = start_children(context, job, [theirs for _, theirs in pairs])
        except BaseException:
            _hang_up(self._workers, self._selector)
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        self._end = weakref.finalize(self, _end, self._workers, self._selector, self._children, self._process)

    def pids(self) -> list[int | None]:
        return [self._children.pid(worker.number) for worker in self._workers]

    def __iter__(self) -> Iterator[Any]:
        """The processes, for code that knows PyTorch's iterator: with `pid`, `is_alive()`, `terminate()`."""
        return iter(self._children.processes())

    def __len__(self) -> int:
        return len(self._workers)

    def __getitem__(self, worker: int) -> Any:
        return self._children.processes()[worker]

    def send(self, worker: int, epoch: int, number: int, index: Any) -> None:
        """A task, with word of the memory that has become free."""
        segments, spans = self._workers[worker].segments, self._counters.spans
        drawn = spans is not None and spans.maxlen != 0
        head = ("task", epoch, number, segments.take_freed(), segments.take_lost(), drawn)
        self._send(worker, head, pickle.dumps(index))

    def begin_again(self, epoch: int, following: NextEpoch) -> None:
        for worker in range(len(self._workers)):
            self._send(worker, ("again", epoch, following))

    def stop(self, worker: int) -> None:
        self._workers[worker].stopped = True
        self._send(worker, ("stop",))

    def _send(self, worker: int, head: tuple[Any, ...], body: bytes = b"") -> None:
        # That a worker is gone shows when it is listened to.
        with self._sending:
            self._workers[worker].outbox.send(wire.encode(head, body))

    def _send_rest(self) -> None:
        """Send what the workers did not take before; where that is not all, listen for when they take more."""
        for worker in self._workers:
            if not worker.outbox and not worker.is_behind:
                continue
            with self._sending:
                worker.outbox.flush()
            behind = bool(worker.outbox)
            if behind != worker.is_behind and worker.connection in self._selector.get_map():
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if behind else 0)
                self._selector.modify(worker.connection, events, worker)
                worker.is_behind = behind

    def receive(self, timeout_seconds: float | None) -> list[WorkerResult]:
        """What has come, waiting for the first; nothing after so many seconds. RuntimeError if a worker has died."""
        if os.getpid() != self._process:
            raise StageError(other_process(self._process))
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        results: list[WorkerResult] = []
        while not results:
            left = _LOOK_SECONDS if deadline is None else min(deadline - time.monotonic(), _LOOK_SECONDS)
            if left <= 0:
                break
            self._send_rest()
            events = self._selector.select(left)
            for key, _ in events:
                results.extend(self._read(key.data))
            if not events:
                self._look_after()
        return results

    def waiting(self) -> int:
        """How many workers have sent something that was not read."""
        return len(self._selector.select(0))

    def _read(self, worker: _WorkerConnection) -> list[WorkerResult]:
        results: list[WorkerResult] = []
        while True:
            try:
                message = worker.inbox.receive()
            except BlockingIOError:
                return results
            except (EOFError, ConnectionError):
                self._selector.unregister(worker.connection)
                if not worker.stopped:
                    raise RuntimeError(self._death(worker.number)) from None
                return results
            if message is not None:
                results.append(self._open(worker, message))

    def _open(self, worker: _WorkerConnection, message: wire.Message) -> WorkerResult:
        match message.head:
            case ("batch", epoch, number, parcel, large, state, spent):
                self._counters.receive(spent, f"worker {worker.number}")
                begun = now()
                buffers = worker.segments.receive(parcel, message.descriptors, message.arrays)
                pickled = buffers.pop() if large else message.body
                try:
                    data = parcels.unpack(pickled, buffers)
                except Exception as error:
                    data = _unreadable(worker.number, error)
                self._counters.add("transport", begun, now())
                return WorkerResult(worker.number, epoch, number, data, state, begun=number == BEGUN)
            case ("begun", epoch, state):
                return WorkerResult(worker.number, epoch, 0, state=state, begun=True)
            case (_, epoch, number, state):
                return WorkerResult(worker.number, epoch, number, state=state, ended=True)
        raise RuntimeError(
            f"DataLoader worker {worker.number} sent an unknown message, {message.head!r}; is it the same version?"
        )

    def _look_after(self) -> None:
        """Of a worker that has died, a process that it started may still have the socket."""
        for number in self._children.ended():
            if not self._workers[number].stopped:
                raise RuntimeError(self._death(number))

    def _death(self, worker: int) -> str:
        """In PyTorch's words."""
        pid, code = self._children.pid(worker), self._children.exit_code(worker)
        if code is not None and code < 0:
            said = f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}. "
            if -code == signal.SIGBUS:
                said += (
                    "It is possible that dataloader's workers are out of shared memory. "
                    "Please try to raise your shared memory limit."
                )
            return said
        said = f"DataLoader worker (pid(s) {pid}) exited unexpectedly"
        if code:
            said += (
                f" with exit code {code}. Details are lost due to multiprocessing. "
                "Rerunning with num_workers=0 may give better error trace."
            )
        return said

    def close(self) -> None:
        end_now(self._end)

    def forget(self) -> None:
        """In a fork: close this side, and leave the workers to the process whose they are."""
        for worker in self._workers:
            worker.connection.close()
        if children := getattr(self, "_children", None):
            # Not if this is one of them, which are being started.
            children.forget()


def _unreadable(worker: int, error: Exception) -> ExceptionWrapper:
    said = (
        f"A batch from DataLoader worker process {worker} cannot be unpickled: {type(error).__name__}: {error}\n"
        f"{traceback.format_exc()}"
    )
    wrapper = ExceptionWrapper((RuntimeError, RuntimeError(said), None))
    wrapper.exc_msg = said
    return wrapper


def _end(
    workers: list[_WorkerConnection], selector: selectors.BaseSelector, children: Children, owner: int
) -> None:
    if os.getpid() == owner:
        _hang_up(workers, selector)
        children.end()


def _hang_up(workers: list[_WorkerConnection], selector: selectors.BaseSelector) -> None:
    for worker in workers:
        # Reaches the worker even if a fork of this process has the socket too.
        with contextlib.suppress(OSError):
            worker.connection.shutdown(socket.SHUT_RDWR)
        worker.connection.close()
    selector.close()


_living: "weakref.WeakSet[ProcessWorkers]" = weakref.WeakSet()


def _forget_after_fork() -> None:
    """A fork has the sockets too: it must not keep workers alive whose loader is gone."""
    for workers in list(_living):
        workers.forget()


os.register_at_fork(after_in_child=_forget_after_fork)
