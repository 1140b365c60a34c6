"""A connection to a server on the same machine; see `unix_server.py`."""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.serve import messages
from headrace.serve.connection import Arrived, Events
from headrace.serve.messages import Answer, Dropped, ProtocolError, Release, Reply, Request
from headrace.store.maps import map_open_file
from headrace.workers import wire

_CODEC = wire.Codec(bytes, messages.decode_replies)
_MOST_MESSAGE_BYTES = 2**27
"""More comes in a segment."""
_CONNECT_SECONDS = 5.0
_MOST_UNSENT = 16
"""Waking up the server costs as much as copying a small batch, so segments are released a few at a time."""
_MOST_WAITING_BYTES = 2**24
"""A server that takes so little is given up."""
_COPY_SECONDS = 0.001
"""Batches that come together are handed over together, unless copying them takes longer than this."""


class UnixConnection:
    def __init__(self, path: str, events: Events) -> None:
        self._path, self._events = path, events
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()
        self._unsent: list[Request] = []
        self._outbox: wire.Outbox | None = None
        self._segments: dict[int, NDArray[np.uint8]] = {}
        self._hang_up = select.poll()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="headrace-server-unix", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, requests: Sequence[Request]) -> None:
        with self._sending:
            self._unsent += requests
            self._flush()

    def tick(self) -> None:
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        connection, outbox = self._socket, self._outbox
        if connection is None or outbox is None:
            return
        unsent, self._unsent = self._unsent, []
        with contextlib.suppress(OSError):
            for message in messages.encode_requests(unsent) if unsent else ():
                outbox.send(wire.encode(message, codec=_CODEC))
            outbox.flush()
            if outbox.is_broken or outbox.unsent_bytes > _MOST_WAITING_BYTES:
                connection.shutdown(socket.SHUT_RDWR)

    def _release(self, arrived: Sequence[Arrived]) -> None:
        """Tell the server which segments are free, with the next request or a little later."""
        with self._sending:
            self._unsent += [Release(answer.id) for answer, _ in arrived if answer.segment is not None]
            if len(self._unsent) >= _MOST_UNSENT:
                self._flush()

    def close(self) -> None:
        self._is_closed = True
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self.close()

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(self._path)
            connection.settimeout(None)
            self._hang_up.register(connection, select.POLLRDHUP)
            self._socket, self._outbox = connection, wire.Outbox(connection)
            self.send([self._events.hello()])
            self._read(connection)
        except EOFError:
            reason = "the server has closed the connection"
        except ProtocolError as error:
            reason = f"the server sends what it should not: {error}"
        except OSError as error:
            reason = str(error.strerror or error)
        finally:
            self._socket = None
            connection.close()
            self._segments.clear()
        if not self._is_closed:
            self._events.lost(reason)

    def _read(self, connection: socket.socket) -> None:
        inbox = wire.Inbox(connection, codec=_CODEC, most_bytes=_MOST_MESSAGE_BYTES)
        try:
            while not self._is_closed:
                message = inbox.receive()
                if message is not None:
                    self._accept(message)
        finally:
            inbox.close()
        raise EOFError

    def _accept(self, message: wire.Message) -> None:
        replies: list[Reply] = message.head
        content = _Content(message)
        arrived: list[Arrived] = []
        began = time.monotonic()
        try:
            for reply in replies:
                if isinstance(reply, Answer):
                    arrived.append((reply, self._copied(reply, content)))
                    if time.monotonic() - began > _COPY_SECONDS:
                        self._hand_over(arrived)
                        arrived, began = [], time.monotonic()
                elif isinstance(reply, Dropped):
                    self._segments.pop(reply.segment, None)
                else:
                    self._events.reply(reply)
            if arrived:
                self._hand_over(arrived)
        finally:
            for descriptor in message.descriptors:
                os.close(descriptor)

    def _copied(self, answer: Answer, content: "_Content") -> NDArray[np.uint8] | None:
        """The batch in memory of this process; None if nobody wants it any more."""
        body = self._body(answer, content)
        place = self._events.place(answer)
        if place is not None:
            np.copyto(place, body)
        return place

    def _hand_over(self, arrived: Sequence[Arrived]) -> None:
        if self._hang_up.poll(0):
            # A server that has hung up may have filled its segments with other batches while these were copied: it does
            # that if this process was paused, and only after it has hung up.
            arrived = [each for each in arrived if each[0].segment is None]
        self._release(arrived)
        self._events.answers(arrived)

    def _body(self, answer: Answer, content: "_Content") -> NDArray[np.uint8]:
        if answer.segment is None:
            return content.inline(answer.body_bytes)
        if answer.segment not in self._segments:
            self._segments[answer.segment] = _mapped(answer, content.descriptors)
        segment = self._segments[answer.segment]
        if len(segment) < answer.body_bytes:
            raise ProtocolError(f"a batch of {answer.body_bytes} bytes in a segment of {len(segment)}")
        return segment[: answer.body_bytes]


class _Content:
    """What came with the replies of a message, in their order: small batches, and descriptors of new segments."""

    def __init__(self, message: wire.Message) -> None:
        self._left = message.arrays
        self.descriptors = iter(message.descriptors)

    def inline(self, size: int) -> NDArray[np.uint8]:
        if len(self._left) < size:
            raise ProtocolError(f"{len(self._left)} bytes of a batch of {size}")
        body, self._left = self._left[:size], self._left[size:]
        return body


def _mapped(answer: Answer, descriptors: Iterator[int]) -> NDArray[np.uint8]:
    descriptor = next(descriptors, None)
    if descriptor is None:
        raise ProtocolError("a segment without its descriptor")
    # Reading beyond the end of a file that is mapped would end the process.
    if os.fstat(descriptor).st_size < answer.segment_bytes or not answer.segment_bytes:
        raise ProtocolError("a segment that is shorter than the server says")
    return map_open_file(descriptor, answer.segment_bytes)
