"""What clients and servers say to each other, whichever way it travels.

    client                                             server
    Hello(fingerprint, token)                  ->
                                               <-      Welcome(description, slots)
    Ask(7, path, step 12, fields, ahead 14)    ->
    Ask(8, path, step 13, fields, ahead 15)    ->
                                               <-      Answer(8, head, bytes of the body, times)      and the body
    Release(8)                                 ->                                    if it is in a shared segment
    Ping(3)                                    ->
                                               <-      Pong(3)
                                               <-      Failed(7, "StageError", message, elsewhere=False)

Answers come in any order. A server keeps nothing about a client but the requests that it has not answered yet, so a
client may ask any server for any batch, and ask again.

Messages are MessagePack arrays, checked when they are decoded; nothing is pickled. They travel in lists, because
waking up the other side costs more than a message.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError

VERSION = 1
MOST_REQUEST_BYTES = 2**20
MOST_BODY_BYTES = 2**32
"""The most that a batch may hold."""
_MOST_NUMBER = 2**62
_MOST_AHEAD = 64
_MOST_RANKS = 2**17
_MOST_FIELDS = 64
_MOST_REQUESTS = 1024
"""In one message."""


ON_THE_SERVER = "On the server:"
"""Stands between a message and the traceback of a function that has failed."""


class ProtocolError(HeadraceError, ConnectionError):
    """A message that the other side should not have sent. The connection is closed."""


class Path(msgspec.Struct, frozen=True, array_like=True):
    """The batches of one pass of one rank: where it begins and ends in the stream, and which rank it is."""

    start: int
    stop: int | None
    rank: int
    world_size: int


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Which rows: the batch of a step on a path, or those at some positions of the stream."""

    path: Path | None = None
    step: int = 0
    positions: list[int] | None = None


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    version: int
    fingerprint: str | None = None
    """What the client expects; None if it wants to be told."""
    token: str | None = None


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    id: int
    rows: Rows
    fields: tuple[str, ...] | None = None
    """The fields of token rows that are wanted; all if it is None."""
    stages: bytes | None = None
    """Other weights of the mixture at these positions (`Stages.part`), as JSON, if they were changed."""
    ahead: tuple[int, ...] = ()
    """Steps of the same path that this client is going to ask this server for."""
    waited: float = 0.0
    """The share of its time in which the client's loop has waited lately."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The client no longer needs this answer."""

    id: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """The client has copied what it wanted from a shared segment."""

    id: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    id: int
    waited: float = 0.0
    """As in `Ask`."""


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """How the rows are packed."""

    id: int


Request = Hello | Ask | Cancel | Release | Ping | Report


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    version: int
    fingerprint: str
    description: bytes
    """What it serves (`description.py`), unless the client knows that already."""
    slots: int
    """How many batches it can make at the same time."""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    id: int
    head: bytes
    """The head of the packed batch (`packed.py`)."""
    body_bytes: int
    segment: int | None = None
    """The number of the shared segment that holds the body, if it does not come with the message."""
    segment_bytes: int = 0
    queued_seconds: float = 0.0
    """How long the request waited for its turn."""
    made_seconds: float = 0.0
    """How long the batch took to make; 0 if it was there already."""
    spent: tuple[tuple[str, int, int], ...] = ()
    """The stages in which it was made, with counts and nanoseconds."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    id: int
    kind: str
    """The name of the error's class."""
    message: str
    elsewhere: bool
    """Whether another server may well succeed: this one is ending, or has too much to do."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    id: int


class Reported(msgspec.Struct, frozen=True, array_like=True, tag="reported"):
    id: int
    content: bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The server wants nothing to do with this client, and says why."""

    reason: str
    description: bytes = b""
    """What it serves, if that is the reason."""


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """The server is ending: it answers what it was asked for, and takes nothing new."""


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """A shared segment is not used any more."""

    segment: int


Reply = Welcome | Answer | Failed | Pong | Reported | Refused | Leaving | Dropped

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[list[Request]] = msgspec.msgpack.Decoder(list[Request])
_replies: msgspec.msgpack.Decoder[list[Reply]] = msgspec.msgpack.Decoder(list[Reply])


def encode(messages: Sequence[Request | Reply]) -> bytes:
    return _encoder.encode(messages)


def encode_requests(requests: Sequence[Request]) -> Iterator[bytes]:
    """Requests in as few messages as servers accept: some hold many positions, or the weights of many sources."""
    whole = encode(requests)
    is_small = len(whole) <= MOST_REQUEST_BYTES // 2 and len(requests) <= _MOST_REQUESTS
    if is_small or len(requests) == 1:
        yield whole
        return
    half = len(requests) // 2
    yield from encode_requests(requests[:half])
    yield from encode_requests(requests[half:])


def decode_requests(sent: bytes) -> list[Request]:
    """What a client has sent, checked in full: whoever uses it need not expect anything odd."""
    if len(sent) > MOST_REQUEST_BYTES:
        raise ProtocolError(f"requests of {len(sent):,} bytes: at most {MOST_REQUEST_BYTES:,} are expected")
    requests: list[Request] = _decoded(_requests, sent)
    if len(requests) > _MOST_REQUESTS:
        raise ProtocolError(f"{len(requests):,} requests at once: at most {_MOST_REQUESTS:,} are expected")
    for request in requests:
        if not isinstance(request, Hello):
            _check_number("id", request.id)
        if isinstance(request, Ask | Ping) and not 0 <= request.waited <= 1:
            raise ProtocolError(f"a client that waits {request.waited} of its time")
        if isinstance(request, Ask):
            _check_ask(request)
    return requests


def decode_replies(sent: bytes) -> list[Reply]:
    replies: list[Reply] = _decoded(_replies, sent)
    for reply in replies:
        if isinstance(reply, Answer):
            _check_answer(reply)
    return replies


def _decoded(decoder: Any, sent: bytes) -> Any:
    try:
        return decoder.decode(sent)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a message that cannot be read: {error}") from None


def _check_ask(ask: Ask) -> None:
    path, rows = ask.rows.path, ask.rows
    if (path is None) == (rows.positions is None):
        raise ProtocolError("a request for rows has either a path or positions")
    for position in rows.positions or ():
        _check_number("position", position)
    if path is not None:
        _check_number("start", path.start)
        if path.stop is not None and not path.start <= path.stop < _MOST_NUMBER:
            raise ProtocolError(f"a path from {path.start} to {path.stop}")
        if not 0 <= path.rank < path.world_size <= _MOST_RANKS:
            raise ProtocolError(f"rank {path.rank} of {path.world_size}")
        for step in (rows.step, *ask.ahead):
            _check_number("step", step, 2**40)
    if len(ask.ahead) > _MOST_AHEAD or len(ask.fields or ()) > _MOST_FIELDS:
        raise ProtocolError(f"a request with {len(ask.ahead)} steps ahead and {len(ask.fields or ())} fields")


def _check_answer(answer: Answer) -> None:
    if not 0 <= answer.body_bytes <= MOST_BODY_BYTES:
        raise ProtocolError(
            f"a batch of {answer.body_bytes:,} bytes: at most {MOST_BODY_BYTES:,} are expected"
        )
    if answer.segment is not None and not answer.body_bytes <= answer.segment_bytes <= 2 * MOST_BODY_BYTES:
        raise ProtocolError(
            f"a segment of {answer.segment_bytes:,} bytes for a batch of {answer.body_bytes:,}"
        )


def _check_number(name: str, value: int, most: int = _MOST_NUMBER) -> None:
    if not 0 <= value < most:
        raise ProtocolError(f"{name} {value}: must be 0 to {most - 1}")


Key = tuple[Any, ...]


def key_of(positions: range | NDArray[np.int64], fields: tuple[str, ...] | None, stages: bytes | None) -> Key:
    """The same for requests whose answers are the same."""
    rows: Any = positions
    if not isinstance(positions, range):
        is_range = len(positions) > 0 and bool((np.diff(positions) == 1).all())
        # Not a checksum of the positions: someone could make two that are equal.
        rows = range(int(positions[0]), int(positions[-1]) + 1) if is_range else positions.tobytes()
    return rows, None if fields is None else tuple(sorted(fields)), stages
