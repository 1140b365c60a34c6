"""What every worker process does: it listens to the process that started it, and ends when that hangs up or dies."""

import contextlib
import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from headrace.workers import wire
from headrace.workers.ending import is_orphan
from headrace.workers.process import LENT_SEARCH_PATH

_PARENT_CHECK_MILLISECONDS = 1000


class Link:
    """A worker's end of the conversation. Messages are read by a thread, so whoever sends them never waits long, and
    the process ends with its parent even while it is busy."""

    def __init__(
        self, connection: socket.socket, codec: wire.Codec, parent: int, leave: Callable[[], object]
    ) -> None:
        self._connection, self._codec, self._leave = connection, codec, leave
        self.messages: queue.SimpleQueue[wire.Message] = queue.SimpleQueue()
        self._sending = threading.Lock()
        threading.Thread(target=self._read, args=(parent,), name="headrace-messages", daemon=True).start()

    def send(
        self,
        head: object,
        body: bytes = b"",
        arrays: memoryview | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """From any thread, one message after the other. The descriptors are closed when they are sent."""
        message = wire.encode(head, body, 0 if arrays is None else len(arrays), codec=self._codec)
        # An exception that a signal raises in here would cut the message off, and all that follow would be lost.
        with self._sending, signals_wait():
            try:
                wire.send_all(self._connection, message, descriptors)
                if arrays is not None:
                    self._connection.sendall(arrays, wire.NO_SIGNAL)
            except OSError:
                self._leave()

    def close(self) -> None:
        """In a fork: let go of what belongs to the process that it was forked from."""
        self._connection.close()

    def _read(self, parent: int) -> NoReturn:
        try:
            listen(self._connection, parent, self.messages.put, codec=self._codec)
        except BaseException:
            traceback.print_exc()
        self._leave()
        os._exit(0)


def listen(
    connection: socket.socket,
    parent: int,
    accept: Callable[[wire.Message], object],
    *,
    codec: wire.Codec = wire.PICKLE,
) -> None:
    """Hand over message after message, until the other side hangs up or the parent is gone."""
    inbox, waiting = wire.Inbox(connection, codec=codec), select.poll()
    waiting.register(connection, select.POLLIN)
    with contextlib.suppress(EOFError, OSError):
        while True:
            # A process forked from the parent may keep the other end open after the parent is gone.
            if not waiting.poll(_PARENT_CHECK_MILLISECONDS):
                if is_orphan(parent):
                    return
            elif message := inbox.receive():
                accept(message)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Those whose handlers raise exceptions: Ctrl-C, and PyTorch's for the death of a worker."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def attach(
    arguments: list[str],
    codec: wire.Codec = wire.PICKLE,
    *,
    ignore_ctrl_c: bool = True,
    leave: Callable[[], object] = lambda: os._exit(0),
) -> Link:
    """The first thing that a worker calls, with the arguments that `WorkerProcess` gave it. `leave` is how it ends when
    the parent hangs up or is gone."""
    descriptor, stacks, parent = map(int, arguments)
    if ignore_ctrl_c:
        # It is the parent's matter. It was blocked until here so that it cannot hit a worker that starts.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for inherited in (descriptor, stacks):
        os.set_inheritable(inherited, False)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _give_back_search_path()
    return Link(socket.socket(fileno=descriptor), codec, parent, leave)


def _give_back_search_path() -> None:
    """It was lent by environment, so that this process finds its modules; the user's own processes get theirs back."""
    os.environ.pop("PYTHONPATH", None)
    if (own := os.environ.pop(LENT_SEARCH_PATH, None)) is not None:
        os.environ["PYTHONPATH"] = own


def flush_output() -> None:
    """Workers end without the interpreter's own clean-up, so what was printed goes out before each answer."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
