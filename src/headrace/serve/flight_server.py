"""Clients on other machines: Arrow Flight, with TLS and a bearer token.

A client opens an exchange. What it writes are messages without data; what it reads are replies, as the metadata of a
record batch with one row. The first answers of the list find their bytes in the columns of that row. A batch that is
larger than a part goes on in the first column of the record batches that follow:

    metadata                                        "body 0"                "body 1"            ... "body 7"
    [Answer(6, head, 500,000), Pong(8),
     Answer(9, head, 20,000)]                       the 500,000 bytes       the 20,000 bytes
    [Answer(7, head, 5,000,000)]                    the first 2,097,152
    (none)                                          the next 2,097,152
    (none)                                          the last 805,696

gRPC runs each exchange in a thread of its own, which reads; another thread writes.
"""

import asyncio
import contextlib
import hmac
import queue
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.serve import messages
from headrace.serve.flight_peer import end_connection
from headrace.serve.flight_start import starting_flight
from headrace.serve.messages import Answer, ProtocolError, Refused, Reply
from headrace.serve.result import Result
from headrace.serve.service import Service
from headrace.serve.session import Session

BODIES = 8
"""How many batches one message has at most: to send and to receive one costs as much as copying 100 KB."""
SCHEMA = pa.schema([(f"body {number}", pa.large_binary()) for number in range(BODIES)])
_NOTHING = pa.array([b""], pa.large_binary())
_TOGETHER_BYTES = 2**21
PART_BYTES = 2**21
"""The other side copies one part of a batch while the next one arrives; and messages of 2 GB are too long for gRPC."""
_LARGE_BYTES = 2**21
"""Memory of this size is given back at once. For less, waking up the loop would cost more than it is worth."""
_LET_GO_SECONDS = 0.05
_MOST_WAITING = 4
_LOOK_SECONDS = 1.0
_MOST_UNSENT = 4096
"""A client that lets so many replies wait is disconnected."""
_HELLO_SECONDS = 30.0
"""How long a client may take to say what it wants."""
_OFFSETS = struct.Struct("<qq")

_Outgoing = tuple[Reply, Result | None] | None


class FlightListener(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        *,
        certificate: bytes | None = None,
        key: bytes | None = None,
    ) -> None:
        self._service, self._loop = service, asyncio.get_running_loop()
        self._is_listening = True
        self.scheme = "grpc" if certificate is None else "grpc+tls"
        options: dict[str, Any] = {}
        if certificate is not None and key is not None:
            options["tls_certificates"] = [(certificate, key)]
        if service.settings.token is not None:
            options["middleware"] = {"token": _TokenCheck(service.settings.token, self._count_refused)}
        shown = f"[{host}]" if ":" in host else host
        _check_port(host, port)
        try:
            with starting_flight():
                super().__init__(f"{self.scheme}://{shown}:{port}", **options)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise SettingsError(
                f"{self.scheme}://{shown}:{port}: cannot listen there: {reason}; give another port, or check the host, "
                "the certificate and its key"
            ) from None
        self.address = f"{self.scheme}://{shown}:{self.port}"

    def _count_refused(self) -> None:
        self._service.counts.refused += 1

    def stop_listening(self) -> None:
        """Take no new exchanges. Those under way go on."""
        self._is_listening = False

    def close(self) -> None:
        """Nothing waits for clients that are still connected: the process is about to end."""
        self.stop_listening()
        threading.Thread(target=self.shutdown, name="headrace-serve-end", daemon=True).start()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(SCHEMA)
        if not self._is_listening:
            writer.write_metadata(messages.encode([Refused("the server is ending")]))
            return
        outgoing: queue.SimpleQueue[_Outgoing] = queue.SimpleQueue()
        exchange = _Exchange(self._service, self._loop, context.peer(), outgoing)
        if not exchange.begin():
            while not outgoing.empty() and (due := outgoing.get()) is not None:
                writer.write_metadata(messages.encode([due[0]]))
            return
        writing = threading.Thread(
            target=self._write, args=(writer, outgoing, exchange), name="headrace-serve-write", daemon=True
        )
        writing.start()
        try:
            while True:
                sent = reader.read_chunk().app_metadata
                exchange.receive(b"" if sent is None else sent.to_pybytes())
        except (StopIteration, ProtocolError, pa.ArrowException, OSError):
            pass
        finally:
            exchange.end()
            writing.join()

    def _write(self, writer: Any, outgoing: "queue.SimpleQueue[_Outgoing]", exchange: "_Exchange") -> None:
        is_broken = False
        group = _Group(outgoing, exchange)
        while group.take():
            replies, bodies = group.replies, group.bodies
            # Only the writer may refer to them: it may go on sending when `write` has returned.
            group.forget()
            try:
                if not is_broken:
                    for _ in _write_replies(writer, replies, bodies):
                        exchange.has_moved()
            except (pa.ArrowException, OSError):
                # The client is gone, and the thread that reads will see that too.
                is_broken = True
            del bodies


class _Group:
    """Replies that go out in one message, because they were waiting at the same time."""

    def __init__(self, outgoing: "queue.SimpleQueue[_Outgoing]", exchange: "_Exchange") -> None:
        self._outgoing, self._exchange = outgoing, exchange
        self._next: _Outgoing = None
        """What did not fit into the last message."""
        self._is_over = False
        self.forget()

    def forget(self) -> None:
        self.replies: list[Reply] = []
        self.bodies: list[NDArray[np.uint8]] = []
        self._has_answers = False

    def take(self) -> bool:
        """Wait for the next replies; False if there will be none."""
        room = _TOGETHER_BYTES
        while not self._is_over and (self._next or not self.replies or not self._outgoing.empty()):
            due = self._next or self._outgoing.get()
            self._next = None
            if due is None:
                self._is_over = True
                break
            reply, result = due
            size = 0 if result is None else result.body_bytes
            head_bytes = len(reply.head) if isinstance(reply, Answer) else 0
            is_too_much = size + head_bytes > room or size > PART_BYTES
            if self._has_answers and result is not None and (is_too_much or len(self.bodies) == BODIES):
                self._next = due
                break
            # What travels in parts travels alone.
            room = 0 if size > PART_BYTES else room - size - head_bytes
            self._has_answers |= result is not None
            self.replies.append(reply)
            if result is not None:
                body = self._exchange.take_body(result)
                if size:
                    self.bodies.append(body)
        return bool(self.replies)


def _check_port(host: str, port: int) -> None:
    """gRPC would not say why it cannot listen there."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trying:
            trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trying.bind(place)
    except socket.gaierror as error:
        raise SettingsError(f"host={host!r}: {error.strerror}; give an address of this machine") from None
    except OSError as error:
        raise SettingsError(
            f"host={host!r}, port={port}: cannot listen there: {error.strerror or error}; give another port, or 0 to "
            "find a free one"
        ) from None


def _write_replies(writer: Any, replies: list[Reply], bodies: list[NDArray[np.uint8]]) -> Iterator[None]:
    """Write them part by part; each step says that the client has taken something."""
    encoded = messages.encode(replies)
    if not bodies:
        writer.write_metadata(encoded)
        return
    contents = [pa.py_buffer(body) for body in bodies]
    last = contents[-1]
    writer.write_with_metadata(_row([*contents[:-1], last[:PART_BYTES]]), encoded)
    yield
    for first in range(PART_BYTES, last.size, PART_BYTES):
        writer.write_batch(_row([last[first : first + PART_BYTES]]))
        yield


def _row(contents: list[pa.Buffer]) -> Any:
    columns = []
    for content in contents:
        offsets = pa.py_buffer(_OFFSETS.pack(0, content.size))
        columns.append(pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, content]))
    return pa.record_batch(columns + [_NOTHING] * (BODIES - len(columns)), schema=SCHEMA)


class _Exchange:
    """A client's exchange: everything about the service happens in its loop."""

    def __init__(
        self,
        service: Service,
        loop: asyncio.AbstractEventLoop,
        peer: str,
        outgoing: "queue.SimpleQueue[_Outgoing]",
    ) -> None:
        self._service, self._loop, self._outgoing = service, loop, outgoing
        self._peer = peer
        self._session = Session(peer, self._send, self._drop, is_trusted=True)
        self._accepting = threading.Semaphore(_MOST_WAITING)
        """How many more messages may wait for the loop."""
        self._freed: deque[Result] = deque()
        """What gRPC has sent."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = threading.Event()

    def begin(self) -> bool:
        """Whether there is room for another client."""
        answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
        posted = self._in_loop(lambda: self._loop.call_soon_threadsafe(lambda: answer.put(self._connect())))
        return posted and answer.get()

    def _connect(self) -> bool:
        self._loop.call_later(_HELLO_SECONDS, self._look_if_known)
        return self._service.connect(self._session)

    def _look_if_known(self) -> None:
        if not self._session.is_known:
            self._drop()

    def _drop(self) -> None:
        """End it without the client."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._leave()
        # Arrow cannot end an exchange from here, and a write that the client does not take would hold its memory.
        end_connection(self._peer)

    def receive(self, sent: bytes) -> None:
        if self._is_over.is_set():
            raise ProtocolError("this exchange is over")
        requests = messages.decode_requests(sent)
        while not self._accepting.acquire(timeout=_LOOK_SECONDS):
            if self._is_over.is_set() or self._loop.is_closed():
                raise ProtocolError("this exchange is over")
        if not self._in_loop(lambda: self._loop.call_soon_threadsafe(self._accept, requests)):
            self._accepting.release()

    def end(self) -> None:
        self._is_over.set()
        if not self._in_loop(lambda: self._loop.call_soon_threadsafe(self._leave)):
            self._outgoing.put(None)

    def take_body(self, result: Result) -> NDArray[np.uint8]:
        """The bytes of a result, which is let go when nothing refers to them any more.

        gRPC sends from this memory, and is done with it some time after it was told to write.
        """
        body = result.body[:]
        weakref.finalize(body, self._sent, result).atexit = False
        return body

    def _sent(self, result: Result) -> None:
        """Called in some thread of gRPC. Small results are let go with the next request, or a little later."""
        self._freed.append(result)
        if result.body_bytes >= _LARGE_BYTES:
            self._in_loop(lambda: self._loop.call_soon_threadsafe(self._let_go))

    def _in_loop(self, post: Callable[[], object]) -> bool:
        try:
            post()
        except RuntimeError:
            return False  # the loop has ended, and the process is about to
        return True

    def _accept(self, requests: list[messages.Request]) -> None:
        self._accepting.release()
        self._let_go()
        try:
            for request in requests:
                self._service.receive(self._session, request)
        except ProtocolError:
            self._drop()

    def has_moved(self) -> None:
        """The client has taken a part of a message. Called in the thread that writes."""
        self._session.idle_looks = 0

    def _send(self, reply: Reply, result: Result | None) -> None:
        if result is not None:
            self._service.gave(self._session, result)
            if self._timer is None:
                self._timer = self._loop.call_later(_LET_GO_SECONDS, self._look_again)
        self._outgoing.put((reply, result))
        if self._outgoing.qsize() > _MOST_UNSENT + self._service.settings.most_requests:
            self._loop.call_soon(self._drop)

    def _look_again(self) -> None:
        self._timer = None
        self._let_go()
        if self._session.unread:
            self._timer = self._loop.call_later(_LET_GO_SECONDS, self._look_again)

    def _let_go(self) -> None:
        while self._freed:
            self._service.took(self._session, self._freed.popleft())

    def _leave(self) -> None:
        self._service.disconnect(self._session)
        with contextlib.suppress(queue.Empty):
            while (due := self._outgoing.get_nowait()) is not None:
                _, result = due
                if result is not None:
                    self._service.took(self._session, result)
        self._outgoing.put(None)


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls without the right bearer token before anything of theirs is read."""

    def __init__(self, token: str, refused: Callable[[], None]) -> None:
        super().__init__()
        self._expected, self._refused = f"Bearer {token}".encode(), refused

    def start_call(self, info: Any, headers: Any) -> None:
        given = headers.get("authorization") or [""]
        # In constant time, so that nobody can find it out letter by letter.
        if not hmac.compare_digest(str(given[0]).encode(), self._expected):
            self._refused()
            raise flight.FlightUnauthenticatedError("the token is not the right one")
