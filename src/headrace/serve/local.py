"""Processes of the training machine that make batches like one more server.

They run the same service, in a thread of this process, and its answers do not travel. They take only as many batches as
leave the processor below the share from which the thread that launches kernels has to wait for a core.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.errors import HeadraceError
from headrace.observe.host import CpuClock, read_cpu_clock
from headrace.observe.rules.cpu_use import CPU_NOTE
from headrace.serve.connection import Events
from headrace.serve.messages import Answer, Reply, Request
from headrace.serve.result import Result
from headrace.serve.service import Service, ServiceSettings
from headrace.serve.session import Session
from headrace.serve.worker import Served

_MEMORY_BYTES = 2**28
_LOOK_SECONDS = 0.5
_ENOUGH = 0.75 * CPU_NOTE
"""Below this share there is room for another batch."""


@dataclass
class Local:
    """How batches are made on this machine."""

    served: Served
    workers: int
    is_fallback: bool = False
    """Whether they begin only when no server is there."""
    may_help_out: bool = False
    """Whether they may use all cores when no server is there."""
    read_clock: Callable[[], CpuClock] | None = None
    _clock: CpuClock | None = field(default=None, init=False)
    _looked_at: float = field(default=0.0, init=False)
    _most: int = field(default=0, init=False)

    def most_tickets(self) -> int | None:
        """How many batches may be made at the same time, by how busy the processor was lately."""
        if self.is_fallback:
            return None
        now = time.monotonic()
        if self._clock is None or now - self._looked_at >= _LOOK_SECONDS:
            clock, self._looked_at = (self.read_clock or read_cpu_clock)(), now
            share = 0.0 if self._clock is None else clock.share_since(self._clock)
            self._clock = clock
            if share > CPU_NOTE:
                self._most = max(0, self._most - 1)
            elif share < _ENOUGH:
                self._most = min(self.workers, self._most + 1)
        return self._most

    def connect(self, events: Events) -> "LocalConnection":
        return LocalConnection(self.served, self.workers, events)


class LocalConnection:
    """A service in a thread, as a connection."""

    def __init__(self, served: Served, workers: int, events: Events) -> None:
        self._served, self._workers, self._events = served, workers, events
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: Service | None = None
        self._session = Session("this process", self._send, is_trusted=True)
        self._stop: asyncio.Event | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="headrace-local-workers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, requests: Sequence[Request]) -> None:
        self._post(self._receive, requests)

    def tick(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._is_closed = True
        self._post(self._set_stop)

    def end(self) -> None:
        self.close()

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(function, *arguments)
            except RuntimeError:
                return  # it has ended in between

    def _run(self) -> None:
        reason = "the local workers have ended"
        try:
            asyncio.run(self._serve())
        except (HeadraceError, OSError) as error:
            reason = str(error)
        if not self._is_closed:
            self._events.lost(reason)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        settings = ServiceSettings(workers=self._workers, memory_bytes=_MEMORY_BYTES)
        self._service = Service(self._served, settings)
        try:
            if self._is_closed:
                return
            await self._service.start()
            self._service.connect(self._session)
            self._receive([self._events.hello()])
            await self._stop.wait()
        finally:
            self._service.close()

    def _set_stop(self) -> None:
        if self._stop is not None:
            self._stop.set()

    def _receive(self, requests: Sequence[Request]) -> None:
        if self._service is not None:
            for request in requests:
                self._service.receive(self._session, request)

    def _send(self, reply: Reply, result: Result | None) -> None:
        if result is None or not isinstance(reply, Answer):
            self._events.reply(reply)
            return
        place = self._events.place(reply)
        if place is not None:
            np.copyto(place, result.body)
        result.let_go()
        self._events.answers([(reply, place)])
