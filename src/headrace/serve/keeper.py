"""The thread of a fleet that keeps time: it connects to servers, and looks after requests under way.

Another one looks up where servers are: it may have to wait for a name server.
"""

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.errors import StageError
from headrace.serve.addresses import Address, Discovery
from headrace.serve.connection import Connection, Credentials
from headrace.serve.flight_start import missing_flight
from headrace.serve.local import Local
from headrace.serve.peers import Peer
from headrace.serve.unix_client import UnixConnection
from headrace.workers.prefetch import wait

if TYPE_CHECKING:
    from headrace.serve.fleet import Fleet

_log = logging.getLogger(__name__)

_LOOK_UP_SECONDS = 2.0
"""How often servers are looked up, if where they are can change."""
_REST_SECONDS = 60.0
_HELLO_SECONDS = 5.0
_GOODBYE_SECONDS, _END_SECONDS = 1.0, 10.0
"""How long servers get to say goodbye, and connections to end without them."""
_TICK_SECONDS = 0.04
"""How often requests under way are looked after."""
TELL_SECONDS = 3.0
"""How long no server must be there before a user is told."""


class Keeper:
    def __init__(self, fleet: "Fleet", discovery: Discovery, credentials: Credentials) -> None:
        self._fleet, self._discovery, self._credentials = fleet, discovery, credentials
        self._talk = fleet.conversations
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._look_again: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rests = False
        """Whether there is nothing to look after."""
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        """All whose threads may be running."""
        self.has_looked_up = False
        self._local: tuple[Local, Peer] | None = None
        self._gone_since: float | None = None
        """Since when no server has been there, if that was told."""

    def start(self) -> None:
        me = weakref.ref(self)
        self._thread = threading.Thread(
            target=_keep, args=(me, self._wake), name="headrace-servers", daemon=True
        )
        self._thread.start()
        threading.Thread(
            target=_look_up, args=(me, self._look_again), name="headrace-servers-find", daemon=True
        ).start()

    def join(self) -> None:
        """Wait until all connections have ended. The fleet is closed already."""
        self._thread.join(2 * (_GOODBYE_SECONDS + _END_SECONDS))

    def wake(self) -> None:
        self._wake.put(None)

    def look_again(self) -> None:
        """Look up servers now: others were given, or the fleet is closed."""
        self._look_again.put(None)

    def wake_if_resting(self) -> None:
        if self._rests:
            self._rests = False
            self.wake()

    @property
    def is_over(self) -> bool:
        return self._fleet.is_closed

    def keep(self) -> float:
        """Do what is due; returns how long there is nothing to do unless something happens."""
        talk, now = self._talk, time.monotonic()
        with talk.lock:
            self._fleet.let_go()
            peers = list(self._fleet.peers.values())
            due = [peer for peer in peers if self._must_connect(peer, now)]
            late = [peer for peer in peers if _is_late(peer, now)]
            actions = talk.dispatch.look(now)
            self._rests = not talk.dispatch.is_wanted
        talk.carry_out(actions)
        for peer in late:
            reason = f"it did not say hello within {_HELLO_SECONDS:g} seconds"
            talk.lost(peer, peer.generation, reason, close=True)
        for peer in due:
            self._connect(peer)
        for peer in peers:
            if peer.connection is not None:
                peer.connection.tick()
        self._look_after_local(now)
        self._tell_if_nobody(now)
        times = [peer.again_at for peer in peers if peer.connection is None]
        if not self._rests or any(peer.connecting_since for peer in peers):
            times.append(now + _TICK_SECONDS)
        return max(0.01, min(times) - time.monotonic()) if times else 1.0

    def end(self) -> None:
        """End all connections, those that were given up too: no thread may be in Arrow when the interpreter ends."""
        connections = list(self._connections)
        for connection in connections:
            connection.end()
        connections = _not_ended(connections, _GOODBYE_SECONDS)
        for connection in connections:
            connection.close()
        _not_ended(connections, _END_SECONDS)

    # Servers

    def look_up(self) -> None:
        found = self._discovery.look()
        self._fleet.meet(found)
        self.has_looked_up = True
        self.wake()

    @property
    def looks_again_after(self) -> float:
        return _LOOK_UP_SECONDS if self._discovery.may_change else _REST_SECONDS

    def _must_connect(self, peer: Peer, now: float) -> bool:
        if peer.connection is not None or now < peer.again_at or self._fleet.is_closed:
            return False
        peer.connecting_since, peer.generation = now, peer.generation + 1
        return True

    def _connect(self, peer: Peer) -> None:
        address, events = peer.address, self._talk.events_of(peer)
        assert isinstance(address, Address)
        connection: Connection
        if address.scheme == "unix":
            connection = UnixConnection(address.path, events)
        else:
            try:
                # Only now: a client that talks to its own machine needs no Arrow Flight.
                from headrace.serve.flight_client import FlightConnection
            except ImportError as error:
                events.unusable(str(missing_flight(error)))
                events.lost("Arrow Flight is missing")
                return
            connection = FlightConnection(address, self._credentials, events)
        self._start(peer, connection)

    def _start(self, peer: Peer, connection: Connection) -> None:
        self._connections.add(connection)
        # Before it starts, since it may be lost at once.
        peer.connection = connection
        connection.start()

    # This machine

    def add_local(self, local: Local) -> None:
        """Let processes of this machine take part like one more server."""
        name = f"this machine ({local.workers} {'worker' if local.workers == 1 else 'workers'})"
        peer = Peer(name, local.workers, is_last_resort=local.is_fallback, most=local.most_tickets())
        with self._talk.lock:
            self._talk.dispatch.servers.append(peer)
        self._local = local, peer
        if not local.is_fallback:
            self._start_local(local, peer)

    def _start_local(self, local: Local, peer: Peer) -> None:
        self._start(peer, local.connect(self._talk.events_of(peer)))

    def _look_after_local(self, now: float) -> None:
        """Start the fallback when no server has been there for a while; keep the others from taking all cores."""
        if self._local is None:
            return
        local, peer = self._local
        dispatch = self._talk.dispatch
        since = dispatch.nobody_since()
        is_needed = since is not None and now - since >= dispatch.grace_seconds
        if local.is_fallback and peer.connection is None and is_needed and dispatch.is_wanted:
            self._start_local(local, peer)
        peer.most = None if is_needed and local.may_help_out else local.most_tickets()

    # Words

    def _tell_if_nobody(self, now: float) -> None:
        """Say it in the log when batches are wanted and no server is there, and again when one is."""
        dispatch = self._talk.dispatch
        since = dispatch.nobody_since()
        if since is None:
            if self._gone_since is not None:
                _log.warning("a server is there again, after %.0f s", now - self._gone_since)
            self._gone_since = None
        elif self._gone_since is None and dispatch.is_wanted:
            self._tell_that_nobody_is_there(since, now)

    def _tell_that_nobody_is_there(self, since: float, now: float) -> None:
        helps_out = self._local is not None and self._local[0].may_help_out
        if now - since <= (self._talk.dispatch.grace_seconds if helps_out else TELL_SECONDS):
            return
        self._gone_since = since
        servers = self._fleet.describe_servers()
        if helps_out:
            _log.warning(
                "no server can be reached: batches are made on this machine until one is there again: %s",
                servers,
            )
        else:
            _log.warning("no server can be reached, and a loop waits for one: %s", servers)


_flight_process: int | None = None
"""The process that was the first to use Arrow Flight: its forks must not."""


def refuse_flight_after_fork() -> None:
    """An error in a forked process whose parent has used Arrow Flight: gRPC would crash or hang there."""
    global _flight_process
    if _flight_process is None:
        _flight_process = os.getpid()
    elif _flight_process != os.getpid():
        raise StageError(
            "addresses with grpc:// cannot be used in a process that was forked from one that uses them; start the "
            "process with multiprocessing's 'spawn', make the RemoteLoader only in the forked process, or use unix://"
        )


def _not_ended(connections: Sequence[Connection], seconds: float) -> list[Connection]:
    """Those whose threads have not ended in that time, which is for all of them together."""
    deadline = time.monotonic() + seconds
    return [each for each in connections if not each.join(max(0.0, deadline - time.monotonic()))]


def _is_late(peer: Peer, now: float) -> bool:
    return peer.connecting_since is not None and now - peer.connecting_since > _HELLO_SECONDS


def _keep(me: "weakref.ref[Keeper]", wake: "queue.SimpleQueue[None]") -> None:
    while (keeper := me()) is not None:
        if keeper.is_over:
            keeper.end()
            return
        seconds = keeper.keep()
        del keeper
        wait(wake, min(seconds, 1.0))
        while not wake.empty():
            wait(wake, 0)


def _look_up(me: "weakref.ref[Keeper]", look_again: "queue.SimpleQueue[None]") -> None:
    while (keeper := me()) is not None and not keeper.is_over:
        keeper.look_up()
        seconds = keeper.looks_again_after
        del keeper
        wait(look_again, seconds)
