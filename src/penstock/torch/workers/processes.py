"""Worker processes as the loader sees them: it sends tasks and receives what became of them.

Nothing here waits but `receive`, and that only for workers: their sockets show at once when one has died. There are no
threads, queues, locks or signal handlers; all memory is without a name and gone with the processes.
"""

import contextlib
import multiprocessing
import os
import pickle
import selectors
import signal
import socket
import time
import traceback
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

from torch._utils import ExceptionWrapper

from penstock.load import wire
from penstock.torch.workers import parcels, payload, process
from penstock.torch.workers.job import Job, Result
from penstock.torch.workers.segments import Seen

_STOP_SECONDS = 5.0
_LOOK_SECONDS = 5.0
_CANNOT_PICKLE = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)


@dataclass(frozen=True)
class _Given:
    """A job that needs no unpacking."""

    job: Job

    def __call__(self) -> Job:
        return self.job


class _Worker:
    """The loader's end of one worker process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.connection, self.theirs = socket.socketpair()
        self.inbox = wire.Inbox(self.connection, wait=False)
        self.seen = Seen()
        self.process: Any = None
        self.stopped = False
        """Told to end: that it does is no failure."""

    def start(self, context: Any, give_job: Any) -> None:
        self.process = context.Process(
            target=process.run, args=(self.theirs, give_job, self.number), daemon=True
        )
        try:
            self.process.start()
        except (TypeError, AttributeError, pickle.PicklingError):
            warnings.warn(_CANNOT_PICKLE, stacklevel=2)
            raise
        finally:
            self.theirs.close()


def _forks(context: Any) -> bool:
    return bool(context.get_start_method() == "fork")


class ProcessWorkers:
    def __init__(self, job: Job, context: Any) -> None:
        self._workers: list[_Worker] = []
        self._selector = selectors.PollSelector()
        self._end = weakref.finalize(self, _end, self._workers, self._selector, os.getpid())
        _living.add(self)
        context = context or multiprocessing.get_context()
        sealed = None if _forks(context) else payload.seal(job)
        try:
            for number in range(job.num_workers):
                worker = _Worker(number)
                # Before it starts: a fork closes the parent's ends of all that are listed.
                self._workers.append(worker)
                worker.start(context, sealed or _Given(job))
                self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        except BaseException:
            self.close()
            raise
        finally:
            if sealed is not None:
                sealed.close()

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def send(self, worker: int, epoch: int, number: int, index: Any) -> None:
        """A task, with word of the memory that has become free."""
        freed = self._workers[worker].seen.take_freed()
        self._send(worker, ("task", epoch, number, freed), pickle.dumps(index))

    def begin_again(self, epoch: int, shared_seed: int | None) -> None:
        for worker in range(len(self._workers)):
            self._send(worker, ("again", epoch, shared_seed))

    def stop(self, worker: int) -> None:
        self._workers[worker].stopped = True
        self._send(worker, ("stop",))

    def _send(self, worker: int, head: tuple[Any, ...], body: bytes = b"") -> None:
        # A worker reads at any time, so this does not wait. That one is gone shows when it is listened to.
        with contextlib.suppress(ConnectionError):
            self._workers[worker].connection.sendall(wire.encode(head, body), wire.NO_SIGNAL)

    def receive(self, timeout_seconds: float | None) -> list[Result]:
        """What has come, waiting for the first; nothing after so many seconds. RuntimeError if a worker has died."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        results: list[Result] = []
        while not results:
            left = _LOOK_SECONDS if deadline is None else min(deadline - time.monotonic(), _LOOK_SECONDS)
            if left <= 0:
                break
            events = self._selector.select(left)
            for key, _ in events:
                results.extend(self._read(key.data))
            if not events:
                self._look_after()
        return results

    def _read(self, worker: _Worker) -> list[Result]:
        results: list[Result] = []
        while True:
            try:
                message = worker.inbox.receive()
            except BlockingIOError:
                return results
            except (EOFError, ConnectionError):
                self._selector.unregister(worker.connection)
                if not worker.stopped:
                    raise RuntimeError(_death(worker)) from None
                return results
            if message is not None:
                results.append(self._open(worker, message))

    def _open(self, worker: _Worker, message: wire.Message) -> Result:
        match message.head:
            case ("batch", epoch, number, places, made, dropped, large, state):
                worker.seen.meet(made, dropped, message.descriptors)
                buffers = worker.seen.views(places, message.arrays)
                pickled = buffers.pop() if large else message.body
                try:
                    data = parcels.unpack(pickled, buffers)
                except Exception as error:
                    data = _unreadable(worker.number, error)
                return Result(worker.number, epoch, number, data, state)
            case (_, epoch, number):
                return Result(worker.number, epoch, number, ended=True)
        raise RuntimeError(f"DataLoader worker {worker.number} sent {message.head!r}: is it of this version?")

    def _look_after(self) -> None:
        """Of a worker that has died, a process that it started may still have the socket."""
        for worker in self._workers:
            if not worker.stopped and not worker.process.is_alive():
                raise RuntimeError(_death(worker))

    def close(self) -> None:
        self._end()

    def forget(self) -> None:
        """In a fork: close this side, but for the end that belongs to the worker which the fork may be."""
        for worker in self._workers:
            worker.connection.close()
        self._end.detach()


def _unreadable(worker: int, error: Exception) -> ExceptionWrapper:
    said = (
        f"A batch of DataLoader worker process {worker} cannot be unpickled here: {type(error).__name__}: {error}\n"
        f"{traceback.format_exc()}"
    )
    wrapper = ExceptionWrapper((RuntimeError, RuntimeError(said), None))
    wrapper.exc_msg = said
    return wrapper


def _death(worker: _Worker) -> str:
    """In PyTorch's words."""
    worker.process.join(_STOP_SECONDS)
    pid, code = worker.process.pid, worker.process.exitcode
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


def _end(workers: list[_Worker], selector: selectors.BaseSelector, owner: int) -> None:
    """Tell all to stop, wait until they have, end those that do not."""
    if os.getpid() != owner:
        return
    for worker in workers:
        # Reaches the worker even if a fork of this process has the socket too.
        with contextlib.suppress(OSError):
            worker.connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + _STOP_SECONDS
    for worker in workers:
        if worker.process is not None and worker.process.pid is not None:
            worker.process.join(max(deadline - time.monotonic(), 0))
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join(_STOP_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(_STOP_SECONDS)
    for worker in workers:
        worker.connection.close()
        worker.theirs.close()
    workers.clear()
    selector.close()


_living: "weakref.WeakSet[ProcessWorkers]" = weakref.WeakSet()


def _forget_after_fork() -> None:
    """A fork has the sockets too: it must not keep workers alive whose loader is gone."""
    for workers in list(_living):
        workers.forget()


os.register_at_fork(after_in_child=_forget_after_fork)
