"""HTTP requests without bodies, over connections that are kept.

Object stores need little of HTTP, and what they send goes from the kernel straight into the memory that it is for: that
takes half the processor time of a general client. There are no threads and no state of foreign libraries in here, so a
process may fork or end in the middle of a request.
"""

import os
import ssl
import time
import weakref

from headrace.fork_lock import fork_lock
from headrace.store.http_bodies import Body, GrowingBody, body_for
from headrace.store.http_connection import Address, Connection, ConnectionFailure, addresses_of, reason_of
from headrace.store.http_messages import Answer, Host, Request, parsed_head

_MOST_HEAD_BYTES = 1 << 16
_IDLE_SECONDS = 15.0
"""Servers close connections that were not used for a while. Ours are not used again after this time."""
_MOST_IDLE = 128
_ADDRESSES_SECONDS = 10.0
"""How long the addresses of a host are used again."""
_MOST_HEDGES = 4
_LEAST_BYTES_PER_SECOND = 1 << 16
_HEAD_AT_ONCE = 1 << 12


class Connections:
    """Connections to any hosts. Threads may share it."""

    def __init__(self, connect_seconds: float, read_seconds: float) -> None:
        self.connect_seconds, self.read_seconds = connect_seconds, read_seconds
        self._idle: list[Connection] = []
        weakref.finalize(self, _close_all, self._idle)
        self._addresses: dict[Host, tuple[float, list[Address]]] = {}
        self._hedges = 0
        self._owner = os.getpid()
        self._lock = fork_lock()

    def ask(self, request: Request) -> "Exchange":
        """Begin to send a request, over a connection that is there or a new one. Nothing waits here."""
        while True:
            connection = self._idle_connection(request.host)
            is_used = connection is not None
            if connection is None:
                connection = self._new_connection(request.host)
            try:
                connection.send(request.encoded())
                return Exchange(self, connection, request, is_used)
            except ConnectionFailure:
                connection.close()
                if not is_used:
                    self._addresses.pop(request.host, None)
                    raise

    def _new_connection(self, host: Host) -> Connection:
        found_at, addresses = self._addresses.get(host, (0.0, []))
        now = time.monotonic()
        if not addresses or not 0 <= now - found_at < _ADDRESSES_SECONDS:
            addresses = addresses_of(host)
            self._addresses[host] = now, addresses
        return Connection(host, addresses)

    def forget_addresses(self, host: Host) -> None:
        """The host may have others by now."""
        self._addresses.pop(host, None)

    def _idle_connection(self, host: Host) -> Connection | None:
        while True:
            connection = self._pop_idle(host)
            if connection is None or connection.is_silent():
                return connection
            connection.close()

    def _pop_idle(self, host: Host) -> Connection | None:
        with self._lock:
            self._forget_unusable()
            # The one that was used last is the least likely to have been closed.
            for number in reversed(range(len(self._idle))):
                if self._idle[number].host == host:
                    return self._idle.pop(number)
        return None

    def may_hedge(self) -> bool:
        """Whether there are few enough requests that were sent twice; `has_hedged` tells that one is over."""
        with self._lock:
            if self._hedges >= _MOST_HEDGES:
                return False
            self._hedges += 1
            return True

    def has_hedged(self) -> None:
        with self._lock:
            self._hedges -= 1

    def keep(self, connection: Connection) -> None:
        connection.used_at = time.monotonic()
        with self._lock:
            self._forget_unusable()
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _forget_unusable(self) -> None:
        if self._owner != os.getpid():
            # They belong to the process that this one was forked from, where they stay open.
            _close_all(self._idle)
            self._owner, self._hedges = os.getpid(), 0
        since = time.monotonic() - _IDLE_SECONDS
        while self._idle and self._idle[0].used_at < since:
            self._idle.pop(0).close()


def _close_all(connections: list[Connection]) -> None:
    while connections:
        connections.pop().close()


class Exchange:
    """A request that was sent, and as much of the answer as has come."""

    def __init__(self, owner: Connections, connection: Connection, request: Request, is_used: bool) -> None:
        self.connection = connection
        self._began_at = self._heard_at = time.monotonic()
        self.answer: Answer | None = None
        self.failure: ConnectionFailure | None = None
        self._owner, self._request, self._is_used = owner, request, is_used
        self._head = bytearray()
        self._status, self._headers = 0, dict[str, str]()
        self._body: Body | GrowingBody | None = None

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.failure is not None

    def advance(self) -> bool:
        """Take what has come; whether there was anything."""
        has_heard = False
        while not self.is_over:
            try:
                if not self.connection.is_sent and not self.connection.push():
                    break
                count = self._receive()
            except ConnectionFailure as failure:
                self._ended(str(failure), is_clean=False)
                break
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError as error:
                self._ended(reason_of(error), is_clean=False)
                break
            except ValueError:
                self.fail("the answer is not HTTP")
                break
            if not count:
                self._ended("the connection was closed", is_clean=True)
                break
            has_heard = True
        if has_heard:
            self._heard_at = time.monotonic()
        return has_heard or self.is_over

    def deadline(self) -> float:
        """When to give up: nothing more came for a while, or it comes so slowly that another attempt is better."""
        if not self.connection.is_sent:
            return self._began_at + self._owner.connect_seconds
        read_seconds = self._owner.read_seconds
        if self._body is None:
            return self._began_at + read_seconds
        slowest = self._began_at + 6 * read_seconds + self._body.length / _LEAST_BYTES_PER_SECOND
        return min(self._heard_at + read_seconds, slowest)

    def expire(self) -> None:
        """The deadline is past. If the host has more addresses, the next one is tried."""
        try:
            if not self.connection.is_sent and self.connection.try_next():
                self._began_at = time.monotonic()
                return
        except ConnectionFailure:
            pass
        self._owner.forget_addresses(self._request.host)
        self.fail("there was no answer in time")

    def expect(self) -> int:
        """Before waiting for more; the events to wait for."""
        if self.connection.is_sent:
            self.connection.wake_for(1 if self._body is None else self._body.missing)
        return self.connection.events

    def fail(self, reason: str) -> None:
        self.failure = ConnectionFailure(reason)
        self.connection.close()

    def drop(self) -> None:
        """The answer is not needed any more."""
        if not self.is_over:
            self.fail("the answer was not needed")

    def _receive(self) -> int:
        if self._body is None:
            came = self.connection.socket.recv(_HEAD_AT_ONCE)
            self._head += came
            self._parse_head()
            return len(came)
        view = self._body.space()
        count = self.connection.socket.recv_into(view)
        self._body.add(count)
        self._look_for_the_end()
        return count

    def _parse_head(self) -> None:
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > _MOST_HEAD_BYTES:
                self.fail("the answer is not HTTP")
            return
        status, headers = parsed_head(bytes(self._head[:end]))
        came = bytes(self._head[end + 4 :])
        if not status:
            self.fail("the answer is not HTTP")
            return
        if 100 <= status < 200:
            self._head = bytearray(came)
            self._parse_head()
            return
        self._status, self._headers = status, headers
        has_none = self._request.method == "HEAD" or status in (204, 304)
        self._body = body_for(headers, 0 if has_none else self._request.most_bytes, has_none)
        self._body.take(came)
        self._look_for_the_end()

    def _look_for_the_end(self) -> None:
        body = self._body
        if body is None or self.is_over or not (body.is_complete or body.is_too_long):
            return
        seconds = time.monotonic() - self._began_at
        self.answer = Answer(self._status, self._headers, body.content(), not body.is_too_long, seconds)
        is_last = self._headers.get("connection", "").lower() == "close"
        if body.is_too_long or body.has_more or is_last:
            self.connection.close()
        else:
            self._owner.keep(self.connection)

    def _ended(self, reason: str, is_clean: bool) -> None:
        """The connection is over; `is_clean` if the server has closed it."""
        if is_clean and self._body is not None and self._body.ends_with_connection:
            self._body.is_complete = True
            self._headers = {**self._headers, "connection": "close"}
            self._look_for_the_end()
        elif self._is_used and self._body is None and not self._head:
            # It was closed while nobody used it: that is no failure, and the next one is a new one.
            self.connection.close()
            try:
                self._begin_again()
            except ConnectionFailure as error:
                self.failure = error
        else:
            if not self.connection.is_sent:
                self._owner.forget_addresses(self._request.host)
            self.fail("the answer was cut off" if self._body is not None else reason)

    def _begin_again(self) -> None:
        fresh = self._owner.ask(self._request)
        self.connection, self._is_used = fresh.connection, fresh._is_used
        self._began_at = self._heard_at = time.monotonic()
