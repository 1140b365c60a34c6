"""Clients on the same machine: a Unix socket for messages, and shared segments for batches.

The descriptor of a segment is sent with the first batch in it, and the client maps it. A batch in a segment that the
client knows is nothing but a message of some hundred bytes. The client copies what it needs into its own memory and
says so, so a client that is slow, or dies, holds no memory of the server for long.
"""

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.serve import messages
from headrace.serve.messages import Answer, Ask, Dropped, ProtocolError, Release, Reply, Request
from headrace.serve.result import Result, Segment
from headrace.serve.service import Service
from headrace.serve.session import Session
from headrace.workers import wire

_CODEC = wire.Codec(messages.encode, messages.decode_requests)
_MOST_UNSENT = 2**22
"""Nothing more is read from a client that has not taken so many bytes of answers."""
_AT_ONCE = 64
_MOST_TOGETHER = 16
"""How many replies go out in one message at most. No message may have more descriptors."""
_TOGETHER_BYTES = 2**20
"""No more replies join a message that has so many bytes already: clients refuse messages that are too long."""
_LONGEST_PATH = 107
_ACCEPT_AGAIN_SECONDS = 0.2
HELLO_SECONDS = 30.0
"""How long a client may take to say what it wants."""


class UnixListener:
    def __init__(self, service: Service, path: str) -> None:
        self._service, self.path = service, path
        self._loop = asyncio.get_running_loop()
        self._clients: set[_UnixClient] = set()
        self._socket = _listen(path)
        self._inode = os.stat(path).st_ino
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._loop.remove_reader(self._socket)
                self._loop.call_later(_ACCEPT_AGAIN_SECONDS, self._accept_again)
            return  # otherwise it is gone already
        client = _UnixClient(self._service, connection, self._clients.discard)
        if client.is_welcome:
            self._clients.add(client)

    def _accept_again(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def stop_listening(self) -> None:
        """Let nobody connect any more."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        with contextlib.suppress(OSError):
            # Unless another server has taken the place.
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)

    def close(self) -> None:
        self.stop_listening()
        for client in list(self._clients):
            client.close()


def _listen(path: str) -> socket.socket:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise SettingsError(f"unix://{path}: give a path of at most {_LONGEST_PATH} characters")
    listening = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(path)
        before = os.umask(0o177)
        try:
            listening.bind(path)
        finally:
            os.umask(before)
        listening.listen(128)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise SettingsError(
            f"unix://{path}: cannot listen there: {error.strerror or error}; give a path in a directory that exists "
            "and can be written to"
        ) from None
    except BaseException:
        listening.close()
        raise
    return listening


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that was killed."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"unix://{path}: there is something else at this path; give another one")
    with socket.socket(socket.AF_UNIX) as trying:
        try:
            trying.connect(path)
        except OSError:
            os.unlink(path)
            return
    raise SettingsError(f"unix://{path}: another server listens there; give another path, or end that server")


class _UnixClient:
    def __init__(
        self, service: Service, connection: socket.socket, gone: "Callable[[_UnixClient], None]"
    ) -> None:
        connection.setblocking(False)
        self._service, self._connection, self._gone = service, connection, gone
        self._loop = asyncio.get_running_loop()
        self._inbox = wire.Inbox(
            connection,
            wait=False,
            codec=_CODEC,
            most_bytes=messages.MOST_REQUEST_BYTES,
            most_descriptors=0,
        )
        self._outbox = wire.Outbox(connection)
        self._known: dict[int, Segment] = {}
        self._replies: list[Reply] = []
        """What goes out with the next message, with small batches and descriptors of new segments."""
        self._bodies: list[NDArray[np.uint8]] = []
        self._unposted: list[Result] = []
        """The results of the bodies."""
        self._descriptors: list[int] = []
        self._reply_bytes = 0
        self._sent: dict[int, Result] = {}
        """What the client may be reading in its segments."""
        self._inline: deque[tuple[int, Result]] = deque()
        """Small batches that are on their way with their messages, and where the messages end."""
        self._is_closed = False
        self._session = Session(f"process {_peer(connection)}", self._send, self.close)
        self._timer = self._loop.call_later(HELLO_SECONDS, self._look_if_known)
        self._loop.add_reader(connection, self._receive)
        self.is_welcome = service.connect(self._session)
        if not self.is_welcome:
            self.close()

    def _look_if_known(self) -> None:
        if not self._session.is_known:
            self.close()

    def _receive(self) -> None:
        taken = 0
        try:
            for _ in range(_AT_ONCE):
                message = self._inbox.receive()
                if message is not None:
                    self._accept(message)
                    taken += len(message.head)
                # Others come in between if it says much.
                if self._is_closed or taken >= _AT_ONCE:
                    return
        except BlockingIOError:
            pass
        except (EOFError, OSError, ProtocolError, msgspec.MsgspecError):
            self.close()

    def _accept(self, message: wire.Message) -> None:
        requests: list[Request] = message.head
        for request in requests:
            if isinstance(request, Release):
                self._release(request)
            elif isinstance(request, Ask) and request.id in self._sent:
                raise ProtocolError("a request with the number of one whose answer it has not released")
            else:
                self._service.receive(self._session, request)
            if self._is_closed:
                return

    def _release(self, release: Release) -> None:
        released = self._sent.pop(release.id, None)
        if released is None:
            raise ProtocolError("it has released what it was not given")
        self._service.took(self._session, released)

    def _send(self, reply: Reply, result: Result | None) -> None:
        if self._is_closed:
            if result is not None:
                result.let_go()
            return
        if not self._replies:
            # Together with all that is sent until then.
            self._loop.call_soon(self._post)
        if result is None or not isinstance(reply, Answer):
            self._replies.append(reply)
        else:
            self._service.gave(self._session, result)
            try:
                self._replies.append(self._located(reply, result))
            except OSError:
                # Too many files are open. It may connect again, and ask again.
                self._loop.call_soon(self.close)
                return
            self._reply_bytes += len(reply.head) + (result.body_bytes if result.segment is None else 0)
        if len(self._replies) == _MOST_TOGETHER or self._reply_bytes >= _TOGETHER_BYTES:
            self._post()

    def _located(self, answer: Answer, result: Result) -> Answer:
        """The answer with the segment in which the client finds the batch, unless it comes with the message."""
        segment = result.segment
        if segment is None:
            self._bodies.append(result.body)
            self._unposted.append(result)
            return answer
        self._sent[answer.id] = result
        if segment.number not in self._known:
            self._known[segment.number] = segment
            segment.when_closed[self] = self._forget
            self._descriptors.append(os.dup(segment.descriptor))
        return msgspec.structs.replace(answer, segment=segment.number, segment_bytes=segment.size)

    def _forget(self, number: int) -> None:
        del self._known[number]
        self._send(Dropped(number), None)

    def _post(self) -> None:
        """Send the replies that have come together."""
        if not self._replies or self._is_closed:
            return
        replies, bodies, descriptors = self._replies, self._bodies, self._descriptors
        self._replies, self._bodies, self._descriptors = [], [], []
        self._reply_bytes = 0
        size = sum(len(body) for body in bodies)
        message = [wire.encode(replies, array_bytes=size, codec=_CODEC), *(body.tobytes() for body in bodies)]
        self._outbox.send(b"".join(message), descriptors)
        unposted, self._unposted = self._unposted, []
        self._inline.extend((self._outbox.given_bytes, result) for result in unposted)
        self._took_inline()
        if self._outbox:
            self._loop.add_writer(self._connection, self._flush)
            if self._outbox.unsent_bytes > _MOST_UNSENT:
                self._loop.remove_reader(self._connection)

    def _flush(self) -> None:
        self._outbox.flush()
        if self._outbox.is_broken:
            self.close()
            return
        if self._outbox.unsent_bytes <= _MOST_UNSENT:
            self._loop.add_reader(self._connection, self._receive)
        self._took_inline()
        if not self._outbox:
            self._loop.remove_writer(self._connection)

    def _took_inline(self) -> None:
        """What has come with messages is on the client's side when they are sent."""
        while self._inline and self._inline[0][0] <= self._outbox.sent_bytes:
            _, result = self._inline.popleft()
            self._service.took(self._session, result)

    def close(self) -> None:
        if self._is_closed:
            return
        self._post()
        self._is_closed = True
        self._timer.cancel()
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._inbox.close()
        self._outbox.close()
        self._connection.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        for segment in self._known.values():
            segment.when_closed.pop(self, None)
        # Only now that the connection is closed: a client that is copying from a segment sees that afterwards.
        for result in (*self._sent.values(), *self._unposted, *(result for _, result in self._inline)):
            result.let_go()
        self._sent.clear()
        self._unposted.clear()
        self._inline.clear()
        self._service.disconnect(self._session)
        self._gone(self)


def _peer(connection: socket.socket) -> int:
    """The process at the other end."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return 0
    return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, option, 12)[:4], "little")
