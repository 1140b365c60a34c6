"""What comes over the wire is checked, whoever sends it: damaged messages end a connection, and nothing else."""

import contextlib
import os
import random
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import headrace
from headrace.errors import HeadraceError, SettingsError, StageError
from headrace.serve import messages
from headrace.serve.messages import Answer, Ask, Cancel, Hello, Ping, Release, Rows, Welcome
from headrace.serve.messages import Path as Batches
from headrace.serve.packed import pack, unpack
from headrace.serve.worker import Served
from headrace.workers import wire
from tests.properties import TIMES
from tests.serve import served
from tests.serve.servers import ThreadServer, all_are_let_go, assert_equal_batches, thread_server
from tests.workers.waiting import NEVER_SECONDS, wait_until

CODEC = wire.Codec(messages.encode, messages.decode_replies)
REQUESTS = [
    Hello(messages.VERSION, None, "token"),
    Ask(7, Rows(Batches(0, 203, 1, 4), 3), None, None, (4, 5, 6), 0.25),
    Ask(8, Rows(positions=[0, 1, 2, 3]), ("tokens",), b"[[0,[3,1],[0,0]]]"),
    Cancel(7),
    Release(8),
    Ping(3),
    messages.Report(4),
]


def mutated(rng: random.Random, sound: bytes) -> bytes:
    """Some bytes changed, removed, repeated or added."""
    damaged = bytearray(sound)
    for _ in range(rng.randint(1, 4)):
        at, what = rng.randrange(len(damaged) + 1), rng.random()
        if what < 0.5 and at < len(damaged):
            damaged[at] = rng.choice((0, 0x7F, 0x80, 0xC1, 0xCF, 0xD3, 0xDD, 0xDF, 0xFF, rng.randrange(256)))
        elif what < 0.7:
            del damaged[at : at + rng.randint(1, 8)]
        elif what < 0.9:
            damaged[at:at] = rng.randbytes(rng.randint(1, 9))
        else:
            damaged[at:at] = damaged[: rng.randint(0, 20)]
    return bytes(damaged)


def test_damaged_requests_are_refused_or_sound() -> None:
    rng = random.Random(1)
    for _ in range(50_000 * TIMES):
        sent = mutated(rng, messages.encode(rng.choices(REQUESTS, k=rng.randint(1, 3))))
        with contextlib.suppress(messages.ProtocolError):
            requests = messages.decode_requests(sent)
            assert messages.decode_requests(messages.encode(requests)) == requests


def test_damaged_answers_are_refused_or_sound() -> None:
    rng = random.Random(2)
    packed = pack({"x": np.arange(12.0).reshape(3, 4), "names": ["a", "b", "c"], "t": (1, {"y": np.int8(3)})})
    body = np.zeros(packed.body_bytes, np.uint8)
    packed.write(body)
    answers = [
        Answer(3, packed.head, packed.body_bytes, None, 0, 0.1, 0.2, (("transform", 1, 5),)),
        Answer(4, packed.head, packed.body_bytes, 2, 4096),
        Welcome(messages.VERSION, "f" * 32, b"", 4),
        messages.Failed(3, "StageError", "no", elsewhere=True),
    ]
    for _ in range(50_000 * TIMES):
        sent = mutated(rng, messages.encode(rng.choices(answers, k=rng.randint(1, 3))))
        with contextlib.suppress(HeadraceError):
            for reply in messages.decode_replies(sent):
                if isinstance(reply, Answer):
                    assert reply.body_bytes <= messages.MOST_BODY_BYTES
                    unpack(reply.head, body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    folder = tmp_path_factory.mktemp("wire")
    loader = served.packed(str(folder))
    with thread_server(Served(loader=loader), folder, most_clients=20, most_requests=8) as server:
        yield server


def assert_it_still_serves(server: ThreadServer, remote: headrace.RemoteLoader) -> None:
    served_loader = server.loader
    local = served_loader.from_the_beginning(served_loader.settings, remote.world)
    for here, there in zip(remote, local, strict=True):
        assert_equal_batches(here, there)


def clients_of(server: ThreadServer) -> int:
    return len(server.call(lambda: list(server.service.sessions)))


def framed(request: Any) -> bytes:
    return wire.encode([request], codec=CODEC)


def test_damaged_messages_end_a_connection_and_nothing_else(server: ThreadServer) -> None:
    """Frames with wrong lengths, wrong content, descriptors that nobody asked for, in the middle of a conversation."""
    rng = random.Random(3)
    path = server.unix.removeprefix("unix://")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    good = headrace.RemoteLoader(server.unix)
    for _ in range(100 * TIMES):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(path)
            sent = framed(Hello(messages.VERSION)) if rng.random() < 0.8 else b""
            for _ in range(rng.randint(1, 5)):
                sound = framed(rng.choice(REQUESTS))
                sent += mutated(rng, sound) if rng.random() < 0.7 else sound
            with contextlib.suppress(OSError):
                if rng.random() < 0.3:
                    socket.send_fds(client, [sent], [client.fileno()])
                else:
                    client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                while client.recv(2**16):
                    pass
    assert_it_still_serves(server, good)
    # In KB: nothing near what the lengths in damaged messages said.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
    wait_until(lambda: clients_of(server) <= 1, "the others are gone")


def test_damaged_messages_over_flight(server: ThreadServer) -> None:
    rng = random.Random(4)
    client = flight.FlightClient(server.grpc)
    for _ in range(25 * TIMES):
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"headrace"))
        with contextlib.suppress(pa.ArrowException):
            writer.begin(pa.schema([]))
            if rng.random() < 0.8:
                writer.write_metadata(messages.encode([Hello(messages.VERSION)]))
            for _ in range(3):
                sound = messages.encode([rng.choice(REQUESTS)])
                writer.write_metadata(mutated(rng, sound) if rng.random() < 0.7 else sound)
            writer.done_writing()
            with contextlib.suppress(StopIteration):
                while True:
                    reader.read_chunk()
        with contextlib.suppress(pa.ArrowException):
            writer.close()
    client.close()
    assert_it_still_serves(server, headrace.RemoteLoader(server.grpc))


def converse(server: ThreadServer, *requests: Any) -> list[Any]:
    """What the server says to these requests."""
    replies: list[Any] = []
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(server.unix.removeprefix("unix://"))
        with contextlib.suppress(BrokenPipeError):
            # A client that is refused may find the connection closed before it has said anything.
            client.sendall(b"".join(map(framed, requests)))
        inbox = wire.Inbox(client, codec=CODEC)
        with contextlib.suppress(EOFError, ConnectionResetError):
            while len(replies) < len(requests):
                message = inbox.receive()
                if message is not None:
                    replies += message.head
                    for descriptor in message.descriptors:
                        os.close(descriptor)
    return replies


HELLO = Hello(messages.VERSION)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Ask(1, Rows(positions=list(range(5000)))), "5,000 positions: at most 4,096"),
        (Ask(1, Rows(Batches(0, 40, 0, 1), 10)), "step 10: the path has 10 steps"),
        (Ask(1, Rows(Batches(2**61, None, 3, 4), 2**39)), None),
        (Ask(1, Rows(positions=[2**62 - 1])), None),
        (Ask(1, Rows(positions=[0]), ("tokens", "secrets")), "must be some of tokens"),
        (Ask(1, Rows(positions=[0]), None, b"[[0,[1,1]]]"), "is not a mixture"),
    ],
)
def test_requests_for_what_nobody_should_ask(server: ThreadServer, request_: Ask, said: str | None) -> None:
    """They are answered with an error, or with rows that exist: the stream has no end."""
    replies = converse(server, HELLO, request_)
    if said is None:
        assert isinstance(replies[1], Answer | messages.Failed)
    else:
        assert said in replies[1].message


def test_too_many_requests_are_refused(server: ThreadServer) -> None:
    asks = [Ask(number, Rows(Batches(0, None, 0, 1), 50 + number)) for number in range(30)]
    replies = converse(server, HELLO, *asks)
    refused = [each for each in replies if isinstance(each, messages.Failed)]
    assert refused
    assert all(
        each.elsewhere and "of this client are unanswered or unread" in each.message for each in refused
    )


def test_too_many_clients_are_refused(server: ThreadServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(server.unix.removeprefix("unix://"))
        wait_until(lambda: clients_of(server) == 20, "all are connected")
        (refused,) = converse(server, HELLO)
        assert "has 20 clients already" in refused.reason
    wait_until(lambda: clients_of(server) == 0, "all are gone")


LARGE = Ask(1, Rows(positions=list(range(600))))


@pytest.mark.parametrize("again", [HELLO, LARGE], ids=["hello", "the number of an answer that it reads"])
def test_what_a_client_may_not_say_twice(server: ThreadServer, again: Any) -> None:
    """Its connection ends, and nothing is held for it any more."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(server.unix.removeprefix("unix://"))
        client.sendall(framed(HELLO) + framed(LARGE))
        inbox, replies = wire.Inbox(client, codec=CODEC), []
        while not any(isinstance(reply, Answer) for reply in replies):
            if (message := inbox.receive()) is not None:
                replies += message.head
                for descriptor in message.descriptors:
                    os.close(descriptor)
        client.sendall(framed(again))
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    wait_until(lambda: clients_of(server) == 0, "it is gone")
    wait_until(lambda: server.call(lambda: all_are_let_go(server)), "nothing is held for it")


def test_a_client_that_takes_nothing_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is memory for four batches, and it has asked for more than that."""
    monkeypatch.setattr("headrace.serve.service.STUCK_LOOKS", NEVER_SECONDS)
    with (
        thread_server(Served(loader=served.records()), tmp_path, threads=4, memory_bytes=900_000) as server,
        socket.socket(socket.AF_UNIX) as greedy,
    ):
        greedy.connect(server.unix.removeprefix("unix://"))
        wanted = [range(8 * number, 8 * number + 8) for number in range(20)]
        asked = [Ask(number, Rows(positions=list(rows))) for number, rows in enumerate(wanted)]
        greedy.sendall(framed(HELLO) + wire.encode(asked, codec=CODEC))
        wait_until(lambda: server.state()["made"] > 1, "some of it is made")
        remote = headrace.RemoteLoader(server.unix, timeout_seconds=60)
        for here, there in zip(remote, served.records(), strict=True):
            assert_equal_batches(here, there)
        assert server.state()["held_bytes"] <= 900_000


def test_a_segment_cannot_be_written_to_by_clients(server: ThreadServer) -> None:
    import mmap

    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(server.unix.removeprefix("unix://"))
        client.sendall(framed(HELLO) + framed(Ask(1, Rows(positions=list(range(600))))))
        inbox, descriptors = wire.Inbox(client, codec=CODEC), []
        while not descriptors:
            message = inbox.receive()
            descriptors = message.descriptors if message is not None else []
        with pytest.raises(PermissionError):
            mmap.mmap(descriptors[0], 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        again = os.open(f"/proc/self/fd/{descriptors[0]}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.write(again, b"x")
        for descriptor in (*descriptors, again):
            os.close(descriptor)


def test_a_token_over_a_socket(tmp_path: Path) -> None:
    with thread_server(Served(loader=served.records()), tmp_path, token="secret") as server:
        assert next(iter(headrace.RemoteLoader(server.unix, token="secret")))
        # As a file has it.
        assert next(iter(headrace.RemoteLoader(server.grpc, token="secret\n")))
        with pytest.raises(SettingsError, match="must be printable ASCII"):
            headrace.RemoteLoader(server.grpc, token="sec\nret")
        assert next(iter(headrace.RemoteLoader(server.grpc, token="secret")))
        for wrong in ("secreT", "", None):
            with pytest.raises(
                SettingsError, match="the token is not the right one" if wrong else "none was given"
            ):
                headrace.RemoteLoader(server.unix, token=wrong, timeout_seconds=60)
        with pytest.raises(SettingsError, match="the token is not the right one"):
            headrace.RemoteLoader(server.grpc, token="other")
        assert server.state()["refused"] >= 4


class LyingServer:
    """Says what it likes to whoever connects."""

    def __init__(self, folder: Path, *replies: bytes) -> None:
        self.path, self._replies = str(folder / "liar"), replies
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                with client:
                    client.recv(2**16)
                    client.sendall(b"".join(self._replies))
                    client.recv(2**16)

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"\xff" * 24, "a message of"),
        (b"\x05" + b"\0" * 23 + b"hello", "cannot be read"),
        (framed(Welcome(messages.VERSION, "f", b"\xc1", 1)), "cannot be read"),
        (framed(Welcome(99, "f", b"", 1)), "speaks version 99"),
    ],
)
def test_a_server_that_lies(tmp_path: Path, reply: bytes, said: str) -> None:
    liar = LyingServer(tmp_path, reply)
    with pytest.raises((SettingsError, StageError), match=said):
        headrace.RemoteLoader(f"unix://{liar.path}", timeout_seconds=1)
    liar.close()
