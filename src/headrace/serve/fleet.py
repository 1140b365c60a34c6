"""All servers of a client, for the loops that want batches from them.

Loops ask for batches, and wait for them; `Conversations` has the requests and the answers, and the thread of a `Keeper`
keeps time, makes connections and looks for servers.
"""

import atexit
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import HeadraceError, SettingsError, StageError, StageTimeoutError
from headrace.observe.stats import ServerStats
from headrace.serve.addresses import Address, Discovery
from headrace.serve.connection import Credentials
from headrace.serve.conversations import Conversations
from headrace.serve.description import Description
from headrace.serve.dispatch import Server, State
from headrace.serve.greetings import Greetings
from headrace.serve.keeper import TELL_SECONDS, Keeper, refuse_flight_after_fork
from headrace.serve.local import Local
from headrace.serve.peers import Batch, Peer

_log = logging.getLogger(__name__)

_DESCRIBE_SECONDS = 0.005


class Fleet:
    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        *,
        expected: Description | None = None,
        known_from: str = "this RemoteLoader",
        local: Local | None = None,
        ray_servers: Callable[[str], list[str]] | None = None,
    ) -> None:
        _check_process_of(addresses)
        self._discovery = Discovery(addresses, ray_servers)
        self._greetings = Greetings(credentials.token, expected, known_from)
        self._pid = os.getpid()
        self.peers: dict[Address, Peer] = {}
        self._forgotten: deque[Batch] = deque()
        self.is_closed = False
        self._closing_if_interrupted = _ClosingIfInterrupted(self)
        talk = self.conversations = Conversations(
            self._greetings, wake=lambda: self._keeper.wake(), unless_interrupted=self._closing_if_interrupted
        )
        self._lock, self._dispatch = talk.lock, talk.dispatch
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
            with self._lock:
                for batch in batches:
                    batch.asked_at = now
                    self._dispatch.want(batch)
                actions = self._dispatch.due(now)
            self.conversations.carry_out(actions)
        self._keeper.wake_if_resting()

    def forget(self, batches: Sequence[Batch]) -> None:
        """Nobody waits for these any more. It takes no lock: it may be called wherever Python collects garbage."""
        self._forgotten.extend(batches)
        self._keeper.wake()

    def let_go(self) -> None:
        """Stop what is forgotten. Called with the lock held."""
        while self._forgotten:
            self._dispatch.forget(self._forgotten.popleft())

    def result(self, batch: Batch, timeout_seconds: float, what: Callable[[], str]) -> dict[str, Any]:
        """Wait for a batch. It can be taken once."""
        if batch.outcome is None:
            self.conversations.waiting_since = time.monotonic()
            try:
                self._wait_for(batch, timeout_seconds, what)
            finally:
                self.conversations.waiting_since = None
        outcome, batch.outcome = batch.outcome, None
        assert outcome is not None
        if isinstance(outcome, HeadraceError):
            raise outcome
        return outcome

    def _wait_for(self, batch: Batch, timeout_seconds: float, what: Callable[[], str]) -> None:
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
            self.conversations.arrivals.wait_for(batch, min(left, 1.0))
            self.check_process()

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
        self.conversations.told_share = min(1.0, max(0.0, share))

    @property
    def description(self) -> Description | None:
        """What the servers serve, as soon as that is known."""
        return self._greetings.description

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
        with self._lock:
            peers = list(self.peers.values())
        return not self._keeper.has_looked_up or any(
            peer.state is State.DOWN and not peer.failures_in_a_row and not peer.is_refused for peer in peers
        )

    def _raise_problems(self) -> None:
        with self._lock:
            refused = [f"{peer.name}: {peer.problem}" for peer in self.peers.values() if peer.is_refused]
        if refused:
            raise SettingsError("; ".join(refused))

    def describe_servers(self) -> str:
        """Each server with its state, in words."""
        with self._lock:
            listed = [
                f"{server.name} is {_state_of(peer)}{f' ({peer.problem})' if peer.problem else ''}"
                for server in self._dispatch.servers
                if isinstance(peer := server, Peer)
            ]
        problems = [f"{address}: {problem}" for address, problem in self._discovery.problems.items()]
        return "; ".join(listed + problems) or f"no servers are found at {', '.join(self._discovery.given)}"

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
                    slots=server.slots,
                )
                for server in self._dispatch.servers
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
        with self._lock:
            gone = [address for address in self.peers if address not in found]
            removed = [self.peers.pop(address) for address in gone]
            for peer in removed:
                self._dispatch.remove(peer, now)
            for address in found:
                if address not in self.peers:
                    peer = self.peers[address] = Peer(str(address), address=address)
                    self._dispatch.servers.append(peer)
            actions = self._dispatch.due(now)
        for peer in removed:
            if peer.connection is not None:
                peer.connection.close()
        self.conversations.carry_out(actions)


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
