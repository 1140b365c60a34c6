"""A worker in a fresh interpreter, as the process that started it sees it.

    worker = WorkerProcess("headrace.ingest.worker", CODEC)
    worker.send(Setup(...))
    for message in worker.receive(): ...      # never waits; `connection` can be given to a selector
    worker.death()                            # "was killed by SIGSEGV"

The worker has a socket for messages (`wire.py`) and a file for its stacks, and ends when the socket is closed
(`worker.py`). This module has what every user of workers needs: starting them, when each last gave a sign of life, what
a hanging worker is doing, how a worker died and what it printed last.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.workers import wire
from headrace.workers.ending import end_all, ending

LENT_SEARCH_PATH = "HEADRACE_LENT_PYTHONPATH"
"""The variable that holds the user's own PYTHONPATH while a worker starts with a different one."""
clock = time.monotonic
"""The clock, in seconds, by which silence is measured."""
_STACK_SECONDS = 5.0
_STACK_ENDED_SECONDS = 1.0
"""A stack is complete if nothing was added to it for this long."""
_LAST_LINES = 12


class WorkerProcess:
    def __init__(
        self,
        module: str,
        codec: wire.Codec = wire.PICKLE,
        *,
        environment: Mapping[str, str] | None = None,
        keep_output: bool = False,
        own_session: bool = False,
    ) -> None:
        """Start `python -m module`, which must call `worker.attach`.

        With `keep_output`, its output is kept for `last_words` and not shown. With `own_session`, Ctrl-C does not reach
        it, and the processes that it starts can be ended with it.
        """
        self._codec, self._owner, self._own_session = codec, os.getpid(), own_session
        self.heard_at = clock()
        """When it last gave a sign of life."""
        self._output: int | None = wire.anonymous_file() if keep_output else None
        self.connection, theirs = socket.socketpair()
        self._stacks = wire.anonymous_file()
        try:
            self.process = self._start(module, theirs.fileno(), environment or {})
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
        self.connection.setblocking(False)
        self._inbox = wire.Inbox(self.connection, codec=codec)
        self._outbox = wire.Outbox(self.connection)

    def _start(self, module: str, theirs: int, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        descriptors = [theirs, self._stacks]
        numbers = [str(number) for number in (*descriptors, os.getpid())]
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        variables = {**os.environ, **environment, **_search_path()}
        return subprocess.Popen(
            # -P: it imports what this process would, and nothing else from the working directory.
            [sys.executable, *flags, "-P", "-m", module, *numbers],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=descriptors,
            start_new_session=self._own_session,
            env=variables,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_unsent(self) -> bool:
        """Whether something is left to send, with `flush`, once the connection accepts more."""
        return bool(self._outbox)

    def send(self, head: Any, body: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send a message without waiting: `flush` sends the rest later. The descriptors are closed when sent."""
        self._outbox.send(wire.encode(head, body, codec=self._codec), descriptors)

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        with contextlib.suppress(OSError):
            self.process.send_signal(number)

    def flush(self) -> None:
        self._outbox.flush()

    def receive(self) -> Iterator[wire.Message]:
        """The messages received so far. Raises EOFError or ConnectionError when the connection is closed."""
        while True:
            try:
                message = self._inbox.receive()
            except BlockingIOError:
                return
            self.heard_at = clock()
            if message is not None:
                yield message

    def is_running(self) -> bool:
        return self.process.poll() is None

    def death(self) -> str:
        """How it ended: "was killed by SIGSEGV"."""
        return ending(self.process)

    def output(self) -> str:
        """All that it has printed so far, if that is kept."""
        return "" if self._output is None else _content(self._output)

    def last_words(self) -> str:
        """The last lines that it printed."""
        lines = self.output().strip().splitlines()[-_LAST_LINES:]
        return "\n".join(["its last lines:", *lines]) if lines else ""

    def stack(self) -> str:
        """The stacks of its threads, if it answers soon: its fault handler writes them into a shared file."""
        self.signal(signal.SIGUSR1)
        size, changed_at = 0, time.monotonic()
        deadline = changed_at + _STACK_SECONDS
        while time.monotonic() < deadline and self.is_running():
            time.sleep(0.02)
            before, size = size, os.fstat(self._stacks).st_size
            if size != before:
                changed_at = time.monotonic()
            elif size and time.monotonic() > changed_at + _STACK_ENDED_SECONDS:
                break
        return _content(self._stacks) or "(its stack is not available)\n"

    def hang_up(self) -> None:
        """Tell it to end. In a fork of the process that started it, only close the connection."""
        if os.getpid() == self._owner:
            # Reaches the worker even if a fork of this process has the socket too.
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        self._outbox.close()
        self._close()

    def _close(self) -> None:
        self.connection.close()
        if self._stacks >= 0:
            os.close(self._stacks)
            self._stacks = -1
        if self._output is not None:
            os.close(self._output)
            self._output = None


def end_workers(workers: Sequence[WorkerProcess], owner: int) -> None:
    """Close the connections, which ends the workers; kill those that take too long; reap them all.

    A fork only closes the connections.
    """
    for worker in workers:
        worker.hang_up()
    if os.getpid() == owner:
        end_all(worker.process for worker in workers)


@contextlib.contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Block Ctrl-C while workers start: they inherit this, and it would hit them before they can ignore it."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _search_path() -> dict[str, str]:
    """The search path of this process for a worker, which restores the user's own variable once it has started."""
    home = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join([*(path or os.getcwd() for path in sys.path), home])
    own = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": search} | ({} if own is None else {LENT_SEARCH_PATH: own})


def _content(descriptor: int) -> str:
    """All of a file, without moving the position at which the worker writes."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
