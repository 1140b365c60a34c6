"""An HTTP proxy that stands in front of a server and injects faults, adds latency and limits bandwidth.

    with FaultProxy(server.port) as proxy:
        proxy.add(Answer(503, "SlowDown"), method="GET", path=r"shard-", count=3)
        ...                        # a client that talks to proxy.endpoint
        assert proxy.requests["GET"] == 4

Each connection of a client has a thread and a connection to the server. Requests are passed on byte for byte, so that
signatures stay valid (the server checks them against the Host that the client has signed, which is the proxy's).
Bodies go through a pipe in the kernel (`splice`), so that the proxy costs little. Benchmarks run it in a process of its
own: `python -m tests.fault_proxy --port 8333 --latency-seconds 0.03 --bytes-per-second 300e6` prints its port, and how
many requests there were when it is ended.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Answer:
    """An answer that the server never sees the request of."""

    status: int
    code: str = ""
    """The code of an error in S3's XML."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None

    def content(self) -> bytes:
        if self.body is not None:
            return self.body
        return f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>injected</Message></Error>".encode()


@dataclass(frozen=True)
class Truncate:
    """The connection ends after so many bytes of the body."""

    keep: int


@dataclass(frozen=True)
class Stall:
    """Nothing more comes after so many bytes of the body, or nothing at all; the connection stays open."""

    after: int | None = None


@dataclass(frozen=True)
class Hold:
    """The request is passed on when the event is set."""

    release: threading.Event


@dataclass(frozen=True)
class Flip:
    """All bits of one byte of the body are wrong."""

    at: int


@dataclass(frozen=True)
class Reset:
    """The connection is reset; with `after_server`, the server has done what was asked, but the answer is lost."""

    after_server: bool = False


Fault = Answer | Truncate | Stall | Hold | Flip | Reset


@dataclass
class Rule:
    fault: Fault
    method: str
    path: str
    skip: int
    """How many requests pass before the first fault."""
    count: float
    """How many requests have the fault."""

    def applies(self, method: str, path: str) -> bool:
        if self.method not in ("", method) or not re.search(self.path, path):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.count -= 1
        return self.count >= 0


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str
    """The header of that name; empty if there is none."""


class Gone(Exception):
    """A connection has ended, as connections do."""


class FaultProxy:
    def __init__(
        self, upstream: int, *, latency_seconds: float = 0.0, bytes_per_second: float | None = None
    ) -> None:
        self.latency_seconds = latency_seconds
        self.requests: Counter[str] = Counter()
        """By method, as all counters here."""
        self.sent_bytes: Counter[str] = Counter()
        """Of bodies, to clients."""
        self.log: list[Request] = []
        self.most_in_flight = 0
        self._upstream = upstream
        self._in_flight = 0
        self._bucket = _Bucket(bytes_per_second) if bytes_per_second else None
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self.accept()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()

    def add(
        self, fault: Fault, *, method: str = "", path: str = "", skip: int = 0, count: float = float("inf")
    ) -> None:
        """The first rule that fits a request decides; `path` is a regular expression, found anywhere in it."""
        with self._lock:
            self._rules.append(Rule(fault, method, path, skip, count))

    def clear(self) -> None:
        """Forget all rules and counts."""
        with self._lock:
            self._rules.clear()
            self.log.clear()
            self.requests.clear()
            self.sent_bytes.clear()
            self.most_in_flight = 0

    def accept(self) -> None:
        """Take connections, on the same port as before."""
        listener = socket.create_server(("127.0.0.1", self.port), backlog=256)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def refuse(self) -> None:
        """Be gone: end all connections, and refuse new ones."""
        if self._listener is not None:
            _end(self._listener)
            self._listener = None
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            # The thread that uses it wakes up and closes it.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    # The threads

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._converse, args=(client,), daemon=True).start()

    def _converse(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = socket.socket()
        pipe = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, _CHUNK)
        with self._lock:
            self._sockets |= {client, server}
        try:
            server.connect(("127.0.0.1", self._upstream))
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            exchange = _Exchange(_Line(client), _Line(server), pipe, self._bucket)
            while True:
                self._one_request(exchange)
        except (Gone, OSError):
            pass
        finally:
            with self._lock:
                self._sockets -= {client, server}
            for one in (client, server):
                one.close()
            for end in pipe:
                os.close(end)

    def _one_request(self, exchange: "_Exchange") -> None:
        head = exchange.client.read_head()
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        fault = self._note(Request(method, path, _header(head, b"range")))
        try:
            if self.latency_seconds:
                time.sleep(self.latency_seconds)
            sent = exchange.carry_out(method, head, fault)
        finally:
            with self._lock:
                self._in_flight -= 1
        with self._lock:
            self.sent_bytes[method] += sent

    def _note(self, request: Request) -> Fault | None:
        with self._lock:
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            self.requests[request.method] += 1
            self.log.append(request)
            for rule in self._rules:
                if rule.applies(request.method, request.path):
                    return rule.fault
        return None


class _Exchange:
    """One request after the other, from a client to the server and back."""

    def __init__(
        self, client: "_Line", server: "_Line", pipe: tuple[int, int], bucket: "_Bucket | None"
    ) -> None:
        self.client, self.server = client, server
        self._pipe, self._bucket = pipe, bucket

    def carry_out(self, method: str, head: bytes, fault: Fault | None) -> int:
        """Pass a request on and its answer back, or what the fault makes of them; how many bytes the body had."""
        length = int(_header(head, b"content-length") or 0)
        if isinstance(fault, Answer):
            self._pass_on(self.client, None, length)
            return self._answer(fault, method)
        if isinstance(fault, Reset) and not fault.after_server:
            self.client.reset()
        if isinstance(fault, Stall) and fault.after is None:
            self._stall()
        if isinstance(fault, Hold):
            fault.release.wait()
        self.server.socket.sendall(head)
        self._pass_on(self.client, self.server, length)
        answer = self.server.read_head()
        if isinstance(fault, Reset):
            self.client.reset()
        self.client.socket.sendall(answer)
        return self._pass_back(method, answer, fault)

    def _pass_back(self, method: str, answer: bytes, fault: Fault | None) -> int:
        status = int(answer.split(b" ", 2)[1])
        if method == "HEAD" or status in (204, 304):
            return 0
        if _header(answer, b"transfer-encoding").lower() == "chunked":
            return self._pass_chunks()
        length = int(_header(answer, b"content-length") or 0)
        if isinstance(fault, Truncate):
            self._pass_on(self.server, self.client, min(fault.keep, length))
            raise Gone
        if isinstance(fault, Stall):
            self._pass_on(self.server, self.client, min(fault.after or 0, length))
            self._stall()
        if isinstance(fault, Flip) and fault.at < length:
            self._pass_on(self.server, self.client, fault.at)
            wrong = self.server.read(1)[0] ^ 0xFF
            self.client.socket.sendall(bytes([wrong]))
            self._pass_on(self.server, self.client, length - fault.at - 1)
        else:
            self._pass_on(self.server, self.client, length)
        return length

    def _pass_chunks(self) -> int:
        total = 0
        while True:
            line = self.server.read_until(b"\r\n")
            self.client.socket.sendall(line)
            size = int(line.split(b";")[0], 16)
            self._pass_on(self.server, self.client, size + 2)
            total += size
            if size == 0:
                return total

    def _pass_on(self, source: "_Line", target: "_Line | None", count: int) -> None:
        """Move bytes from one connection to the other, or to nowhere."""
        held = source.take_held(count)
        if target is not None:
            target.socket.sendall(held)
        count -= len(held)
        while count:
            if target is None:
                count -= len(source.receive(min(count, _CHUNK)))
                continue
            moved = os.splice(source.socket.fileno(), self._pipe[1], min(count, _CHUNK))
            if not moved:
                raise Gone
            if self._bucket:
                self._bucket.take(moved)
            left = moved
            while left:
                left -= os.splice(self._pipe[0], target.socket.fileno(), left)
            count -= moved

    def _answer(self, answer: Answer, method: str) -> int:
        body = answer.content()
        headers = {
            "Content-Length": str(len(body)),
            "Content-Type": "application/xml",
            "Last-Modified": formatdate(usegmt=True),
            "ETag": '"injected"',
            **answer.headers,
        }
        lines = [
            f"HTTP/1.1 {answer.status} Injected",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        self.client.socket.sendall(head if method == "HEAD" else head + body)
        return len(body)

    def _stall(self) -> None:
        """Wait until the client gives up."""
        while self.client.socket.recv(_CHUNK):
            pass
        raise Gone


class _Line:
    """A connection, and the bytes that were received with a head and belong to what follows."""

    def __init__(self, socket: socket.socket) -> None:
        self.socket = socket
        self._held = b""

    def receive(self, count: int) -> bytes:
        content = self.socket.recv(count)
        if not content:
            raise Gone
        return content

    def read_head(self) -> bytes:
        return self.read_until(b"\r\n\r\n")

    def read_until(self, end: bytes) -> bytes:
        while end not in self._held:
            self._held += self.receive(1 << 16)
        found, self._held = self._held.split(end, 1)
        return found + end

    def read(self, count: int) -> bytes:
        while len(self._held) < count:
            self._held += self.receive(1 << 16)
        return self.take_held(count)

    def take_held(self, count: int) -> bytes:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
        raise Gone


class _Bucket:
    """So many bytes a second, over all connections: who takes more than there is waits for its share."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._paid_until = time.monotonic()

    def take(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._paid_until = max(self._paid_until, now) + count / self._rate
            debt = self._paid_until - now
        # Short debts add up to a sleep worth its cost.
        if debt > 0.002:
            time.sleep(debt)


def _header(head: bytes, name: bytes) -> str:
    found = re.search(rb"\r\n" + name + rb":[ \t]*([^\r\n]*)", head, re.IGNORECASE)
    return found[1].decode("latin-1").strip() if found else ""


def _end(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Stand in front of a server on loopback, as a slower one.")
    parser.add_argument("--port", type=int, required=True, help="the server's port")
    parser.add_argument("--latency-seconds", type=float, default=0.0)
    parser.add_argument("--bytes-per-second", type=float)
    options: Any = parser.parse_args()
    ending = {signal.SIGTERM, signal.SIGINT}
    # Before any thread is started, which would inherit the default: to die without a word.
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    with FaultProxy(
        options.port, latency_seconds=options.latency_seconds, bytes_per_second=options.bytes_per_second
    ) as proxy:
        print(proxy.port, flush=True)
        signal.sigwait(ending)
        print(json.dumps(proxy.requests), flush=True)


if __name__ == "__main__":
    main()
