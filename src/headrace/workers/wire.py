"""Messages between processes of one machine: through a socket, with descriptors of files that both map.

A message has three parts, after their three lengths: a head (our own data, in a codec that both sides know), a body
(the user's pickled objects, opened separately, so that one that cannot be opened affects nothing else), and the bytes
of arrays.

    24 bytes     head              body              arrays
    5, 40, 0     ("done", 3)       b"\\x80\\x05..."      none: they are in shared memory
"""

import errno
import json
import os
import pickle
import socket
import struct
import tempfile
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_SEND_AT_ONCE = NO_SIGNAL | socket.MSG_DONTWAIT
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_LENGTHS = struct.Struct("<QQQ")
_MOST_DESCRIPTORS = 16
"""The most descriptors that one message can have."""


class Codec(NamedTuple):
    """How heads become bytes."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


PICKLE = Codec(pickle.dumps, pickle.loads)
"""For heads that hold any objects, between processes that trust each other."""


JSON = Codec(lambda head: json.dumps(head, default=str).encode(), json.loads)
"""For heads of plain data."""


class Message(NamedTuple):
    head: Any
    body: bytes
    arrays: NDArray[np.uint8]
    descriptors: list[int]


def encode(head: Any, body: bytes = b"", array_bytes: int = 0, *, codec: Codec = PICKLE) -> bytes:
    """A message without its arrays, whose bytes are sent after it."""
    packed = codec.encode(head)
    return b"".join((_LENGTHS.pack(len(packed), len(body), array_bytes), packed, body))


def send_all(connection: socket.socket, message: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a whole message, however long that takes. The descriptors are closed when they are sent."""
    if descriptors:
        sent = socket.send_fds(connection, [message], list(descriptors), NO_SIGNAL)
        message = message[sent:]
        for descriptor in descriptors:
            os.close(descriptor)
    connection.sendall(message, NO_SIGNAL)


class TooLongError(ConnectionError):
    """A message that is longer than the other side may send."""


class Inbox:
    """Assembles messages from what a socket receives."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        wait: bool = True,
        codec: Codec = PICKLE,
        most_bytes: int | None = None,
        most_descriptors: int = _MOST_DESCRIPTORS,
    ) -> None:
        """With `wait=False`, BlockingIOError is raised if there is nothing to read, even on a blocking socket.

        `most_bytes` is how long the parts of a message may be together; a TooLongError is raised before memory is taken
        for one that is longer.
        """
        self._connection, self._codec, self._most_bytes = connection, codec, most_bytes
        self._most_descriptors = most_descriptors
        self._flags = _CLOSE_ON_EXEC | (0 if wait else socket.MSG_DONTWAIT)
        self._space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array("i").itemsize)
        self._begin()

    def _begin(self) -> None:
        self._lengths: tuple[int, int, int] | None = None
        self._small = bytearray(_LENGTHS.size)
        self._arrays = aligned(0)
        self._missing = memoryview(self._small)
        self._descriptors = array("i")

    def receive(self) -> Message | None:
        """Read once, and return the message if it is complete. Raises EOFError at the end of the stream."""
        count, extras, flags, _ = self._connection.recvmsg_into([self._missing], self._space, self._flags)
        for level, kind, content in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.frombytes(content)
        if len(self._descriptors) > self._most_descriptors:
            self.close()
            raise TooLongError(f"a message with more than {self._most_descriptors} descriptors")
        if flags & socket.MSG_CTRUNC:
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors = array("i")
            raise OSError(
                errno.EMFILE, "too many open files: a descriptor that was sent to this process was lost"
            )
        if not count:
            raise EOFError
        self._missing = self._missing[count:]
        return None if self._missing else self._next_part()

    def close(self) -> None:
        """Close descriptors that came with a message whose rest is missing."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = array("i")

    def _next_part(self) -> Message | None:
        if self._lengths is None:
            self._lengths = _LENGTHS.unpack(self._small)
            if self._most_bytes is not None and sum(self._lengths) > self._most_bytes:
                raise TooLongError(
                    f"a message of {sum(self._lengths):,} bytes: at most {self._most_bytes:,} are expected"
                )
            self._small, self._arrays = bytearray(sum(self._lengths[:2])), aligned(self._lengths[2])
            self._missing = memoryview(self._small)
            return None
        if len(self._arrays) and self._missing.obj is self._small:
            self._missing = self._arrays.data
            return None
        head = bytes(memoryview(self._small)[: self._lengths[0]])
        body = bytes(memoryview(self._small)[self._lengths[0] :])
        message = Message(self._codec.decode(head), body, self._arrays, self._descriptors.tolist())
        self._begin()
        return message


class Outbox:
    """Sends messages without waiting: what cannot be sent at once is sent by a later `flush`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self.given_bytes = self.sent_bytes = 0
        """How much was given to it so far, and how much of that was sent."""
        self.is_broken = False
        """Whether the other end is gone, as a `flush` has found."""

    def __bool__(self) -> bool:
        """Whether something is left to send."""
        return bool(self._unsent)

    @property
    def unsent_bytes(self) -> int:
        return self.given_bytes - self.sent_bytes

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """The descriptors are closed when they are sent."""
        self._unsent.append((memoryview(message), descriptors))
        self.given_bytes += len(message)
        self.flush()

    def flush(self) -> None:
        try:
            self._send_all()
        except BlockingIOError:
            pass
        except OSError:
            # A process that is gone is noticed when its messages end.
            self.is_broken = True

    def _send_all(self) -> None:
        while self._unsent:
            content, descriptors = self._unsent[0]
            if descriptors:
                sent = socket.send_fds(self._connection, [content], list(descriptors), _SEND_AT_ONCE)
            else:
                sent = self._connection.send(content, _SEND_AT_ONCE)
            self._unsent.popleft()
            self.sent_bytes += sent
            if sent < len(content):
                self._unsent.appendleft((content[sent:], ()))
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        for _, descriptors in self._unsent:
            for descriptor in descriptors:
                os.close(descriptor)
        self._unsent.clear()


def aligned(size: int) -> NDArray[np.uint8]:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[first : first + size]


def round_up(size: int, to: int = ALIGNMENT) -> int:
    return -(-size // to) * to


def anonymous_file() -> int:
    """A file that disappears when no process has it open or mapped, however those processes end."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headrace")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
