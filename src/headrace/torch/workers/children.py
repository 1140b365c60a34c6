"""Starting worker processes, and how they ended.

By fork, each worker is a child of this process. By spawn or forkserver, PyTorch starts one fresh interpreter after
the other, and each imports everything and is sent the dataset. Here there is one fresh interpreter, the nursery, which
imports everything once and then forks; each worker opens the dataset for itself, from memory that they share:

    this process ── spawn ──► nursery: imports torch and the user's script ── fork ──► worker 0, worker 1, ...

The workers have nothing of this process in them, no locks, threads or CUDA contexts: that is what people choose
spawn for. Should the user's script start threads while it is imported, the nursery spawns the workers instead.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace.torch.workers import payload, process
from headrace.torch.workers.job import Job, alone_with_pipes
from headrace.workers import wire
from headrace.workers.worker import flush_output, listen

_STOP_SECONDS = 5.0
_KILLED_SECONDS = 60.0
"""A process that was killed is gone as soon as the kernel comes to it; on a busy machine that may take a while."""
_START_SECONDS = 300.0
_JOIN_SLICE_SECONDS = 0.1
_CANNOT_PICKLE = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)


class Children(Protocol):
    """Worker processes, by number."""

    def pid(self, worker: int) -> int | None: ...

    def processes(self) -> Sequence[Any]:
        """One for each worker, with `pid`, `is_alive()`, `terminate()` and `kill()`."""

    def exit_code(self, worker: int) -> int | None:
        """As multiprocessing counts: negative if a signal ended it; None if it is still there after some seconds."""

    def ended(self) -> Sequence[int]:
        """Those that are not there any more."""

    def forget(self) -> None:
        """In a fork of the process whose children they are: let go of what it shares with that."""

    def end(self) -> None:
        """They were told; wait until they have ended, and end those that do not."""


def start_children(context: Any, job: Job, sockets: Sequence[socket.socket]) -> Children:
    if context.get_start_method() == "fork":
        return OwnChildren(context, _Given(job), sockets)
    with alone_with_pipes(job.dataset):
        sealed = payload.seal(job)
    if sealed is None:
        # What can only be pickled for one process at a time, or not at all, as will show.
        return OwnChildren(context, _Given(job), sockets)
    try:
        return NurseryChildren(context, sealed, sockets)
    finally:
        sealed.close()


class _Given:
    """A job that needs no unpacking."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self) -> Job:
        return self._job


class OwnChildren:
    def __init__(
        self,
        context: Any,
        give_job: Callable[[], Job],
        sockets: Sequence[socket.socket],
        inherited: Sequence[socket.socket] = (),
    ) -> None:
        """`inherited`: what a fork of this process has open and must not."""
        forks = context.get_start_method() == "fork"
        self._processes: list[Any] = []
        try:
            for number, connection in enumerate(sockets):
                # With a worker's socket open in another one, nobody would notice its end.
                close = [*inherited, *sockets[number + 1 :]] if forks else []
                child = context.Process(
                    target=process.run, args=(connection, give_job, number, close), daemon=True
                )
                child.start()
                self._processes.append(child)
                connection.close()
        except (TypeError, AttributeError, pickle.PicklingError):
            warnings.warn(_CANNOT_PICKLE, stacklevel=2)
            self.end()
            raise
        except BaseException:
            self.end()
            raise

    def pid(self, worker: int) -> int | None:
        pid: int | None = self._processes[worker].pid
        return pid

    def processes(self) -> Sequence[Any]:
        return self._processes

    def exit_code(self, worker: int) -> int | None:
        _wait_for(self._processes[worker], _STOP_SECONDS)
        code: int | None = self._processes[worker].exitcode
        return code

    def ended(self) -> Sequence[int]:
        return [number for number, child in enumerate(self._processes) if not _is_alive(child)]

    def forget(self) -> None:
        pass

    def end(self, *, at_once: bool = False) -> None:
        steps: list[tuple[Callable[[Any], object], float]] = [
            (lambda child: None, _STOP_SECONDS),
            (lambda child: child.terminate(), _STOP_SECONDS),
            (lambda child: child.kill(), _KILLED_SECONDS),
        ]
        for ask, seconds in steps[-1:] if at_once else steps:
            left = [child for child in self._processes if _is_alive(child)]
            for child in left:
                ask(child)
            deadline = time.monotonic() + seconds
            for child in left:
                _wait_for(child, deadline - time.monotonic())
        for child in self._processes:
            _let_go(child)


class NurseryChildren:
    def __init__(self, context: Any, sealed: payload.Sealed, sockets: Sequence[socket.socket]) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(_START_SECONDS)
        self._inbox = wire.Inbox(self._connection)
        self._nursery = context.Process(
            target=keep_nursery, args=(theirs, sealed, list(sockets)), daemon=True
        )
        self._pids: tuple[int, ...] | None = None
        self._count = len(sockets)
        try:
            self._nursery.start()
        finally:
            for connection in (theirs, *sockets):
                connection.close()

    def pid(self, worker: int) -> int | None:
        if self._pids is None:
            try:
                # The first thing that it says.
                self._pids = self._hear()
            except (EOFError, OSError):
                pid: int | None = self._nursery.pid
                return pid
        return self._pids[worker]

    def processes(self) -> Sequence[Any]:
        return [NurseryChild(self, worker) for worker in range(self._count)]

    def exit_code(self, worker: int) -> int | None:
        self.pid(worker)
        code: int | None
        try:
            self._connection.sendall(wire.encode(("how", worker)), wire.NO_SIGNAL)
            code = self._hear()[0]
        except (EOFError, OSError):
            # The nursery itself is gone, and its workers with it.
            _wait_for(self._nursery, _STOP_SECONDS)
            code = self._nursery.exitcode
        return code

    def _hear(self) -> tuple[Any, ...]:
        while True:
            if message := self._inbox.receive():
                head: tuple[Any, ...] = message.head
                return head

    def ended(self) -> Sequence[int]:
        self.pid(0)
        try:
            self._connection.sendall(wire.encode(("ended",)), wire.NO_SIGNAL)
            return self._hear()
        except (EOFError, OSError):
            return range(self._count)

    def forget(self) -> None:
        self._connection.close()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(wire.encode(("end",)), wire.NO_SIGNAL)
            self._connection.shutdown(socket.SHUT_RDWR)
        # It waits for its workers, and ends those that do not.
        _wait_for(self._nursery, 4 * _STOP_SECONDS + _KILLED_SECONDS)
        if _is_alive(self._nursery):
            self._nursery.kill()
            _wait_for(self._nursery, _KILLED_SECONDS)
        _let_go(self._nursery)
        self._connection.close()


class NurseryChild:
    """A worker that another process has started, with what `multiprocessing.Process` says and does of one."""

    def __init__(self, children: NurseryChildren, worker: int) -> None:
        self._children, self._worker = children, worker

    @property
    def pid(self) -> int | None:
        return self._children.pid(self._worker)

    @property
    def exitcode(self) -> int | None:
        return None if self.is_alive() else self._children.exit_code(self._worker)

    def is_alive(self) -> bool:
        return self._worker not in self._children.ended()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        # Not once it has ended, when its number may be another process's.
        if self.pid is not None and self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _wait_for(child: Any, seconds: float) -> None:
    """As `join`, but not deceived by a process that the child has started, and that has what `join` waits for."""
    deadline = time.monotonic() + seconds
    while _is_alive(child) and (left := deadline - time.monotonic()) > 0:
        child.join(min(left, _JOIN_SLICE_SECONDS))


def _is_alive(child: Any) -> bool:
    """As its own method, which says so for ever if Ctrl-C came just when it was told that the child has ended."""
    if not child.is_alive():
        return False
    try:
        os.kill(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _let_go(child: Any) -> None:
    """Close the pipes of a child that has ended. Multiprocessing keeps them open for ever, and the child in its list of
    those that live, if Ctrl-C came just when it was told of the end."""
    if not _is_alive(child):
        child._popen.close()
        multiprocessing.process._children.discard(child)  # type: ignore[attr-defined]


def keep_nursery(
    connection: socket.socket, give_job: Callable[[], Job], sockets: list[socket.socket]
) -> None:
    """What runs in the nursery: it answers how its workers have ended, until the loader hangs up."""
    # A daemon may not have children, lest they outlive it; these end when it does.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    clean = threading.active_count() == 1
    context = multiprocessing.get_context("fork" if clean else "spawn")
    children = OwnChildren(context, give_job, sockets, [connection])
    was_told = False
    try:
        connection.sendall(wire.encode(tuple(children.pid(number) for number in range(len(sockets)))))

        def answer(message: wire.Message) -> None:
            match message.head:
                case ("end",):
                    nonlocal was_told
                    was_told = True
                case ("ended",):
                    connection.sendall(wire.encode(tuple(children.ended())), wire.NO_SIGNAL)
                case ("how", worker):
                    connection.sendall(wire.encode((children.exit_code(worker),)), wire.NO_SIGNAL)

        listen(connection, os.getppid(), answer)
    except (EOFError, OSError, KeyboardInterrupt):
        # The loader has hung up, or its process is gone; Ctrl-C reaches that too, which tells the user.
        pass
    except Exception:
        # Nobody else would say it: to the loader this looks as if its workers had died.
        traceback.print_exc()
    finally:
        # If the loader's process is gone, nobody waits for what its workers are doing.
        children.end(at_once=not was_told)
        flush_output()
        # Nothing is left to clean up, and an interpreter with torch takes seconds to end on a busy machine.
        os._exit(0)
