"""Servers for tests: in a thread of this process, with worker processes and sockets, or as the command."""

import asyncio
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.serve.figures import state_of
from headrace.serve.flight_server import FlightListener
from headrace.serve.service import Service, ServiceSettings
from headrace.serve.unix_server import UnixListener
from headrace.serve.worker import Served

SECONDS = 120
"""Longer than anything takes on a busy machine."""


class ThreadServer:
    """A server in a thread: its service can be looked at."""

    def __init__(self, served: Served, folder: Path, **settings: Any) -> None:
        chosen = {"workers": 1, "memory_bytes": 2**26, **settings}
        self._served, self._settings = served, ServiceSettings(**chosen)
        self.loader = served.loader
        self._path = str(folder / f"s{os.urandom(4).hex()}")
        self._started: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.unix, self.grpc = f"unix://{self._path}", ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        error = self._started.get(timeout=SECONDS)
        if error is not None:
            raise error

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.service = Service(self._served, self._settings)
        try:
            await self.service.start()
            self.seen: list[Any] = []
            """All clients that there were."""
            connect = self.service.connect
            self.service.connect = lambda client: self.seen.append(client) or connect(client)  # type: ignore
            unix = UnixListener(self.service, self._path)
            flight = FlightListener(self.service, "127.0.0.1", 0)
        except Exception as error:
            self.service.close()
            self._started.put(error)
            return
        self.grpc = flight.address
        self._started.put(None)
        await self._stop.wait()
        unix.close()
        flight.close()
        self.service.close()

    def state(self) -> dict[str, Any]:
        return self.call(lambda: state_of(self.service))

    def call(self, function: Any) -> Any:
        """Call something in the server's loop."""

        async def called() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(SECONDS)

    def close(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(SECONDS)


def all_are_let_go(server: ThreadServer) -> bool:
    """Whether no result is held for a client. Called in the server's loop."""
    return all(result._holds == 1 for result in server.service.results._results.values())


@contextlib.contextmanager
def thread_server(served: Served, folder: Path, **settings: Any) -> Iterator[ThreadServer]:
    server = ThreadServer(served, folder, **settings)
    try:
        yield server
    finally:
        server.close()


class CommandServer:
    """`headrace serve` in a process of its own, which can be killed and stopped."""

    def __init__(self, target: str, *options: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "headrace", "serve", target, *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._seen = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._seen:
                self.lines.append(line.rstrip())
                self._seen.notify_all()
        with self._seen:
            self.lines.append("the end of its output")
            self._seen.notify_all()

    def wait_for(self, pattern: str) -> str:
        """Wait until a line has the pattern, and return the part in brackets."""
        with self._seen:
            while True:
                for line in self.lines:
                    if found := re.search(pattern, line):
                        return found[1]
                assert "the end of its output" not in self.lines, self.lines
                assert self._seen.wait(SECONDS), self.lines

    def address(self, scheme: str = "grpc") -> str:
        return self.wait_for(rf"({re.escape(scheme)}://\S+)")

    def output(self) -> str:
        self.process.wait(SECONDS)
        with self._seen:
            while "the end of its output" not in self.lines:
                assert self._seen.wait(SECONDS)
            return "\n".join(self.lines)

    def signal(self, number: int) -> None:
        """To the server and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.wait(SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> "CommandServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def assert_equal_values(here: Any, there: Any) -> None:
    """Bit for bit: the same types, shapes and values."""
    assert type(here) is type(there)
    if isinstance(here, np.ndarray):
        assert (here.dtype, here.shape) == (there.dtype, there.shape)
        assert here.tobytes() == there.tobytes()
    elif isinstance(here, np.generic):
        assert here.tobytes() == there.tobytes()
    else:
        assert here == there


def assert_equal_batches(here: Any, there: Any) -> None:
    assert list(here) == list(there)
    assert here.info == there.info
    for name in here:
        assert_equal_values(here[name], there[name])
