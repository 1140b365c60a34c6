"""What every worker process does: listen to its parent process, and end when that closes the connection or dies."""

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
    """A worker's end of the connection. A thread reads the messages, so that senders never wait long, and so that the
    process ends with its parent even while it is busy.
    """

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
        """Send a message, from any thread. The descriptors are closed when they are sent."""
        message = wire.encode(head, body, 0 if arrays is None else len(arrays), codec=self._codec)
        # An exception from a signal would cut off the message here, and all later ones would be lost.
        with self._sending, signals_wait():
            try:
                wire.send_all(self._connection, message, descriptors)
                if arrays is not None:
                    self._connection.sendall(arrays, wire.NO_SIGNAL)
            except OSError:
                self._leave()

    def close(self) -> None:
        """In a fork, close the connection, which belongs to the original process."""
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
    """Pass each message to `accept`, until the other side closes the connection or the parent is gone."""
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
    """Block the signals whose handlers raise exceptions: Ctrl-C, and PyTorch's for the death of a worker."""
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
    """The first thing that a worker calls, with its command-line arguments from `WorkerProcess`.

    `leave` ends the worker when the parent closes the connection or is gone.
    """
    descriptor, stacks, parent = map(int, arguments)
    if ignore_ctrl_c:
        # Only the parent handles Ctrl-C. It was blocked until now, so that it cannot hit a worker that is starting.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for inherited in (descriptor, stacks):
        os.set_inheritable(inherited, False)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _give_back_search_path()
    return Link(socket.socket(fileno=descriptor), codec, parent, leave)


def _give_back_search_path() -> None:
    """Restore the user's PYTHONPATH, which was replaced so that this process finds its modules."""
    os.environ.pop("PYTHONPATH", None)
    if (own := os.environ.pop(LENT_SEARCH_PATH, None)) is not None:
        os.environ["PYTHONPATH"] = own


def flush_output() -> None:
    """Flush the output before each answer, since workers end without the clean-up of the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
