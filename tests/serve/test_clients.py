"""Clients that take nothing, ask for too much, or change their mind: others go on, and no batch is wrong."""

import contextlib
import errno
import itertools
import os
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
from headrace.serve import messages, unix_client
from headrace.serve.connection import Events
from headrace.serve.messages import Answer, Ask, Cancel, Hello, Ping, Release, Rows
from headrace.serve.messages import Path as Batches
from headrace.serve.unix_client import UnixConnection
from headrace.serve.worker import Served
from headrace.workers import wire
from tests.serve import served
from tests.serve.servers import SECONDS, ThreadServer, all_are_let_go, assert_equal_batches, thread_server
from tests.workers.waiting import wait_until

CODEC = wire.Codec(messages.encode, messages.decode_requests)
RAW = wire.Codec(bytes, bytes)
HELLO = Hello(messages.VERSION)
MEMORY = 900_000
"""Room for four batches."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    with thread_server(Served(loader=served.records()), tmp_path, threads=4, memory_bytes=MEMORY) as server:
        yield server


def framed(*requests: Any) -> bytes:
    return b"".join(wire.encode(each, codec=RAW) for each in messages.encode_requests(requests))


def many(count: int = 250) -> list[Any]:
    """Requests for 25 batches again and again: 50 MB, more than sockets and gRPC hold."""
    return [Ask(number, Rows(Batches(0, 200, 0, 1), number % 25)) for number in range(count)]


@contextlib.contextmanager
def deaf(server: ThreadServer, scheme: str, requests: list[Any]) -> Iterator[None]:
    """A client that says all this, and then takes nothing."""
    if scheme == "unix":
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(server.unix.removeprefix("unix://"))
            client.sendall(framed(HELLO, *requests))
            yield
        return
    client = flight.FlightClient(server.grpc)
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"headrace"))
    writer.begin(pa.schema([]))
    for sent in messages.encode_requests([HELLO, *requests]):
        writer.write_metadata(sent)
    yield
    reader.cancel()
    with contextlib.suppress(pa.ArrowException):
        writer.close()
    client.close()


def clients_of(server: ThreadServer) -> int:
    return server.call(lambda: len(server.service.sessions))


@pytest.mark.parametrize("scheme", ["unix", "grpc"])
def test_many_clients_that_take_nothing_leave_room_for_others(
    server: ThreadServer, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them came when there were fewer, so together they hold more than their shares."""
    monkeypatch.setattr("headrace.serve.service._LOOK_SECONDS", 0.02)
    server.call(server.service._look_after_clients)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(deaf(server, scheme, many()))
        remote = headrace.RemoteLoader(server.unix, timeout_seconds=SECONDS)
        for here, there in zip(remote, served.records(), strict=True):
            assert_equal_batches(here, there)
            assert server.state()["held_bytes"] <= MEMORY
        wait_until(lambda: server.state()["stuck"] == 5, "they are disconnected")
        wait_until(lambda: clients_of(server) == 1, "only the other one is left")
        # Although they are still there, and take nothing.
        wait_until(lambda: server.call(lambda: all_are_let_go(server)), "nothing is held for them")


def test_a_client_that_wakes_up_in_the_middle_of_a_batch(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile it was disconnected, and the segment that it reads from has another batch."""
    copied, once = unix_client.UnixConnection._copied, threading.Event()

    def paused(connection: UnixConnection, answer: Any, content: Any) -> Any:
        if threading.current_thread() is not others and answer.segment is not None and not once.is_set():
            once.set()
            connection._body(answer, content)
            server.call(lambda: next(iter(server.service.sessions)).drop())
            others.start()
            others.join(SECONDS)
        return copied(connection, answer, content)

    def use_all() -> None:
        monkeypatch.setattr(unix_client.UnixConnection, "_copied", copied)
        seen.append(sum(1 for _ in headrace.RemoteLoader(server.unix, timeout_seconds=SECONDS)))

    seen: list[int] = []
    others = threading.Thread(target=use_all)
    monkeypatch.setattr(unix_client.UnixConnection, "_copied", paused)
    remote = headrace.RemoteLoader(server.unix, timeout_seconds=SECONDS)
    for here, there in zip(remote, served.records(), strict=True):
        assert_equal_batches(here, there)
    assert seen == [len(remote)]
    assert remote.stats().servers[server.unix].faults == 1


def test_requests_that_are_taken_back_leave_nothing(server: ThreadServer) -> None:
    """However many they are, and however little the client takes."""
    changes = [each for ask in many(2000) for each in (ask, Cancel(ask.id))]
    with deaf(server, "unix", [*changes, Ping(1)]):
        wait_until(lambda: server.state()["asked"] == 2000, "all are read")
        (session,) = server.call(lambda: list(server.service.sessions))
        wait_until(lambda: not session.asked, "all are taken back")
        assert not server.service._turns


def test_replies_that_nobody_reads_are_bounded(server: ThreadServer) -> None:
    client = flight.FlightClient(server.grpc)
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"headrace"))
    writer.begin(pa.schema([]))
    writer.write_metadata(messages.encode([HELLO]))
    pings = messages.encode([Ping(number) for number in range(1000)])
    wait_until(lambda: clients_of(server) == 1, "it is connected")

    def is_disconnected() -> bool:
        with contextlib.suppress(pa.ArrowException):
            writer.write_metadata(pings)
        return clients_of(server) == 0

    wait_until(is_disconnected, "it is disconnected")
    reader.cancel()
    with contextlib.suppress(pa.ArrowException):
        writer.close()
    client.close()


def test_clients_that_never_say_hello_are_disconnected(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.serve.flight_server._HELLO_SECONDS", 0.2)
    monkeypatch.setattr("headrace.serve.unix_server.HELLO_SECONDS", 0.2)
    client = flight.FlightClient(server.grpc)
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"headrace"))
    writer.begin(pa.schema([]))
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(server.unix.removeprefix("unix://"))
        wait_until(lambda: server.call(lambda: len(server.seen)) == 2, "both are connected")
        wait_until(lambda: clients_of(server) == 0, "both are disconnected")
    reader.cancel()
    with contextlib.suppress(pa.ArrowException):
        writer.close()
    client.close()


def test_clients_for_whom_there_is_no_room_leave_nothing(tmp_path: Path) -> None:
    with (
        thread_server(Served(loader=served.records()), tmp_path, most_clients=1) as server,
        socket.socket(socket.AF_UNIX) as first,
    ):
        path = server.unix.removeprefix("unix://")
        first.connect(path)
        wait_until(lambda: clients_of(server) == 1, "the first one is connected")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(30):
            with socket.socket(socket.AF_UNIX) as refused:
                refused.connect(path)
                # What the server says, and then the end.
                assert b"has 1 clients already" in refused.recv(2**16)
                assert refused.recv(1) == b""
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_of_too_many_requests() -> None:
    with pytest.raises(messages.ProtocolError, match="5,000 requests at once: at most 1,024"):
        messages.decode_requests(messages.encode([Ping(number) for number in range(5000)]))


def test_large_requests_share_messages_that_servers_accept() -> None:
    large = [Ask(number, Rows(positions=list(range(4096)))) for number in range(200)]
    small: list[Any] = [Ping(number) for number in range(50)]
    sent = list(messages.encode_requests([*small, *large]))
    assert all(len(each) <= messages.MOST_REQUEST_BYTES for each in sent)
    assert len(sent) < 10
    back = itertools.chain.from_iterable(map(messages.decode_requests, sent))
    assert list(back) == [*small, *large]


def test_a_server_that_is_slow_to_read_gets_all_requests(tmp_path: Path) -> None:
    """More than a socket holds."""
    path = str(tmp_path / "slow")
    lost: list[str] = []
    events = Events(
        hello=lambda: HELLO,
        reply=lambda _: None,
        place=lambda answer: np.empty(answer.body_bytes, np.uint8),
        answers=lambda _: None,
        unusable=lost.append,
        lost=lost.append,
    )
    large = [Ask(number, Rows(positions=list(range(4096)))) for number in range(100)]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        connection = UnixConnection(path, events)
        connection.start()
        server, _ = listening.accept()
    with server:
        inbox = wire.Inbox(server, codec=CODEC)
        read: list[Any] = []
        while len(read) < 1:
            message = inbox.receive()
            read += [] if message is None else message.head
        connection.send(large)
        while len(read) <= len(large):
            connection.tick()
            message = inbox.receive()
            read += [] if message is None else message.head
    assert read == [HELLO, *large]
    assert connection.join(SECONDS)
    assert lost == ["the server has closed the connection"]


def held_up_loader() -> headrace.Loader:
    loader = headrace.Loader(served.Numbers(), batch_size=8, shuffle=False)
    return loader.map(served.only_x).map(served.held_up, per="batch")


def test_a_request_that_is_taken_back_makes_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of the client is one batch, and what it no longer wants is still being made."""
    monkeypatch.setenv("HELD_UP_UNTIL", str(tmp_path / "go on"))
    paths = Batches(0, 200, 0, 1)
    with (
        thread_server(Served(loader=held_up_loader()), tmp_path, threads=2, memory_bytes=700_000) as server,
        socket.socket(socket.AF_UNIX) as client,
    ):
        client.settimeout(SECONDS)
        client.connect(server.unix.removeprefix("unix://"))
        inbox = wire.Inbox(client, codec=wire.Codec(messages.encode, messages.decode_replies))
        client.sendall(framed(HELLO, Ask(1, Rows(paths, 0))))
        wait_for_answer(inbox, 1)
        client.sendall(framed(Release(1), Ask(2, Rows(paths, served.HELD_UP_STEP)), Ask(3, Rows(paths, 7))))
        wait_until(lambda: server.state()["running"] == 1, "the second one is being made")
        client.sendall(framed(Cancel(2)))
        wait_for_answer(inbox, 3)
        assert server.state()["running"] == 1
        (tmp_path / "go on").touch()


def wait_for_answer(inbox: wire.Inbox, number: int) -> None:
    while True:
        message = inbox.receive()
        if message is None:
            continue
        for descriptor in message.descriptors:
            os.close(descriptor)
        assert not any(isinstance(reply, messages.Failed) for reply in message.head), message.head
        if any(isinstance(reply, Answer) and reply.id == number for reply in message.head):
            return


def test_small_batches_of_a_server_that_ends_are_not_lost(tmp_path: Path) -> None:
    """They came with their message, and it does not matter that the server has hung up before they are read."""
    path, ended = str(tmp_path / "ending"), threading.Event()
    arrived: list[Any] = []
    lost: list[str] = []

    def place(answer: Answer) -> Any:
        assert ended.wait(SECONDS)
        return np.empty(answer.body_bytes, np.uint8)

    events = Events(
        hello=lambda: HELLO,
        reply=lambda _: None,
        place=place,
        answers=arrived.extend,
        unusable=lost.append,
        lost=lost.append,
    )
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        connection = UnixConnection(path, events)
        connection.start()
        server, _ = listening.accept()
    answers = wire.encode([Answer(1, b"", 3), Answer(2, b"", 2)], array_bytes=5, codec=CODEC)
    server.sendall(answers + b"abcde")
    server.close()
    ended.set()
    assert connection.join(SECONDS)
    assert [bytes(body) for _, body in arrived] == [b"abc", b"de"]


def test_clients_that_send_descriptors_are_disconnected(server: ThreadServer) -> None:
    """They would use up those of the server."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SECONDS)
        client.connect(server.unix.removeprefix("unix://"))
        wait_until(lambda: clients_of(server) == 1, "it is connected")
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(client, [framed(HELLO)[:10]], [client.fileno()] * 3)
        wait_until(lambda: clients_of(server) == 0, "it is disconnected")
        assert len(os.listdir("/proc/self/fd")) < before


def test_a_server_without_descriptors_loses_a_client_and_nothing_else(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot pass a segment on. The client connects again, and workers are as they were."""
    failures = [OSError(errno.EMFILE, "too many open files")] * 2
    dup = os.dup

    def duplicate(descriptor: int) -> int:
        if failures:
            raise failures.pop()
        return dup(descriptor)

    monkeypatch.setattr("headrace.serve.unix_server.os.dup", duplicate)
    remote = headrace.RemoteLoader(server.unix, timeout_seconds=SECONDS)
    for here, there in zip(remote, served.records(), strict=True):
        assert_equal_batches(here, there)
    assert not failures
    assert server.state()["worker_deaths"] == 0


def test_grpc_is_quiet_and_the_environment_stays_as_it_is(tmp_path: Path) -> None:
    """Its own lines about connections would come between those of the user's program."""
    import subprocess
    import sys

    roots = tmp_path / "roots.pem"
    roots.write_text("-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n")
    program = f"""
import os, headrace
from headrace.errors import StageTimeoutError
try:
    headrace.RemoteLoader("grpc+tls://127.0.0.1:9", tls_roots={str(roots)!r}, timeout_seconds=1)
except StageTimeoutError:
    print("GRPC_VERBOSITY" in os.environ)
"""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (ran.stdout, ran.stderr) == ("False\n", "")
