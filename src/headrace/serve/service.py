"""What a server does, whichever way its clients are connected: it answers requests for rows.

A result belongs to nobody: it is found by what was asked for, so clients that ask for the same share one, whether it is
being made or is there already. What is not there waits in the line of its client, and the clients take turns. A client
whose answers use up its share of the memory, because it does not take them, is passed over, and disconnected when it
has taken nothing for half a minute. When workers have nothing else to do, they make what clients have said they will
ask for.

A service lives in an asyncio loop, and all of its methods are called there.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial

from headrace.errors import HeadraceError
from headrace.order.steps import described_rows
from headrace.serve import messages
from headrace.serve.counts import ServiceCounts
from headrace.serve.description import Description, encode
from headrace.serve.kept import KeptResults, most_connections
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
    Report,
    Reported,
    Rows,
    Welcome,
    key_of,
)
from headrace.serve.places import Places
from headrace.serve.pool import Failure, Pool, PoolTask
from headrace.serve.reception import Reception
from headrace.serve.result import Result
from headrace.serve.session import Coming, Request, Session
from headrace.serve.worker import Served, Task

_log = logging.getLogger(__name__)

_MOST_FAILURES_TOLD = 100
_LOOK_SECONDS = 1.0
STUCK_LOOKS = 30
"""A client that takes none of its answers for so long is disconnected. It may connect again, and ask again. Looks are
counted and not seconds, because a server that was paused itself has not given anybody time."""


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
class _Work:
    """What a worker is making."""

    key: Key
    began_at: float
    waiters: list[Request] = field(default_factory=list)


class Service:
    def __init__(self, served: Served, settings: ServiceSettings) -> None:
        self.settings = settings
        self._loop = asyncio.get_running_loop()
        self.pool = Pool(
            served,
            workers=settings.workers,
            threads=settings.threads,
            timeout_seconds=settings.timeout_seconds,
            ready=self._pump,
        )
        self.sessions: dict[Session, None] = {}
        self._turns: OrderedDict[Session, None] = OrderedDict()
        """Clients with requests in their line, the next one first."""
        self._works: dict[Key, _Work] = {}
        self._most_clients = min(settings.most_clients, most_connections())
        self.results = KeptResults(settings.memory_bytes, self._most_clients, freed=self._pump_soon)
        self.counts = ServiceCounts()
        self._failures: set[str] = set()
        """Those that were told."""
        self.is_leaving = False
        self._is_quiet = asyncio.Event()
        self._reception: Reception
        self._places: Places
        self._timer = self._loop.call_later(_LOOK_SECONDS, self._look_after_clients)

    async def start(self) -> Description:
        """Wait until the first worker is ready; the error of the user's code if none can start."""
        description = await self.pool.first
        self._places = Places(description)
        self._reception = Reception(
            token=self.settings.token,
            fingerprint=description.fingerprint,
            described=encode(description),
            slots=self.pool.slots,
            counts=self.counts,
        )
        return description

    @property
    def is_ready(self) -> bool:
        """Whether it can answer requests."""
        return not self.is_leaving and self.pool.workers_ready > 0

    # Clients

    def connect(self, session: Session) -> bool:
        """Whether there is room for another client."""
        if len(self.sessions) >= self._most_clients:
            session.send(Refused(f"the server has {len(self.sessions)} clients already"), None)
            return False
        self.sessions[session] = None
        return True

    def disconnect(self, session: Session) -> None:
        if session not in self.sessions:
            return
        del self.sessions[session]
        for number in list(session.awaited):
            self._cancel(session, number)
        session.line.clear()
        session.coming = None
        self._turns.pop(session, None)
        # What it held may be what others need.
        self._pump_soon()

    def gave(self, session: Session, result: Result) -> None:
        """An answer is on its way to a client."""
        session.unread += 1
        session.unread_bytes += result.held_bytes

    def took(self, session: Session, result: Result) -> None:
        """The client has taken it."""
        session.unread -= 1
        session.unread_bytes -= result.held_bytes
        session.idle_looks = 0
        result.let_go()
        if session.line:
            self._loop.call_soon(self._advance, session)

    def _look_after_clients(self) -> None:
        for session in list(self.sessions):
            session.idle_looks = session.idle_looks + 1 if session.unread else 0
            if session.idle_looks > STUCK_LOOKS:
                self.counts.stuck += 1
                session.drop()
        self._timer = self._loop.call_later(_LOOK_SECONDS, self._look_after_clients)

    def receive(self, session: Session, request: messages.Request) -> None:
        """A ProtocolError if the client should be disconnected."""
        if session not in self.sessions:
            raise messages.ProtocolError("a client that was refused")
        if isinstance(request, Hello):
            self._greet(session, request)
        elif not session.is_known:
            raise messages.ProtocolError("a client that has not said what it wants")
        elif isinstance(request, Ask):
            self._accept(session, request)
        elif isinstance(request, Cancel):
            self._cancel(session, request.id)
        elif isinstance(request, Ping):
            session.waited = request.waited
            session.send(Pong(request.id), None)
        elif isinstance(request, Report):
            done = partial(self._report, session, request.id)
            self._give(PoolTask(None, done, "the packing report"))
        else:
            raise messages.ProtocolError("a message for a connection of another kind")

    def _greet(self, session: Session, hello: Hello) -> None:
        if session.is_known:
            raise messages.ProtocolError("a client that says hello again")
        reply = self._reception.reply_to(hello, is_trusted=session.is_trusted)
        session.is_known = isinstance(reply, Welcome)
        session.send(reply, None)
        if session.is_known and self.is_leaving:
            session.send(Leaving(), None)

    # Requests

    def _accept(self, session: Session, ask: Ask) -> None:
        self.counts.asked += 1
        session.waited = ask.waited
        if self.is_leaving:
            self._refuse(session, ask.id, "the server is ending")
            return
        pending = session.asked + session.unread
        is_known = ask.id in session.line or ask.id in session.awaited
        if is_known or pending >= self.settings.most_requests:
            self._refuse(session, ask.id, f"{pending} requests of this client are unanswered or unread")
            return
        try:
            positions = self._places.positions(ask, ask.rows)
        except HeadraceError as error:
            session.send(Failed(ask.id, type(error).__name__, str(error), elsewhere=False), None)
            return
        session.coming = Coming(ask, deque(ask.ahead)) if ask.ahead else None
        request = Request(
            session,
            ask.id,
            key_of(positions, ask.fields, ask.stages),
            Task(ask.rows, ask.fields, ask.stages),
            described_rows(positions),
            self._loop.time(),
        )
        if self._has_its_share(session) or not self._serve(request):
            session.line[ask.id] = request
            self._turns[session] = None
        self._pump()

    def _refuse(self, session: Session, number: int, reason: str) -> None:
        session.send(Failed(number, "StageError", reason, elsewhere=True), None)

    def _cancel(self, session: Session, number: int) -> None:
        self._leave_line(session, number)
        request = session.awaited.pop(number, None)
        if request is not None:
            # The batch is made all the same: somebody may ask for it again.
            self._works[request.key].waiters.remove(request)
            if session.line:
                # What it waits for may fit into its share now.
                self._loop.call_soon(self._advance, session)
        self._look_if_quiet()

    # Turns

    def _serve(self, request: Request) -> bool:
        """Whether its batch is there already, or is being made."""
        result = self.results.find(request.key)
        if result is not None:
            self.counts.found += 1
            self._answer(request, result, began_at=self._loop.time())
            return True
        work = self._works.get(request.key)
        if work is None:
            return False
        self.counts.shared += 1
        self._wait_for(work, request)
        return True

    def _wait_for(self, work: _Work, request: Request) -> None:
        work.waiters.append(request)
        request.session.awaited[request.number] = request

    def _advance(self, session: Session) -> None:
        """Answer the first requests of a line, as long as that takes no worker."""
        while session.line and not self._has_its_share(session):
            number, request = session.next_in_line()
            if not self._serve(request):
                break
            self._leave_line(session, number)
        self._pump()

    def _leave_line(self, session: Session, number: int) -> None:
        session.line.pop(number, None)
        if not session.line:
            self._turns.pop(session, None)

    def _pump_soon(self) -> None:
        self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Give workers what is waiting, and then what is going to be asked for."""
        passed_over = []
        while self._turns:
            session, _ = self._turns.popitem(last=False)
            if self._has_its_share(session):
                passed_over.append(session)
                continue
            number, request = session.next_in_line()
            if not self._serve(request) and not self._begin_for(request):
                self._turns[session] = None
                self._turns.move_to_end(session, last=False)
                break
            del session.line[number]
            if session.line:
                self._turns[session] = None
        self._turns |= dict.fromkeys(passed_over)
        while self._can_begin() and self._begin_coming():
            pass
        self._look_if_quiet()

    def _has_its_share(self, session: Session) -> bool:
        """Whether the answers that a client has not taken are enough, so that others can go on if it never does."""
        usual = self.results.usual_bytes
        has = session.unread_bytes + len(session.awaited) * usual
        share = self.settings.memory_bytes // (len(self.sessions) + 1)
        return has > 0 and has + usual > share

    def _can_begin(self) -> bool:
        return self.pool.free > 0 and self.results.make_room(self.pool.running)

    def _begin_for(self, request: Request) -> bool:
        """Let a worker make the batch of a request, if one is free."""
        if not self._can_begin():
            return False
        self._wait_for(self._begin(request.key, request.task, request.described), request)
        return True

    def _begin(self, key: Key, task: Task, described: str) -> _Work:
        work = self._works[key] = _Work(key, self._loop.time())
        self.pool.give(PoolTask(task, partial(self._finish, work), described))
        return work

    def _begin_coming(self) -> bool:
        """Let a free worker make a batch that nobody has asked for yet."""
        if self.is_leaving:
            return False
        for session in self.sessions:
            coming = None if self._has_its_share(session) else session.coming
            while coming is not None and coming.steps:
                ask, rows = coming.ask, Rows(coming.ask.rows.path, coming.steps.popleft())
                try:
                    positions = self._places.positions(ask, rows)
                except HeadraceError:
                    break  # nobody will ask for that
                key = key_of(positions, ask.fields, ask.stages)
                if key not in self._works and key not in self.results:
                    self.counts.ahead += 1
                    self._begin(key, Task(rows, ask.fields, ask.stages), described_rows(positions))
                    return True
        return False

    def _give(self, task: PoolTask) -> None:
        if self.pool.free > 0:
            self.pool.give(task)
        else:
            task.done(Failure("StageError", "all workers are busy", elsewhere=True))

    # Answers

    def _finish(self, work: _Work, outcome: Result | Failure) -> None:
        del self._works[work.key]
        for request in work.waiters:
            del request.session.awaited[request.number]
        if isinstance(outcome, Failure):
            self._note_failure(outcome)
            for request in work.waiters:
                failed = Failed(request.number, outcome.kind, outcome.message, outcome.elsewhere)
                request.session.send(failed, None)
        else:
            self.counts.made += 1
            self.counts.made_seconds += outcome.made_seconds
            self.results.keep(work.key, outcome)
            for request in work.waiters:
                self._answer(request, outcome, work.began_at, outcome.made_seconds)
        self._look_if_quiet()

    def _note_failure(self, failure: Failure) -> None:
        self.counts.failed += 1
        first_line = failure.message.partition("\n")[0]
        if first_line not in self._failures and len(self._failures) < _MOST_FAILURES_TOLD:
            self._failures.add(first_line)
            _log.warning("a batch could not be made: %s", first_line)

    def _answer(self, request: Request, result: Result, began_at: float, made: float = 0.0) -> None:
        session, queued = request.session, max(0.0, began_at - request.at)
        self.counts.answered += 1
        self.counts.sent_bytes += result.body_bytes
        self.counts.queued_seconds += queued
        session.answered += 1
        session.sent_bytes += result.body_bytes
        answer = Answer(
            request.number,
            result.head,
            result.body_bytes,
            queued_seconds=queued,
            made_seconds=made,
            spent=result.spent if made else (),
        )
        session.send(answer, result.hold())

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
        self._timer.cancel()
        self.pool.close()
        self.results.close()
