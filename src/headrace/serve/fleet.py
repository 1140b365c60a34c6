"""All servers of a client: connections that are made, lost and made again, and the batches that they are asked for.

`Dispatch` decides; here are the threads. Every connection has its own, which receive; one more keeps time, makes
connections and looks for servers. Whoever has news tells `Dispatch` under the lock, and carries out what it decides.
"""

import itertools
import json
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from headrace import errors
from headrace.errors import HeadraceError, SettingsError, StageError, StageTimeoutError
from headrace.observe.counting import Counters
from headrace.observe.stats import ServerStats
from headrace.rows.buffers import BufferPool
from headrace.serve import messages
from headrace.serve.addresses import Address, Discovery
from headrace.serve.connection import Bytes, Connection, Events
from headrace.serve.description import DamagedDescriptionError, Description, decode, differences
from headrace.serve.dispatch import (
    Action,
    Dispatch,
    Drop,
    Fail,
    Ping,
    Send,
    Server,
    State,
    Stop,
    Ticket,
)
from headrace.serve.flight_client import Credentials, FlightConnection
from headrace.serve.local import Local
from headrace.serve.messages import Answer, Ask, Cancel, Failed, Hello, Reply, Request, Rows
from headrace.serve.packed import unpack
from headrace.serve.unix_client import UnixConnection
from headrace.workers.prefetch import wait

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
"""How often servers are looked for."""
_AGAIN_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""How long to wait before connecting again, after so many failures in a row."""
_REFUSED_SECONDS = 15.0
_HELLO_SECONDS = 5.0
_DESCRIBE_SECONDS = 0.005
_TICK_SECONDS = 0.04
"""How often requests under way are looked after."""
_TELL_SECONDS = 3.0
"""How long no server must be there before a user is told."""


@dataclass(eq=False)
class Batch(Ticket):
    """A batch that was asked for."""

    rows: Rows = field(default_factory=Rows)
    fields: tuple[str, ...] | None = None
    stages: bytes | None = None
    pool: BufferPool = field(default_factory=lambda: BufferPool(keep=0))
    counters: Counters | None = None
    ahead: Callable[[Server], tuple[int, ...]] = lambda _: ()
    is_report: bool = False
    """Whether the packing report is asked for, and no rows."""
    came: "queue.SimpleQueue[None]" = field(default_factory=queue.SimpleQueue)
    asked_at: float = 0.0
    outcome: "dict[str, Any] | HeadraceError | None" = None


@dataclass(eq=False)
class _Peer(Server):
    """A server with its connection."""

    address: Address | None = None
    connection: Connection | None = None
    generation: int = 0
    """Counts connections, so that news of an old one is not taken for the new one's."""
    asked: dict[int, Batch] = field(default_factory=dict)
    """By the numbers of requests."""
    connecting_since: float | None = None
    again_at: float = 0.0
    failures_in_a_row: int = 0
    problem: str = ""
    """Why it cannot be used."""
    is_refused: bool = False
    bytes: int = 0
    answer_seconds: float = 0.0
    """The sum over all answers, as the client sees them."""


class Fleet:
    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        *,
        expected: Description | None = None,
        ray_servers: Callable[[str], list[str]] | None = None,
    ) -> None:
        self.discovery = Discovery(addresses, ray_servers)
        self._credentials = credentials
        self.description = expected
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._dispatch = Dispatch()
        self._peers: dict[Address, _Peer] = {}
        self._numbers = itertools.count(1)
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_closed = False
        self._looks_at = 0.0
        self._waited_share = 0.0
        self._local: Local | None = None
        self._local_peer: _Peer | None = None
        self._rests = False
        """Whether the thread that keeps time has nothing to look after."""
        self._has_looked = threading.Event()
        self._told_at: float | None = None
        self._keeper = threading.Thread(
            target=_keep, args=(_Weak(self),), name="headrace-servers", daemon=True
        )
        self._keeper.start()

    # For loops

    def ask(self, batch: Batch) -> None:
        """Ask for a batch, without waiting."""
        batch.asked_at = time.monotonic()
        with self._lock:
            self._dispatch.want(batch)
            actions = self._dispatch.due(batch.asked_at)
            rests, self._rests = self._rests, False
        self._carry_out(actions)
        if rests:
            self._wake.put(None)

    def forget(self, batches: Sequence[Batch]) -> None:
        with self._lock:
            for batch in batches:
                self._dispatch.forget(batch)
            actions = self._dispatch.due(time.monotonic())
        self._carry_out(actions)

    def result(self, batch: Batch, timeout_seconds: float, what: str) -> dict[str, Any]:
        """Wait for a batch. It can be taken once."""
        deadline = time.monotonic() + timeout_seconds
        while batch.outcome is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self.forget([batch])
                raise StageTimeoutError(
                    f"{what} did not come within timeout_seconds={timeout_seconds:g}: {self.describe_servers()}"
                )
            wait(batch.came, min(left, 1.0))
            self._check_process()
        outcome, batch.outcome = batch.outcome, None
        if isinstance(outcome, HeadraceError):
            raise outcome
        return outcome

    def report(self, timeout_seconds: float) -> dict[str, Any]:
        """How the rows are packed, by source."""
        asked = Batch(0, is_report=True)
        self.ask(asked)
        try:
            return self.result(asked, timeout_seconds, "the packing report")
        finally:
            self.forget([asked])

    def note_waiting(self, share: float) -> None:
        """The share of its time in which the loop has waited lately, for servers that can become more."""
        self._waited_share = min(1.0, max(0.0, share))

    @property
    def slots(self) -> int:
        """How many batches all servers that are there can make at the same time."""
        with self._lock:
            return sum(server.slots for server in self._dispatch.servers if server.state is State.UP)

    def planned(self, server: Server, steps: range) -> tuple[int, ...]:
        """Which steps the server will probably be asked for. Called with the lock held, when a request is made."""
        return tuple(self._dispatch.planned(server, steps))

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and its threads are those of this process."""
        return not self._is_closed and os.getpid() == self._pid

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StageError(
                "load: this iteration was started in another process, and its connections belong to that; after a "
                "fork, start a new one with iter(loader)"
            )

    # Servers

    def add_local(self, local: "Local") -> None:
        """Let processes of this machine take part like one more server."""
        name = f"this machine ({local.workers} workers)"
        peer = _Peer(name, local.workers, is_last_resort=local.is_fallback, most=local.most_tickets())
        with self._lock:
            self._dispatch.servers.append(peer)
            self._local, self._local_peer = local, peer
        if not local.is_fallback:
            self._start_local(local, peer)

    def _start_local(self, local: "Local", peer: _Peer) -> None:
        peer.connection = local.connect(self._events(peer))
        peer.connection.start()

    def _look_after_local(self, now: float) -> None:
        """Start the fallback when no server has been there for a while; keep the others from taking all cores."""
        local, peer = self._local, self._local_peer
        if local is None or peer is None:
            return
        since = self._dispatch.nobody_since()
        is_needed = since is not None and now - since >= self._dispatch.grace_seconds
        if local.is_fallback and peer.connection is None and is_needed and self._dispatch.is_wanted:
            _log.warning(
                "no server can be reached: batches are made on this machine until one is there again"
            )
            self._start_local(local, peer)
        peer.most = None if is_needed and local.may_help_out else local.most_tickets()

    def describe(self, timeout_seconds: float, patience_seconds: float) -> Description:
        """What the servers serve, when one has said so. The others get some patience to agree or to be refused."""
        begun = time.monotonic()
        deadline = begun + timeout_seconds
        told = False
        while self.description is None:
            self._raise_problems()
            left = deadline - time.monotonic()
            if left <= 0:
                raise StageTimeoutError(
                    f"no server has answered within timeout_seconds={timeout_seconds:g}: {self.describe_servers()}"
                )
            if not told and time.monotonic() - begun > _TELL_SECONDS:
                told = True
                _log.warning(
                    "no server has answered yet: %s; waiting up to %g s",
                    self.describe_servers(),
                    timeout_seconds,
                )
            time.sleep(_DESCRIBE_SECONDS)
        patient_until = min(deadline, time.monotonic() + patience_seconds)
        while time.monotonic() < patient_until and self._is_undecided():
            time.sleep(_DESCRIBE_SECONDS)
        self._raise_problems()
        return self.description

    def _is_undecided(self) -> bool:
        """Whether some server has neither agreed nor failed so far."""
        with self._lock:
            peers = list(self._peers.values())
        return not self._has_looked.is_set() or any(
            peer.state is State.DOWN and not peer.failures_in_a_row and not peer.is_refused for peer in peers
        )

    def _raise_problems(self) -> None:
        with self._lock:
            refused = [f"{peer.name}: {peer.problem}" for peer in self._peers.values() if peer.is_refused]
        if refused:
            raise SettingsError("; ".join(refused))

    def describe_servers(self) -> str:
        """Each server with its state, in words."""
        with self._lock:
            listed = [
                f"{server.name} is {server.state}{f' ({peer.problem})' if peer.problem else ''}"
                for server in self._dispatch.servers
                if isinstance(peer := server, _Peer)
            ]
        problems = [f"{address}: {problem}" for address, problem in self.discovery.problems.items()]
        return "; ".join(listed + problems) or "there are no servers"

    def stats(self) -> dict[str, ServerStats]:
        with self._lock:
            return {
                server.name: ServerStats(
                    state=str(server.state),
                    answers=server.answers,
                    bytes=server.bytes,
                    seconds=server.answer_seconds,
                    late=server.late,
                    faults=server.faults,
                    owes=len(server.owes),
                )
                for server in self._dispatch.servers
                if isinstance(server, _Peer)
            }

    def close(self) -> None:
        """End all connections. What was asked for never comes."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            connections = [
                server.connection for server in self._dispatch.servers if isinstance(server, _Peer)
            ]
        self._wake.put(None)
        if os.getpid() != self._pid:
            return
        for connection in connections:
            if connection is not None:
                connection.close()

    # Keeping time

    def keep(self) -> float:
        """Do what is due; returns how long there is nothing to do unless something happens."""
        now = time.monotonic()
        if now >= self._looks_at:
            self._looks_at = now + _LOOK_SECONDS
            self._look()
        with self._lock:
            if self._is_closed:
                return 0.0
            due = [peer for peer in self._peers.values() if self._must_connect(peer, now)]
            late = [peer for peer in self._peers.values() if self._is_late(peer, now)]
            actions = self._dispatch.look(now)
            self._rests = not self._dispatch.is_wanted
        self._carry_out(actions)
        for peer in late:
            self._lost(
                peer, peer.generation, f"it did not say hello within {_HELLO_SECONDS:g} seconds", close=True
            )
        for peer in due:
            self._connect(peer)
        for peer in list(self._peers.values()):
            if peer.connection is not None:
                peer.connection.tick()
        self._look_after_local(now)
        self._tell_if_nobody(now)
        times = [self._looks_at] + [peer.again_at for peer in self._peers.values() if peer.connection is None]
        if not self._rests:
            times.append(now + _TICK_SECONDS)
        return max(0.01, min(times) - time.monotonic())

    def _look(self) -> None:
        found = self.discovery.look()
        now = time.monotonic()
        with self._lock:
            gone = [address for address in self._peers if address not in found]
            removed = [self._peers.pop(address) for address in gone]
            actions: list[Action] = []
            for peer in removed:
                self._dispatch.remove(peer, now)
            for address in found:
                if address not in self._peers:
                    peer = self._peers[address] = _Peer(str(address), address=address)
                    self._dispatch.servers.append(peer)
            actions += self._dispatch.due(now)
        for peer in removed:
            if peer.connection is not None:
                peer.connection.close()
        self._carry_out(actions)
        self._has_looked.set()

    def _must_connect(self, peer: _Peer, now: float) -> bool:
        if peer.connection is not None or now < peer.again_at or self._is_closed:
            return False
        peer.connecting_since, peer.generation = now, peer.generation + 1
        return True

    def _is_late(self, peer: _Peer, now: float) -> bool:
        return peer.connecting_since is not None and now - peer.connecting_since > _HELLO_SECONDS

    def _tell_if_nobody(self, now: float) -> None:
        """Say it in the log when batches are wanted and no server is there, and again when one is."""
        with self._lock:
            since = self._dispatch.nobody_since()
            is_missed = since is not None and self._dispatch.is_wanted and now - since > _TELL_SECONDS
            is_back = since is None and self._told_at is not None
        if is_missed and self._told_at is None:
            self._told_at = now
            _log.warning("no server can be reached, and the loop waits for one: %s", self.describe_servers())
        elif is_back and self._told_at is not None:
            _log.warning("a server is there again, after %.0f s", now - self._told_at)
            self._told_at = None

    def _connect(self, peer: _Peer) -> None:
        address, events = peer.address, self._events(peer)
        assert address is not None
        connection: Connection
        if address.scheme == "unix":
            connection = UnixConnection(address.path, events)
        else:
            connection = FlightConnection(address, self._credentials, events)
        # Before it starts, since it may be lost at once.
        peer.connection = connection
        connection.start()

    # News from connections

    def _events(self, peer: _Peer) -> Events:
        number = peer.generation
        return Events(
            hello=self._hello,
            reply=partial(self._reply, peer, number),
            place=partial(self._place, peer),
            answer=partial(self._answer, peer),
            lost=partial(self._lost, peer, number),
        )

    def _hello(self) -> Request:
        fingerprint = None if self.description is None else self.description.fingerprint
        return Hello(messages.VERSION, fingerprint, self._credentials.token)

    def _reply(self, peer: _Peer, generation: int, reply: Reply) -> None:
        now = time.monotonic()
        if peer.generation != generation:
            return
        if isinstance(reply, messages.Welcome):
            self._welcome(peer, reply)
        elif isinstance(reply, messages.Refused):
            self._refused(peer, reply)
        elif isinstance(reply, Failed):
            self._failed(peer, reply)
        elif isinstance(reply, messages.Reported):
            self._reported(peer, reply)
        else:
            with self._lock:
                if isinstance(reply, messages.Leaving):
                    self._dispatch.leaves(peer, now)
                else:
                    self._dispatch.heard(peer, now)
                actions = self._dispatch.due(now)
            self._carry_out(actions)

    def _welcome(self, peer: _Peer, welcome: messages.Welcome) -> None:
        problem = self._problem_of(welcome)
        now = time.monotonic()
        with self._lock:
            if problem:
                self._mark_refused(peer, problem, now)
            else:
                peer.connecting_since, peer.failures_in_a_row, peer.problem = None, 0, ""
                peer.is_refused = False
                self._dispatch.came_up(peer, welcome.slots, now)
            actions = self._dispatch.due(now)
        self._carry_out(actions)
        if problem and peer.connection is not None:
            peer.connection.close()

    def _problem_of(self, welcome: messages.Welcome) -> str:
        """Why the server cannot be used; its description becomes that of the fleet if it is the first one."""
        if welcome.version != messages.VERSION:
            return f"it speaks version {welcome.version} of the protocol, and this client {messages.VERSION}"
        try:
            with self._lock:
                if self.description is None:
                    self.description = decode(welcome.description)
            if welcome.fingerprint == self.description.fingerprint:
                return ""
            return self._differences(decode(welcome.description))
        except DamagedDescriptionError as error:
            return str(error)

    def _differences(self, there: Description) -> str:
        assert self.description is not None
        listed = "; ".join(differences(self.description, there))
        return f"it does not serve the same rows: {listed or 'its fingerprint is another'}"

    def _refused(self, peer: _Peer, refused: messages.Refused) -> None:
        problem = f"it refuses this client: {refused.reason}"
        if refused.description:
            try:
                problem = self._differences(decode(refused.description))
            except DamagedDescriptionError as error:
                problem = str(error)
        with self._lock:
            self._mark_refused(peer, problem, time.monotonic())

    def _mark_refused(self, peer: _Peer, problem: str, now: float) -> None:
        if not peer.is_refused or peer.problem != problem:
            _log.warning("the server %s is not used: %s", peer.name, problem)
        peer.is_refused, peer.problem, peer.again_at = True, problem, now + _REFUSED_SECONDS
        peer.connecting_since = None

    def _place(self, peer: _Peer, answer: Answer) -> Bytes | None:
        with self._lock:
            batch = peer.asked.get(answer.id)
            if batch is None or batch.is_done:
                return None
            pool = batch.pool
        place: Bytes = pool.arrays([("body", np.uint8, (answer.body_bytes,))])["body"]
        return place

    def _answer(self, peer: _Peer, answer: Answer, body: Bytes | None) -> None:
        now = time.monotonic()
        with self._lock:
            batch = peer.asked.pop(answer.id, None)
            if batch is None:
                return
            took = now - batch.asked_at
            peer.bytes += answer.body_bytes
            peer.answer_seconds += took
            is_first = self._dispatch.answered(peer, batch, now) and body is not None
            actions = self._dispatch.due(now)
        if is_first and body is not None:
            self._finish(batch, _opened(peer, answer, body))
            _count(batch, answer, took)
        self._carry_out(actions)

    def _reported(self, peer: _Peer, reported: messages.Reported) -> None:
        now = time.monotonic()
        with self._lock:
            batch = peer.asked.pop(reported.id, None)
            is_first = batch is not None and self._dispatch.answered(peer, batch, now)
        if batch is not None and is_first:
            try:
                self._finish(batch, json.loads(reported.content))
            except ValueError as error:
                self._finish(
                    batch,
                    StageError(f"the server {peer.name} has sent a report that cannot be read: {error}"),
                )

    def _failed(self, peer: _Peer, failed: Failed) -> None:
        now = time.monotonic()
        with self._lock:
            batch = peer.asked.pop(failed.id, None)
            if batch is None:
                return
            why = f"{failed.kind} {failed.message}"
            has_failed = self._dispatch.failed(peer, batch, why, elsewhere=failed.elsewhere, now=now)
            actions = self._dispatch.due(now)
        if has_failed:
            self._finish(batch, _error_of(failed.kind, f"{failed.message} (on the server {peer.name})"))
        self._carry_out(actions)

    def _lost(self, peer: _Peer, generation: int, reason: str, *, close: bool = False) -> None:
        now = time.monotonic()
        with self._lock:
            if peer.generation != generation:
                return
            connection, peer.connection = peer.connection, None
            peer.generation += 1
            peer.asked.clear()
            peer.connecting_since = None
            if not peer.is_refused:
                peer.problem = reason
                wait_seconds = _AGAIN_SECONDS[min(peer.failures_in_a_row, len(_AGAIN_SECONDS) - 1)]
                peer.failures_in_a_row += 1
                peer.again_at = now + wait_seconds
            self._dispatch.lost(peer, now)
            actions = self._dispatch.due(now)
        if close and connection is not None:
            connection.close()
        self._carry_out(actions)
        self._wake.put(None)

    def _finish(self, batch: Batch, outcome: "dict[str, Any] | HeadraceError") -> None:
        batch.outcome = outcome
        batch.came.put(None)

    # Carrying out

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Fail):
                batch = action.ticket
                assert isinstance(batch, Batch)
                said = "; ".join(f"{server.name}: {why}" for server, why in batch.failures.items())
                self._finish(batch, StageError(f"no server can make this batch: {said}"))
                continue
            peer = action.server
            assert isinstance(peer, _Peer)
            if isinstance(action, Send):
                assert isinstance(action.ticket, Batch)
                self._send(peer, action.ticket)
            elif isinstance(action, Stop):
                self._stop(peer, action.ticket)
            elif isinstance(action, Ping):
                self._tell(peer, messages.Ping(next(self._numbers)))
            elif isinstance(action, Drop):
                self._lost(peer, peer.generation, "it gives no sign of life", close=True)

    def _send(self, peer: _Peer, batch: Batch) -> None:
        with self._lock:
            number = next(self._numbers)
            peer.asked[number] = batch
            ahead = batch.ahead(peer)
        if batch.is_report:
            self._tell(peer, messages.Report(number))
            return
        self._tell(peer, Ask(number, batch.rows, batch.fields, batch.stages, ahead, self._waited_share))

    def _stop(self, peer: _Peer, ticket: Ticket) -> None:
        with self._lock:
            numbers = [number for number, batch in peer.asked.items() if batch is ticket]
        for number in numbers:
            self._tell(peer, Cancel(number))

    def _tell(self, peer: _Peer, request: Request) -> None:
        connection = peer.connection
        if connection is not None:
            connection.send(request)


class _Weak:
    """A fleet whose user is gone ends."""

    def __init__(self, fleet: Fleet) -> None:
        self.get = weakref.ref(fleet)
        self.wake = fleet._wake


def _keep(weak: _Weak) -> None:
    while (fleet := weak.get()) is not None and not fleet._is_closed:
        seconds = fleet.keep()
        del fleet
        wait(weak.wake, min(seconds, 1.0))
        while not weak.wake.empty():
            wait(weak.wake, 0)


def _opened(peer: _Peer, answer: Answer, body: Bytes) -> "dict[str, Any] | HeadraceError":
    try:
        return unpack(answer.head, body)
    except HeadraceError as error:
        return StageError(f"the server {peer.name} has sent a batch that cannot be read: {error}")


def _count(batch: Batch, answer: Answer, took: float) -> None:
    """Count what the batch has cost: on the server, and on its way."""
    if batch.counters is None:
        return
    on_server = answer.queued_seconds + answer.made_seconds
    stages = [("server queue", 1, round(1e9 * answer.queued_seconds))]
    stages += [(f"server {stage}", count, spent) for stage, count, spent in answer.spent]
    stages.append(("network", 1, round(1e9 * max(0.0, took - on_server))))
    batch.counters.receive((stages, [], (0, 0, 0, 0)), "servers")


def _error_of(kind: str, message: str) -> HeadraceError:
    """The server's error, as its own class if it is one of ours."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, HeadraceError):
        return found(message)
    return StageError(message)
