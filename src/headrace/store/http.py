"""HTTP requests without bodies, over connections that are kept.

Object stores need little of HTTP, and what they send goes from the kernel straight into the memory that it is for: that
takes half the processor time of a general client. There are no threads and no state of foreign libraries in here, so a
process may fork or end in the middle of a request.
"""

import contextlib
import math
import os
import select
import socket
import ssl
import time
import weakref
from functools import lru_cache

from headrace.errors import SettingsError
from headrace.fork_lock import fork_lock
from headrace.store.http_bodies import Body, GrowingBody, body_for
from headrace.store.http_messages import Answer, Host, Request, parsed_head

_MOST_HEAD_BYTES = 1 << 16
_IDLE_SECONDS = 15.0
"""Servers close connections that were not used for a while. Ours are not used again after this time."""
_MOST_IDLE = 128
_MOST_HEDGES = 4
_HEDGE_CONNECT_SECONDS = 0.5
"""While a second connection is made, nobody looks at the first one."""
_LEAST_BYTES_PER_SECOND = 1 << 16
_WOKEN_BY_BYTES = 1 << 19
_HEAD_AT_ONCE = 1 << 12


class ConnectionFailure(Exception):
    """There was no answer, or only a part of one. The text says why."""


class Connections:
    """Connections to any hosts. Threads may share it."""

    def __init__(self, connect_seconds: float, read_seconds: float) -> None:
        self._connect_seconds, self._read_seconds = connect_seconds, read_seconds
        self._idle: list[_Connection] = []
        weakref.finalize(self, _close_all, self._idle)
        self._hedges = 0
        self._owner = os.getpid()
        self._lock = fork_lock()

    def ask(self, request: Request, most_seconds: float = math.inf) -> "Exchange":
        """Send a request, for which a connection is made within `most_seconds`. `first_answer` gives the answer."""
        while True:
            connection = self._idle_connection(request.host)
            is_used = connection is not None
            if connection is None:
                connection = _Connection(request.host, min(self._connect_seconds, most_seconds))
            try:
                connection.send(request.encoded(), self._read_seconds)
                return Exchange(self, connection, request, is_used)
            except ConnectionFailure:
                connection.close()
                if not is_used:
                    raise

    def wait(self, exchanges: "list[Exchange]", seconds: float) -> None:
        """Wait until something has come for one of them, or for so long."""
        waiting = select.poll()
        for exchange in exchanges:
            exchange.expect()
            waiting.register(exchange.connection.socket, select.POLLIN)
        left = min(exchange.deadline(self._read_seconds) for exchange in exchanges) - time.monotonic()
        waiting.poll(max(1.0, min(seconds, left) * 1000))
        for exchange in exchanges:
            if time.monotonic() < exchange.deadline(self._read_seconds):
                continue
            exchange.advance()
            if not exchange.is_over and time.monotonic() >= exchange.deadline(self._read_seconds):
                exchange.fail("there was no answer in time")

    def _idle_connection(self, host: Host) -> "_Connection | None":
        while True:
            connection = self._pop_idle(host)
            if connection is None or connection.is_silent():
                return connection
            connection.close()

    def _pop_idle(self, host: Host) -> "_Connection | None":
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

    def keep(self, connection: "_Connection") -> None:
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


def _close_all(connections: "list[_Connection]") -> None:
    while connections:
        connections.pop().close()


class _Connection:
    def __init__(self, host: Host, connect_seconds: float) -> None:
        self.host = host
        self.used_at = time.monotonic()
        self._woken_by_bytes = 1
        try:
            self.socket = socket.create_connection((host.name, host.port), connect_seconds)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if host.is_secure:
                self.socket = _tls().wrap_socket(self.socket, server_hostname=host.name)
        except (OSError, ValueError) as error:
            raise ConnectionFailure(_reason(error)) from None

    def send(self, content: bytes, seconds: float) -> None:
        try:
            self.socket.settimeout(seconds)
            self.socket.sendall(content)
            self.socket.setblocking(False)
        except OSError as error:
            raise ConnectionFailure(_reason(error)) from None

    def is_silent(self) -> bool:
        """Whether nothing has come since the last answer: neither the end, nor anything that would be taken for the
        next answer."""
        self.wake_for(1)
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return False
        waiting = select.poll()
        waiting.register(self.socket, select.POLLIN)
        return not waiting.poll(0)

    def wake_for(self, count: int) -> None:
        """Whoever waits is woken when so many bytes have come, and not for every packet."""
        count = max(1, min(count, _WOKEN_BY_BYTES)) if not self.host.is_secure else 1
        if count != self._woken_by_bytes:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
                self._woken_by_bytes = count

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


class Exchange:
    """A request that was sent, and as much of the answer as has come."""

    def __init__(self, owner: Connections, connection: _Connection, request: Request, is_used: bool) -> None:
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
                count = self._receive()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError as error:
                self._ended(_reason(error), is_clean=False)
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

    def deadline(self, read_seconds: float) -> float:
        """When to give up: nothing more came for a while, or it comes so slowly that another attempt is better."""
        if self._body is None:
            return self._began_at + read_seconds
        slowest = self._began_at + 6 * read_seconds + self._body.length / _LEAST_BYTES_PER_SECOND
        return min(self._heard_at + read_seconds, slowest)

    def expect(self) -> None:
        """Before waiting for more."""
        self.connection.wake_for(1 if self._body is None else self._body.missing)

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
        self.answer = Answer(self._status, self._headers, body.content(), not body.is_too_long)
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
            self.fail("the answer was cut off" if self._body is not None else reason)

    def _begin_again(self) -> None:
        fresh = self._owner.ask(self._request)
        self.connection, self._is_used = fresh.connection, fresh._is_used
        self._began_at = self._heard_at = time.monotonic()


def first_answer(connections: Connections, request: Request, patience: float | None) -> Answer:
    """The answer to a request. It is sent a second time if it takes longer than `patience`: the first answer counts."""
    began, is_hedged = time.monotonic(), False
    exchanges = [connections.ask(request)]
    try:
        while True:
            for exchange in exchanges:
                exchange.advance()
            answers = [exchange.answer for exchange in exchanges if exchange.answer is not None]
            going = [exchange for exchange in exchanges if not exchange.is_over]
            # A server that is overloaded refuses the second request quickly, while the first one may still succeed.
            final = [answer for answer in answers if answer.status < 500 and answer.status != 429]
            if final or (answers and not going):
                return (final or answers)[0]
            if not going:
                raise exchanges[0].failure or ConnectionFailure("there was no answer")
            left = math.inf if patience is None else began + patience - time.monotonic()
            if left > 0:
                connections.wait(going, left)
                continue
            patience, is_hedged = None, connections.may_hedge()
            if is_hedged:
                with contextlib.suppress(ConnectionFailure):
                    exchanges.append(connections.ask(request, _HEDGE_CONNECT_SECONDS))
    finally:
        for exchange in exchanges:
            exchange.drop()
        if is_hedged:
            connections.has_hedged()


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    bundle = os.environ.get("AWS_CA_BUNDLE") or None
    try:
        return ssl.create_default_context(cafile=bundle)
    except OSError:
        raise SettingsError(f"AWS_CA_BUNDLE={bundle}: cannot be read as a file of certificates") from None


def _reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "the host's name cannot be resolved"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "the certificate of the server is not trusted"
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused"
    if isinstance(error, TimeoutError):
        return "there was no answer in time"
    if isinstance(error, ConnectionError):
        return "the connection was reset"
    return "no connection could be made"
