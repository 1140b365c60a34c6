"""What a server does, whichever way its clients are connected: it answers requests for rows.

A result belongs to nobody: it is found by what was asked for, so clients that ask for the same share one, whether it is
waiting, being made, or made. When workers have nothing else to do, they make what clients have said they will ask for.
Results stay until others need their memory.

A service lives in an asyncio loop, and all of its methods are called there.
"""

import asyncio
import hmac
import resource
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError
from headrace.order.steps import described_rows
from headrace.serve import messages
from headrace.serve.counts import ServiceCounts
from headrace.serve.description import Description, encode
from headrace.serve.messages import (
    Answer,
    Ask,
    Cancel,
    Failed,
    Hello,
    Key,
    Leaving,
    Ping,
    Pong,
    Refused,
    Reply,
    Report,
    Reported,
    Request,
    Rows,
    Welcome,
    key_of,
)
from headrace.serve.places import Places
from headrace.serve.pool import Failure, Pool, PoolTask
from headrace.serve.result import Result
from headrace.serve.worker import Served, Task

_LEAST_SEGMENTS, _MOST_SEGMENTS = 8, 4096
"""Clients map those that they have read from, and a process may have some 65,000 maps."""
_TAKES_NOTHING = "this client has not taken the answers that it has"
_OTHER_DESCRIPTORS = 256
"""Those of workers, clients and files."""


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    workers: int
    threads: int = 1
    memory_bytes: int = 2**30
    """How much memory results may take."""
    token: str | None = None
    most_clients: int = 1024
    most_requests: int = 256
    """How many requests of one client may be unanswered."""
    timeout_seconds: float = 600.0


@dataclass(eq=False)
class Session:
    """A client, as the service sees it."""

    name: str
    send: Callable[[Reply, Result | None], None]
    """Sends a reply; a result comes with a hold on it, which the sender lets go when it is sent."""
    is_known: bool = False
    """Whether it has said what it wants, and may have it."""
    is_trusted: bool = False
    """Whether its token was checked already."""
    asked: dict[int, "_Work"] = field(default_factory=dict)
    """What it waits for, by the numbers of its requests."""
    waiting: "deque[_Work]" = field(default_factory=deque)
    coming: "_Coming | None" = None
    unread: int = 0
    """How many answers it has not taken yet."""
    unread_bytes: int = 0
    """The memory that they take."""
    making: int = 0
    """How many batches are being made because it has asked for them."""
    waited: float = 0.0
    answered: int = 0
    sent_bytes: int = 0


@dataclass
class _Coming:
    """What a client is going to ask for."""

    ask: Ask
    steps: deque[int]


@dataclass(eq=False)
class _Work:
    """Something that was asked for, and is not made yet."""

    key: Key
    task: Task
    described: str
    waiters: list[tuple[Session, int, float]] = field(default_factory=list)
    """Who has asked for it, under which number, and when."""
    is_running: bool = False
    maker: "Session | None" = None
    """The client for which it is being made."""
    began_at: float = 0.0


class Service:
    def __init__(self, served: Served, settings: ServiceSettings) -> None:
        self.settings = settings
        self._served = served
        self._loop = asyncio.get_running_loop()
        self.pool = Pool(
            served,
            workers=settings.workers,
            threads=settings.threads,
            timeout_seconds=settings.timeout_seconds,
            ready=self._pump,
        )
        self.sessions: dict[Session, None] = {}
        self._turns: deque[Session] = deque()
        """Clients that have something waiting, in turns."""
        self._works: dict[Key, _Work] = {}
        self._results: OrderedDict[Key, Result] = OrderedDict()
        """Those that are kept, the longest unused first."""
        self.held_bytes = 0
        """The memory of all results, kept or being sent."""
        self._held_segments, self._most_segments = 0, _most_segments()
        self._usual_bytes = 0
        self.counts = ServiceCounts()
        self.is_leaving = False
        self._is_quiet = asyncio.Event()
        self._encoded = b""
        self._places: Places

    async def start(self) -> Description:
        """Wait until the first worker is ready; the error of the user's code if none can start."""
        description = await self.pool.first
        self._encoded, self._places = encode(description), Places(description)
        return description

    @property
    def description(self) -> Description:
        assert self.pool.description is not None
        return self.pool.description

    @property
    def is_ready(self) -> bool:
        """Whether it can answer requests."""
        return not self.is_leaving and self.pool.workers_ready > 0

    # Clients

    def connect(self, session: Session) -> bool:
        """Whether there is room for another client."""
        if len(self.sessions) >= self.settings.most_clients:
            session.send(Refused(f"the server has {len(self.sessions)} clients already"), None)
            return False
        self.sessions[session] = None
        return True

    def disconnect(self, session: Session) -> None:
        if session not in self.sessions:
            return
        del self.sessions[session]
        for number in list(session.asked):
            self._cancel(session, number)
        for work in session.waiting:
            if work.waiters and self._is_due(work):
                # Somebody else waits for it too.
                self._queue(work.waiters[0][0], work)
        session.waiting.clear()
        session.coming = None
        self._look_if_quiet()
        # What it held may be what others need.
        self._loop.call_soon(self._pump)

    def gave(self, session: Session, result: Result) -> None:
        """An answer is on its way to a client."""
        session.unread += 1
        session.unread_bytes += result.held_bytes

    def took(self, session: Session, result: Result) -> None:
        """The client has taken it."""
        session.unread -= 1
        session.unread_bytes -= result.held_bytes
        result.let_go()
        if session.waiting:
            self._loop.call_soon(self._pump)

    def receive(self, session: Session, request: Request) -> None:
        """A ProtocolError if the client should be disconnected."""
        if session not in self.sessions:
            raise messages.ProtocolError("a client that was refused")
        if isinstance(request, Hello):
            if session.is_known:
                raise messages.ProtocolError("a client that says hello again")
            self._greet(session, request)
        elif not session.is_known:
            raise messages.ProtocolError("a client that has not said what it wants")
        elif isinstance(request, Ask):
            self._accept(session, request)
        elif isinstance(request, Cancel):
            self._cancel(session, request.id)
        elif isinstance(request, Ping):
            session.send(Pong(request.id), None)
        elif isinstance(request, Report):
            done = partial(self._report, session, request.id)
            self._give(PoolTask(None, done, "the packing report"))
        else:
            raise messages.ProtocolError("a message for a connection of another kind")

    def _greet(self, session: Session, hello: Hello) -> None:
        if hello.version != messages.VERSION:
            said = f"it speaks version {messages.VERSION}, and this client version {hello.version}"
            session.send(Refused(f"{said}; install the same version of headrace on both"), None)
        elif not session.is_trusted and not self._is_right(hello.token):
            self.counts.refused += 1
            session.send(Refused("the token is not the right one; give token= that of the server"), None)
        elif hello.fingerprint not in (None, self.description.fingerprint):
            session.send(Refused("it serves other rows", self._encoded), None)
        else:
            session.is_known = True
            described = self._encoded if hello.fingerprint is None else b""
            fingerprint = self.description.fingerprint
            session.send(Welcome(messages.VERSION, fingerprint, described, self.pool.slots), None)
            if self.is_leaving:
                session.send(Leaving(), None)

    def _is_right(self, token: str | None) -> bool:
        expected = self.settings.token
        # In constant time, so that nobody can find it out letter by letter.
        return expected is None or hmac.compare_digest((token or "").encode(), expected.encode())

    # Requests

    def _accept(self, session: Session, ask: Ask) -> None:
        at = self._loop.time()
        self.counts.asked += 1
        session.waited = ask.waited
        if self.is_leaving:
            self._refuse(session, ask.id, "the server is ending")
            return
        pending = len(session.asked) + session.unread
        if ask.id in session.asked or pending >= self.settings.most_requests:
            self._refuse(session, ask.id, f"{pending} requests of this client are unanswered or unread")
            return
        try:
            positions = self._places.positions(ask, ask.rows)
        except HeadraceError as error:
            session.send(Failed(ask.id, type(error).__name__, str(error), elsewhere=False), None)
            return
        session.coming = _Coming(ask, deque(ask.ahead)) if ask.ahead else None
        key = key_of(positions, ask.fields, ask.stages)
        result = self._results.get(key)
        if result is not None and self._has_its_share(session):
            self._refuse(session, ask.id, _TAKES_NOTHING)
        elif result is not None:
            self._results.move_to_end(key)
            self.counts.found += 1
            self._answer(session, ask.id, result, 0.0, 0.0)
        else:
            self._wait_for(session, ask, key, positions, at)
        self._pump()

    def _wait_for(
        self, session: Session, ask: Ask, key: Key, positions: range | NDArray[np.int64], at: float
    ) -> None:
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = _Work(key, _task(ask, ask.rows), described_rows(positions))
        else:
            self.counts.shared += 1
        if not work.is_running:
            # Also if it waits already: the turn of this client may come first.
            self._queue(session, work)
        work.waiters.append((session, ask.id, at))
        session.asked[ask.id] = work

    def _queue(self, session: Session, work: _Work) -> None:
        if not session.waiting:
            self._turns.append(session)
        session.waiting.append(work)

    def _refuse(self, session: Session, number: int, reason: str) -> None:
        session.send(Failed(number, "StageError", reason, elsewhere=True), None)

    def _cancel(self, session: Session, number: int) -> None:
        work = session.asked.pop(number, None)
        if work is None:
            return
        work.waiters = [each for each in work.waiters if each[:2] != (session, number)]
        if not work.waiters and not work.is_running:
            # Those that wait are looked at when their turn comes.
            self._works.pop(work.key, None)

    # Making

    def _pump(self) -> None:
        """Give workers what is waiting, and then what is going to be asked for."""
        while self.pool.free > 0 and self._has_room():
            work = self._next_waiting() or self._next_coming()
            if work is None:
                return
            work.is_running, work.began_at = True, self._loop.time()
            self.pool.give(PoolTask(work.task, partial(self._finish, work), work.described))

    def _give(self, task: PoolTask) -> None:
        if self.pool.free > 0:
            self.pool.give(task)
        else:
            task.done(Failure("StageError", "all workers are busy", elsewhere=True))

    def _next_waiting(self) -> _Work | None:
        """Clients take turns, however much each has asked for."""
        passed_over: list[Session] = []
        found = None
        while found is None and self._turns:
            session = self._turns.popleft()
            if self._has_its_share(session):
                passed_over.append(session)
                continue
            work = session.waiting.popleft() if session.waiting else None
            if session.waiting:
                self._turns.append(session)
            if work is not None and self._is_due(work):
                work.maker, found = session, work
                session.making += 1
        self._turns.extend(passed_over)
        return found

    def _has_its_share(self, session: Session) -> bool:
        """Whether the answers that a client has not taken are enough, so that others can go on if it never does."""
        has = session.unread_bytes + session.making * self._usual_bytes
        share = self.settings.memory_bytes // (len(self.sessions) + 1)
        return has > 0 and has + self._usual_bytes > share

    def _is_due(self, work: _Work) -> bool:
        """Whether it is still to be made: its clients may have left, or it was made ahead."""
        return self._works.get(work.key) is work and not work.is_running

    def _next_coming(self) -> _Work | None:
        if self.is_leaving:
            return None
        for session in list(self.sessions):
            coming = None if self._has_its_share(session) else session.coming
            while coming is not None and coming.steps:
                rows = Rows(coming.ask.rows.path, coming.steps.popleft())
                try:
                    positions = self._places.positions(coming.ask, rows)
                except HeadraceError:
                    break  # nobody will ask for that
                key = key_of(positions, coming.ask.fields, coming.ask.stages)
                if key not in self._works and key not in self._results:
                    self.counts.ahead += 1
                    work = self._works[key] = _Work(key, _task(coming.ask, rows), described_rows(positions))
                    return work
        return None

    def _has_room(self) -> bool:
        """Whether there is memory for another result, once those that nobody has asked for lately are dropped."""
        while self._results and not self._fits_another():
            _, oldest = self._results.popitem(last=False)
            oldest.let_go()
        # If nothing is held or made, there is room for one, however large it is.
        is_idle = not self.held_bytes and not self.pool.running
        return is_idle or self._fits_another()

    def _fits_another(self) -> bool:
        if not self._usual_bytes and self.pool.running:
            # The first result shows how large they are.
            return False
        coming = self.pool.running + 1
        has_memory = self.held_bytes + coming * self._usual_bytes <= self.settings.memory_bytes
        return has_memory and self._held_segments + coming <= self._most_segments

    def _finish(self, work: _Work, outcome: Result | Failure) -> None:
        if self._works.get(work.key) is work:
            del self._works[work.key]
        if work.maker is not None:
            work.maker.making -= 1
        if isinstance(outcome, Failure):
            self.counts.failed += 1
            for session, number, _ in work.waiters:
                session.asked.pop(number, None)
                session.send(Failed(number, outcome.kind, outcome.message, outcome.elsewhere), None)
            self._look_if_quiet()
            return
        self.counts.made += 1
        self.counts.made_seconds += outcome.made_seconds
        self._keep(work.key, outcome)
        for session, number, asked_at in work.waiters:
            session.asked.pop(number, None)
            if session is not work.maker and self._has_its_share(session):
                # Somebody else needs it, and this client would hold its memory.
                self._refuse(session, number, _TAKES_NOTHING)
                continue
            queued = max(0.0, work.began_at - asked_at)
            self._answer(session, number, outcome, queued, outcome.made_seconds)
        self._look_if_quiet()

    def _keep(self, key: Key, result: Result) -> None:
        size, segments = result.held_bytes, int(result.segment is not None)
        self.held_bytes += size
        self._held_segments += segments
        self._usual_bytes = max(size, self._usual_bytes - self._usual_bytes // 16)
        result.when_freed = partial(self._when_freed, size, segments)
        self._results[key] = result

    def _when_freed(self, size: int, segments: int) -> None:
        self.held_bytes -= size
        self._held_segments -= segments
        self._loop.call_soon(self._pump)

    def _answer(self, session: Session, number: int, result: Result, queued: float, made: float) -> None:
        self.counts.answered += 1
        self.counts.sent_bytes += result.body_bytes
        self.counts.queued_seconds += queued
        session.answered += 1
        session.sent_bytes += result.body_bytes
        answer = Answer(
            number,
            result.head,
            result.body_bytes,
            queued_seconds=queued,
            made_seconds=made,
            spent=result.spent if made else (),
        )
        session.send(answer, result.hold())
        self._look_if_quiet()

    def _report(self, session: Session, number: int, outcome: Result | Failure) -> None:
        if isinstance(outcome, Failure):
            session.send(Failed(number, outcome.kind, outcome.message, outcome.elsewhere), None)
        else:
            session.send(Reported(number, outcome.head), None)

    # The end

    def leave(self) -> None:
        """Take no new requests, and tell all clients."""
        self.is_leaving = True
        for session in list(self.sessions):
            if session.is_known:
                session.send(Leaving(), None)
        self._look_if_quiet()

    async def until_quiet(self) -> None:
        """Wait until everything is answered."""
        await self._is_quiet.wait()

    def _look_if_quiet(self) -> None:
        if self.is_leaving and not any(session.asked for session in self.sessions):
            self._is_quiet.set()

    def close(self) -> None:
        self.pool.close()
        while self._results:
            self._results.popitem()[1].let_go()


def _most_segments() -> int:
    """How many segments may be held: each takes a descriptor, and another one while it is passed to a client."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return _MOST_SEGMENTS
    return min(_MOST_SEGMENTS, max(_LEAST_SEGMENTS, (allowed - _OTHER_DESCRIPTORS) // 2))


def _task(ask: Ask, rows: Rows) -> Task:
    return Task(rows, ask.fields, ask.stages)


def state_of(service: Service) -> dict[str, Any]:
    """What the live view and the metrics show."""
    return {
        "clients": [
            {
                "name": session.name,
                "asked": len(session.asked),
                "answered": session.answered,
                "sent_bytes": session.sent_bytes,
                "waited": session.waited,
            }
            for session in service.sessions
            if session.is_known
        ],
        "workers": service.settings.workers,
        "workers_ready": service.pool.workers_ready,
        "worker_deaths": service.pool.deaths,
        "slots": service.pool.slots,
        "running": service.pool.running,
        "held_bytes": service.held_bytes,
        "memory_bytes": service.settings.memory_bytes,
        "is_ready": service.is_ready,
        "is_leaving": service.is_leaving,
        **service.counts.to_json(),
    }
