"""A connection to a server that never makes anyone wait: connecting, securing and sending go as far as they can go at
once, and `events` says what to wait for before they go on. So one thread can make many connections at the same time.
"""

import contextlib
import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from headrace.errors import SettingsError
from headrace.store.http_messages import Host
from headrace.store.remote_errors import NO_TLS

_WOKEN_BY_BYTES = 1 << 21
_IS_CONNECTING = (errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK)

Address = tuple[int, Any]
"""A family of addresses, and an address of it."""
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "UNKNOWN_PROTOCOL",
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
    "RECORD_LAYER_FAILURE",
)
"""What an answer without TLS looks like to the library, in its several versions."""


class ConnectionFailure(Exception):
    """There was no answer, or only a part of one. The text says why."""


def addresses_of(host: Host) -> list[Address]:
    """The addresses of a host, in the order in which they should be tried."""
    try:
        found = socket.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise ConnectionFailure(reason_of(error)) from None
    return [(family, address) for family, _, _, _, address in found]


class Connection:
    def __init__(self, host: Host, addresses: Sequence[Address]) -> None:
        self.host = host
        self.used_at = time.monotonic()
        self._untried = list(addresses)
        self._is_connected = self._is_secured = False
        self._unsent = memoryview(b"")
        self._woken_by_bytes = 1
        self.events = select.POLLOUT
        """What to wait for before `push`, or before receiving when everything is sent."""
        self._connect()

    def _connect(self) -> None:
        """Begin to connect to the next address."""
        family, self._address = self._untried.pop(0)
        try:
            self.socket = socket.socket(family, socket.SOCK_STREAM)
            self.socket.setblocking(False)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConnectionFailure(reason_of(error)) from None
        self._has_connected()

    def _has_connected(self) -> bool:
        found = self.socket.connect_ex(self._address)
        if found in _IS_CONNECTING:
            return False
        if found in (0, errno.EISCONN):
            self._is_connected = True
            return True
        self.socket.close()
        if not self._untried:
            raise ConnectionFailure(reason_of(OSError(found, os.strerror(found))))
        self._connect()
        return self._is_connected

    def try_next(self) -> bool:
        """Leave an address that does not answer for the next one, if there is one."""
        if self._is_connected or not self._untried:
            return False
        self.socket.close()
        self._connect()
        return True

    def _has_secured(self) -> bool:
        if not self.host.is_secure:
            return True
        if not isinstance(self.socket, ssl.SSLSocket):
            self.socket = _tls().wrap_socket(
                self.socket, server_hostname=self.host.name, do_handshake_on_connect=False
            )
        try:
            self.socket.do_handshake()
        except ssl.SSLWantReadError:
            self.events = select.POLLIN
            return False
        except ssl.SSLWantWriteError:
            self.events = select.POLLOUT
            return False
        return True

    def send(self, content: bytes) -> None:
        """Send something, now or when `push` is called."""
        self._unsent = memoryview(content)
        self.push()

    @property
    def is_sent(self) -> bool:
        return self._is_secured and not self._unsent

    def push(self) -> bool:
        """Go on with what was begun; True if everything is sent, and an answer can come."""
        try:
            if not self._is_connected:
                self.events = select.POLLOUT
                if not self._has_connected():
                    return False
            if not self._is_secured:
                self._is_secured = self._has_secured()
                if not self._is_secured:
                    return False
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            self.events = select.POLLOUT
            return False
        except (OSError, ValueError) as error:
            raise ConnectionFailure(reason_of(error)) from None
        self.events = select.POLLIN
        return True

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


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    bundle = os.environ.get("AWS_CA_BUNDLE") or None
    try:
        return ssl.create_default_context(cafile=bundle)
    except OSError:
        raise SettingsError(f"AWS_CA_BUNDLE={bundle}: cannot be read as a file of certificates") from None


def reason_of(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "the host's name cannot be resolved"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "the certificate of the server is not trusted"
    if isinstance(error, ssl.SSLError) and error.reason in _NOT_TLS:
        return NO_TLS
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused"
    if isinstance(error, TimeoutError):
        return "there was no answer in time"
    if isinstance(error, ConnectionError):
        return "the connection was reset"
    return "no connection could be made"
