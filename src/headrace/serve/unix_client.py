"""A connection to a server on the same machine; see `unix_server.py`."""

import contextlib
import os
import socket
import threading

import numpy as np
from numpy.typing import NDArray

from headrace.serve import messages
from headrace.serve.connection import Events
from headrace.serve.messages import Answer, Dropped, ProtocolError, Release, Reply, Request
from headrace.store.maps import map_open_file
from headrace.workers import wire

_CODEC = wire.Codec(messages.encode, messages.decode_reply)
_MOST_MESSAGE_BYTES = 2**27
"""More comes in a segment."""
_CONNECT_SECONDS = 5.0
_END_SECONDS = 5.0
_MOST_UNSENT = 4
"""Waking up the server costs as much as copying a small batch, so segments are released a few at a time."""


class UnixConnection:
    def __init__(self, path: str, events: Events) -> None:
        self._path, self._events = path, events
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()
        self._unsent: list[bytes] = []
        self._segments: dict[int, NDArray[np.uint8]] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="headrace-server-unix", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, request: Request) -> None:
        with self._sending:
            self._unsent.append(wire.encode(request, codec=_CODEC))
            self._flush()

    def tick(self) -> None:
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        connection = self._socket
        if connection is None or not self._unsent:
            return
        message = b"".join(self._unsent)
        self._unsent.clear()
        with contextlib.suppress(OSError):
            # The server reads at once: if it does not take so little, it is as good as gone.
            sent = connection.send(message, wire.NO_SIGNAL | socket.MSG_DONTWAIT)
            if sent < len(message):
                connection.shutdown(socket.SHUT_RDWR)

    def _release(self, answer: Answer) -> None:
        """Tell the server that a segment is free, with the next request or a little later."""
        with self._sending:
            self._unsent.append(wire.encode(Release(answer.id), codec=_CODEC))
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
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(self._path)
            connection.settimeout(None)
            self._socket = connection
            self.send(self._events.hello())
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
        reply: Reply = message.head
        try:
            if isinstance(reply, Answer):
                body = self._body(reply, message)
                place = self._events.place(reply)
                if place is not None:
                    np.copyto(place, body)
                if reply.segment is not None:
                    self._release(reply)
                self._events.answer(reply, place)
            elif isinstance(reply, Dropped):
                self._segments.pop(reply.segment, None)
            else:
                self._events.reply(reply)
        finally:
            for descriptor in message.descriptors:
                os.close(descriptor)

    def _body(self, answer: Answer, message: wire.Message) -> NDArray[np.uint8]:
        if answer.segment is None:
            if len(message.arrays) != answer.body_bytes:
                raise ProtocolError(f"{len(message.arrays)} bytes of a batch of {answer.body_bytes}")
            return message.arrays
        if answer.segment not in self._segments:
            self._segments[answer.segment] = _mapped(answer, message.descriptors)
        segment = self._segments[answer.segment]
        if len(segment) < answer.body_bytes:
            raise ProtocolError(f"a batch of {answer.body_bytes} bytes in a segment of {len(segment)}")
        return segment[: answer.body_bytes]


def _mapped(answer: Answer, descriptors: list[int]) -> NDArray[np.uint8]:
    if len(descriptors) != 1:
        raise ProtocolError("a segment without its descriptor")
    # Reading beyond the end of a file that is mapped would end the process.
    if os.fstat(descriptors[0]).st_size < answer.segment_bytes or not answer.segment_bytes:
        raise ProtocolError("a segment that is shorter than the server says")
    return map_open_file(descriptors[0], answer.segment_bytes)
