"""All servers of a client: connections that are made, lost and made again, and the batches that they are asked for.

`Dispatch` decides; here are the threads. Every connection has its own, which receive; one more keeps time, makes
connections and looks for servers. Whoever has news tells `Dispatch` under the lock, and carries out what it decides.
"""

import atexit
import itertools
import json
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from headrace.errors import HeadraceError, SettingsError, StageError, StageTimeoutError
from headrace.observe.stats import ServerStats
from headrace.serve import messages
from headrace.serve.addresses import Address, Discovery
from headrace.serve.arrivals import Arrival, Arrivals
from headrace.serve.connection import Arrived, Bytes, Credentials, Events
from headrace.serve.description import Description
from headrace.serve.dispatch import Action, Dispatch, Drop, Fail, Ping, Send, Server, State, Stop
from headrace.serve.greetings import Greetings
from headrace.serve.keeper import TELL_SECONDS, Keeper, refuse_flight_after_fork
from headrace.serve.local import Local
from headrace.serve.messages import Answer, Ask, Cancel, Failed, Reply, Request
from headrace.serve.peers import Batch, Peer, count, error_of, opened

_log = logging.getLogger(__name__)

_AGAIN_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""How long to wait before connecting again, after so many failures in a row."""
_REFUSED_SECONDS = 15.0
_DESCRIBE_SECONDS = 0.005


class Fleet:
    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        *,
        expected: Description | None = None,
        local: Local | None = None,
        ray_servers: Callable[[str], list[str]] | None = None,
    ) -> None:
        _check_process_of(addresses)
        self._discovery = Discovery(addresses, ray_servers)
        self._greetings = Greetings(credentials.token, expected)
        self._pid = os.getpid()
        self.lock = threading.Lock()
        self.dispatch = Dispatch(time.monotonic())
        self.peers: dict[Address, Peer] = {}
        self._forgotten: deque[Batch] = deque()
        self._arrivals = Arrivals(self._take)
        self._numbers = itertools.count(1)
        self.is_closed = False
        self._waited_share = 0.0
        self._closing_if_interrupted = _ClosingIfInterrupted(self)
        self._keeper = Keeper(self, self._discovery, credentials)
        if local is not None:
            self._keeper.add_local(local)
        self._keeper.start()
        _living.add(self)

    # For loops

    def ask(self, batches: Sequence[Batch]) -> None:
        """Ask for batches, without waiting."""
        now = time.monotonic()
        with self._closing_if_interrupted:
            with self.lock:
                for batch in batches:
                    batch.asked_at = now
                    self.dispatch.want(batch)
                actions = self.dispatch.due(now)
            self.carry_out(actions)
        self._keeper.wake_if_resting()

    def forget(self, batches: Sequence[Batch]) -> None:
        """Nobody waits for these any more. It takes no lock: it may be called wherever Python collects garbage."""
        self._forgotten.extend(batches)
        self._keeper.wake()

    def let_go(self) -> None:
        """Stop what is forgotten. Called with the lock held."""
        while self._forgotten:
            self.dispatch.forget(self._forgotten.popleft())

    def result(self, batch: Batch, timeout_seconds: float, what: Callable[[], str]) -> dict[str, Any]:
        """Wait for a batch. It can be taken once."""
        deadline = time.monotonic() + timeout_seconds
        while batch.outcome is None:
            if self.is_closed:
                raise StageError(
                    "load: the connections to the servers were closed; start a new iteration with iter(loader)"
                )
            left = deadline - time.monotonic()
            if left <= 0:
                self.forget([batch])
                raise StageTimeoutError(
                    f"{what()} did not come within timeout_seconds={timeout_seconds:g}: {self.describe_servers()}"
                )
            self._arrivals.wait_for(batch, min(left, 1.0))
            self.check_process()
        outcome, batch.outcome = batch.outcome, None
        if isinstance(outcome, HeadraceError):
            raise outcome
        return outcome

    def report(self, timeout_seconds: float) -> dict[str, Any]:
        """How the rows are packed, by source."""
        asked = Batch(0, is_report=True)
        self.ask([asked])
        try:
            return self.result(asked, timeout_seconds, lambda: "the packing report")
        finally:
            self.forget([asked])

    def note_waiting(self, share: float) -> None:
        """The share of its time in which the loop has waited lately, for servers that can become more."""
        self._waited_share = min(1.0, max(0.0, share))

    @property
    def description(self) -> Description | None:
        """What the servers serve, as soon as that is known."""
        return self._greetings.description

    @property
    def slots(self) -> int:
        """How many batches all servers that are there can make at the same time."""
        with self.lock:
            return sum(server.slots for server in self.dispatch.servers if server.state is State.UP)

    def planned(self, server: Server, steps: range) -> tuple[int, ...]:
        """Which steps the server will probably be asked for. Called with the lock held, when a request is made."""
        return tuple(self.dispatch.planned(server, steps))

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and its threads are those of this process."""
        return not self.is_closed and os.getpid() == self._pid

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StageError(
                "load: this iteration was started in another process, and its connections belong to that; after a "
                "fork, start a new one with iter(loader)"
            )

    # Servers

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
            if not told and time.monotonic() - begun > TELL_SECONDS:
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
        with self.lock:
            peers = list(self.peers.values())
        return not self._keeper.has_looked_up or any(
            peer.state is State.DOWN and not peer.failures_in_a_row and not peer.is_refused for peer in peers
        )

    def _raise_problems(self) -> None:
        with self.lock:
            refused = [f"{peer.name}: {peer.problem}" for peer in self.peers.values() if peer.is_refused]
        if refused:
            raise SettingsError("; ".join(refused))

    def describe_servers(self) -> str:
        """Each server with its state, in words."""
        with self.lock:
            listed = [
                f"{server.name} is {_state_of(peer)}{f' ({peer.problem})' if peer.problem else ''}"
                for server in self.dispatch.servers
                if isinstance(peer := server, Peer)
            ]
        problems = [f"{address}: {problem}" for address, problem in self._discovery.problems.items()]
        return "; ".join(listed + problems) or "there are no servers"

    def stats(self) -> dict[str, ServerStats]:
        with self.lock:
            return {
                server.name: ServerStats(
                    state=str(server.state),
                    answers=server.answers,
                    bytes=server.bytes,
                    seconds=server.answer_seconds,
                    late=server.late,
                    faults=server.faults,
                    owes=len(server.owes),
                    slots=server.slots,
                )
                for server in self.dispatch.servers
                if isinstance(server, Peer)
            }

    def use(self, addresses: Sequence[str], ray_servers: Callable[[str], list[str]] | None) -> None:
        """These are the servers from now on."""
        _check_process_of(addresses)
        self._discovery.use(addresses, ray_servers)
        self._keeper.look_again()

    def close(self) -> None:
        """End all connections. What was asked for never comes. Like `forget`, it takes no lock."""
        self.is_closed = True
        self._keeper.wake()
        self._keeper.look_again()

    def end(self) -> None:
        """Close it, and wait until its threads have ended."""
        self.close()
        if os.getpid() == self._pid:
            self._keeper.join()

    def meet(self, found: Sequence[Address]) -> None:
        """These are the servers that are there now: others are left, and new ones met."""
        now = time.monotonic()
        with self.lock:
            gone = [address for address in self.peers if address not in found]
            removed = [self.peers.pop(address) for address in gone]
            for peer in removed:
                self.dispatch.remove(peer, now)
            for address in found:
                if address not in self.peers:
                    peer = self.peers[address] = Peer(str(address), address=address)
                    self.dispatch.servers.append(peer)
            actions = self.dispatch.due(now)
        for peer in removed:
            if peer.connection is not None:
                peer.connection.close()
        self.carry_out(actions)

    # News from connections

    def events_of(self, peer: Peer) -> Events:
        number = peer.generation
        return Events(
            hello=self._greetings.hello,
            reply=partial(self._reply, peer, number),
            place=partial(self._place, peer),
            answers=partial(self._answers, peer),
            lost=partial(self.lost, peer, number),
        )

    def _reply(self, peer: Peer, generation: int, reply: Reply) -> None:
        now = time.monotonic()
        if peer.generation != generation:
            return
        if isinstance(reply, messages.Welcome):
            self._welcome(peer, generation, reply)
        elif isinstance(reply, messages.Refused):
            self._refused(peer, reply)
        elif isinstance(reply, Failed):
            self._failed(peer, reply)
        elif isinstance(reply, messages.Reported):
            self._reported(peer, reply)
        else:
            with self.lock:
                if isinstance(reply, messages.Leaving):
                    self.dispatch.leaves(peer, now)
                else:
                    self.dispatch.heard(peer, now)
                actions = self.dispatch.due(now)
            self.carry_out(actions)

    def _welcome(self, peer: Peer, generation: int, welcome: messages.Welcome) -> None:
        problem = self._greetings.problem_of(welcome)
        now = time.monotonic()
        if problem:
            with self.lock:
                self._mark_refused(peer, problem, now)
            self.lost(peer, generation, problem, close=True)
            return
        with self.lock:
            peer.connecting_since, peer.failures_in_a_row, peer.problem = None, 0, ""
            peer.is_refused = False
            self.dispatch.came_up(peer, welcome.slots, now)
            actions = self.dispatch.due(now)
        self.carry_out(actions)

    def _refused(self, peer: Peer, refused: messages.Refused) -> None:
        with self.lock:
            self._mark_refused(peer, self._greetings.problem_of_refusal(refused), time.monotonic())

    def _mark_refused(self, peer: Peer, problem: str, now: float) -> None:
        if not peer.is_refused or peer.problem != problem:
            _log.warning("the server %s is not used: %s", peer.name, problem)
        peer.is_refused, peer.problem, peer.again_at = True, problem, now + _REFUSED_SECONDS
        peer.connecting_since = None

    def _place(self, peer: Peer, answer: Answer) -> Bytes | None:
        with self.lock:
            batch = peer.asked.get(answer.id)
            if batch is None or batch.is_done:
                return None
            pool = batch.pool
        place: Bytes = pool.arrays([("body", np.uint8, (answer.body_bytes,))])["body"]
        return place

    def _answers(self, peer: Peer, arrived: Sequence[Arrived]) -> None:
        now = time.monotonic()
        self._arrivals.put([(peer, answer, body, now) for answer, body in arrived])

    def _take(self, arrivals: "deque[Arrival]") -> None:
        """Take batches that have arrived, all that there are."""
        with self._closing_if_interrupted:
            self._take_each(arrivals)

    def _take_each(self, arrivals: "deque[Arrival]") -> None:
        first: list[tuple[Peer, Batch, Answer, Bytes, float, float]] = []
        with self.lock:
            while arrivals:
                peer, answer, body, at = arrivals.popleft()
                batch = peer.asked.pop(answer.id, None)
                if batch is None:
                    continue
                sent_at = peer.owes[batch].sent_at if batch in peer.owes else batch.asked_at
                peer.bytes += answer.body_bytes
                peer.answer_seconds += at - sent_at
                if self.dispatch.answered(peer, batch, at) and body is not None:
                    first.append((peer, batch, answer, body, sent_at, at))
            actions = self.dispatch.due(time.monotonic())
        for peer, batch, answer, body, sent_at, at in first:
            batch.body_bytes = answer.body_bytes
            self._finish(batch, opened(peer, answer, body))
            count(batch, answer, sent_at, at)
        self.carry_out(actions)

    def _reported(self, peer: Peer, reported: messages.Reported) -> None:
        now = time.monotonic()
        with self.lock:
            batch = peer.asked.pop(reported.id, None)
            is_first = batch is not None and self.dispatch.answered(peer, batch, now)
        if batch is not None and is_first:
            try:
                self._finish(batch, json.loads(reported.content))
            except ValueError as error:
                self._finish(
                    batch,
                    StageError(f"the server {peer.name} has sent a report that cannot be read: {error}"),
                )

    def _failed(self, peer: Peer, failed: Failed) -> None:
        now = time.monotonic()
        with self.lock:
            batch = peer.asked.pop(failed.id, None)
            if batch is None:
                return
            why = f"{failed.kind} {failed.message}"
            has_failed = self.dispatch.failed(peer, batch, why, elsewhere=failed.elsewhere, now=now)
            actions = self.dispatch.due(now)
        if has_failed:
            self._finish(batch, error_of(failed.kind, f"{failed.message} (on the server {peer.name})"))
        self.carry_out(actions)

    def lost(self, peer: Peer, generation: int, reason: str, *, close: bool = False) -> None:
        now = time.monotonic()
        with self.lock:
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
            self.dispatch.lost(peer, now)
            actions = self.dispatch.due(now)
        if close and connection is not None:
            connection.close()
        self.carry_out(actions)
        self._keeper.wake()

    def _finish(self, batch: Batch, outcome: "dict[str, Any] | HeadraceError") -> None:
        batch.outcome = outcome
        batch.came.put(None)

    # Carrying out

    def carry_out(self, actions: Sequence[Action]) -> None:
        requests: dict[Peer, list[Request]] = {}
        for action in actions:
            if isinstance(action, Fail):
                batch = action.ticket
                assert isinstance(batch, Batch)
                said = "; ".join(f"{server.name}: {why}" for server, why in batch.failures.items())
                self._finish(batch, StageError(f"no server can make this batch: {said}"))
                continue
            peer = action.server
            assert isinstance(peer, Peer)
            if isinstance(action, Drop):
                self.lost(peer, peer.generation, "it gives no sign of life", close=True)
            else:
                requests.setdefault(peer, []).extend(self._requests_for(peer, action))
        for peer, listed in requests.items():
            self._tell(peer, listed)

    def _requests_for(self, peer: Peer, action: Send | Stop | Ping) -> list[Request]:
        if isinstance(action, Ping):
            return [messages.Ping(next(self._numbers))]
        batch = action.ticket
        assert isinstance(batch, Batch)
        with self.lock:
            if isinstance(action, Stop):
                return [Cancel(number) for number, asked in peer.asked.items() if asked is batch]
            number = next(self._numbers)
            peer.asked[number] = batch
        if batch.is_report:
            return [messages.Report(number)]
        return [Ask(number, batch.rows, batch.fields, batch.stages, (), self._waited_share)]

    def _tell(self, peer: Peer, requests: list[Request]) -> None:
        last = requests[-1] if requests else None
        if isinstance(last, Ask):
            with self.lock:
                batch = peer.asked.get(last.id)
                ahead = () if batch is None else batch.ahead(peer)
            requests[-1] = msgspec.structs.replace(last, ahead=ahead)
        connection = peer.connection
        if connection is not None and requests:
            connection.send(requests)


class _ClosingIfInterrupted:
    """Ctrl-C in the middle of it may have lost a batch that another loop waits for, and that loop would never know."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = weakref.ref(fleet)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        fleet = self._fleet()
        if kind is not None and fleet is not None:
            fleet.close()


def _state_of(peer: Peer) -> str:
    return "not used" if peer.is_refused else str(peer.state)


def _check_process_of(addresses: Sequence[str]) -> None:
    if any(not address.startswith("unix:") for address in addresses):
        refuse_flight_after_fork()


_living: "weakref.WeakSet[Fleet]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """No thread may be in Arrow when the interpreter shuts down."""
    living = list(_living)
    for fleet in living:
        fleet.close()
    for fleet in living:
        fleet.end()
