"""Replies that travel together over Arrow Flight, and what a client makes of record batches that no server sends."""

import queue
import re
import struct
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.serve import flight_client, flight_server, messages
from headrace.serve.connection import Arrived, Events
from headrace.serve.messages import Answer, Pong, ProtocolError
from headrace.serve.result import Result
from tests.properties import examples

MOST_TOGETHER = 2**21
LARGEST = 3 * flight_server.PART_BYTES + 7


class Chunk(NamedTuple):
    """What a Flight reader returns."""

    data: Any
    app_metadata: Any


class Wire:
    """The writer of a server and the reader of a client: what is written is serialized, and then read."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def write_metadata(self, metadata: bytes) -> None:
        self.chunks.append(Chunk(None, pa.py_buffer(metadata)))

    def write_with_metadata(self, batch: Any, metadata: bytes) -> None:
        self.chunks.append(Chunk(_received(batch), pa.py_buffer(metadata)))

    def write_batch(self, batch: Any) -> None:
        self.chunks.append(Chunk(_received(batch), None))

    def read_chunk(self) -> Chunk:
        return self.chunks.pop(0)


def _received(batch: Any) -> Any:
    return pa.ipc.read_record_batch(batch.serialize(), flight_server.SCHEMA)


class Exchange:
    """Lets nothing go: bodies of results as they are."""

    def take_body(self, result: Result) -> NDArray[np.uint8]:
        return result.body


def sent(sizes: list[int | None]) -> tuple[Wire, list[Any]]:
    """Answers of these sizes, and other replies for None, which all wait at the same time; as they are written."""
    outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    expected: list[Any] = []
    for number, size in enumerate(sizes):
        if size is None:
            outgoing.put((Pong(number), None))
            expected.append(Pong(number))
        else:
            body = np.random.default_rng(number).integers(0, 255, size, np.uint8)
            outgoing.put((Answer(number, b"", size), Result(b"", body)))
            expected.append(body)
    outgoing.put(None)
    written, group = Wire(), flight_server._Group(outgoing, Exchange())  # type: ignore[arg-type]
    while group.take():
        assert len(group.bodies) <= flight_server.BODIES
        if len(group.bodies) > 1:
            assert max(map(len, group.bodies)) <= flight_server.PART_BYTES
            assert sum(map(len, group.bodies)) <= MOST_TOGETHER
        list(flight_server._write_replies(written, group.replies, group.bodies))
        group.forget()
    return written, expected


class Client(flight_client.FlightConnection):
    """The reading half of a connection."""

    def __init__(self, reader: Wire) -> None:
        self.replies: list[Any] = []
        self._reader = reader
        self._events = Events(
            hello=lambda: messages.Hello(messages.VERSION),
            reply=self.replies.append,
            place=lambda answer: np.empty(answer.body_bytes, np.uint8),
            answers=self._arrive,
            unusable=pytest.fail,
            lost=pytest.fail,
        )

    def _arrive(self, arrived: "list[Arrived]") -> None:  # type: ignore[override]
        self.replies += [body for _, body in arrived]


SIZES = st.none() | st.sampled_from([0, 1, 2**19, flight_server.PART_BYTES, LARGEST]) | st.integers(0, 2**16)


@examples(60)
@given(st.lists(SIZES, max_size=30))
def test_what_is_sent_together_arrives(sizes: list[int | None]) -> None:
    written, expected = sent(sizes)
    client = Client(written)
    while written.chunks:
        client._accept(written.read_chunk())
    bodies = [each for each in client.replies if isinstance(each, np.ndarray)]
    for here, there in zip(bodies, (each for each in expected if isinstance(each, np.ndarray)), strict=True):
        assert here.tobytes() == there.tobytes()
    others = [each for each in client.replies if not isinstance(each, np.ndarray)]
    assert others == [each for each in expected if isinstance(each, Pong)]


def test_small_batches_share_a_message() -> None:
    written, _ = sent([2**19] * 16)
    assert len(written.chunks) == 4
    written, _ = sent([1000] * 16)
    assert len(written.chunks) == 2


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        (
            "SSL routines::certificate verify failed: unable to get local issuer certificate",
            "give tls_roots=",
        ),
        ("Peer name localhost is not in peer certificate", "use that name in the address"),
        ("SSL_ERROR_SSL: SSL routines::wrong version number", "an address with grpc://"),
        ("UNAVAILABLE: ipv4:127.0.0.1:9: Socket closed", r"an address with grpc\+tls://"),
        ("Connection refused", "^Connection refused$"),
    ],
)
def test_what_to_do_about_messages_of_grpc(said: str, hint: str) -> None:
    assert re.search(hint, flight_client._reason(OSError(said)))


def row(*columns: Any) -> Any:
    return pa.record_batch(list(columns), names=[str(number) for number in range(len(columns))])


def lying(first: int, end: int) -> Any:
    """A value of six bytes that says it is from here to there, as it would come from the network."""
    batch = row(pa.array([b"abcdef"], pa.large_binary()))
    serialized = batch.serialize().to_pybytes()
    true = struct.pack("<qq", 0, 6)
    assert serialized.count(true) == 1
    changed = serialized.replace(true, struct.pack("<qq", first, end))
    return pa.ipc.read_record_batch(pa.py_buffer(changed), batch.schema)


BAD_ROWS = {
    "no data": None,
    "no columns": pa.record_batch([], names=[]),
    "another type": row(pa.array([6], pa.uint8())),
    "a text": row(pa.array(["abcdef"], pa.large_string())),
    "two rows": row(pa.array([b"abc", b"def"], pa.large_binary())),
    "a missing value": row(pa.array([None], pa.large_binary())),
    "an end beyond what came": lying(0, 2**40),
    "a beginning before it": lying(-8, 6),
    "an end before the beginning": lying(6, 0),
    "too few bytes": lying(0, 0),
    "too many bytes": row(pa.array([b"abcdefg"], pa.large_binary())),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_no_server_sends(name: str) -> None:
    metadata = pa.py_buffer(messages.encode([Answer(1, b"", 6)]))
    with pytest.raises(ProtocolError):
        Client(Wire())._accept(Chunk(BAD_ROWS[name], metadata))


def test_a_batch_that_ends_too_early() -> None:
    written, _ = sent([LARGEST, 5])
    del written.chunks[1:-1]
    with pytest.raises(ProtocolError, match="ends too early"):
        Client(written)._accept(written.read_chunk())
