"""Our own HTTP client, against a server that answers with whatever bytes a test wants, cut wherever it wants."""

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from headrace.store import http, http_connection
from headrace.store.http import Connections
from headrace.store.http_asking import first_answer
from headrace.store.http_connection import ConnectionFailure
from headrace.store.http_messages import Answer, Host, Request
from tests.properties import examples

Script = Callable[[socket.socket, int], None]
"""Answers one request on a connection, given how many were answered on it before."""


class Server:
    def __init__(self, script: Script, context: ssl.SSLContext | None = None) -> None:
        self.script = script
        self.connections = 0
        self.requests: list[bytes] = []
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = Host(
            "localhost" if context else "127.0.0.1", self._listener.getsockname()[1], context is not None
        )
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._converse, args=(client,), daemon=True).start()

    def _converse(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._context:
                client = self._context.wrap_socket(client, server_side=True)
            with client:
                for number in range(1000):
                    head = b""
                    while not head.endswith(b"\r\n\r\n"):
                        came = client.recv(65536)
                        if not came:
                            return
                        head += came
                    self.requests.append(head)
                    self.script(client, number)


@contextlib.contextmanager
def serving(script: Script, context: ssl.SSLContext | None = None) -> Iterator[Server]:
    server = Server(script, context)
    try:
        yield server
    finally:
        server.close()


def request_to(server: Server, method: str = "GET", most_bytes: int = 1 << 20) -> Request:
    return Request(server.host, method, "/a?b=c", {"X-One": "1"}, most_bytes)


def ask(
    server: Server, method: str = "GET", most_bytes: int = 1 << 20, connections: Connections | None = None
) -> Answer:
    return first_answer(connections or Connections(60, 60), request_to(server, method, most_bytes), None)


def send(client: socket.socket, content: bytes, cuts: list[int]) -> None:
    begin = 0
    for end in [*sorted({cut % (len(content) + 1) for cut in cuts}), len(content)]:
        client.sendall(content[begin:end])
        begin = end


def with_length(body: bytes) -> bytes:
    return b'HTTP/1.1 206 Partial Content\r\nETag: "x"\r\ncontent-length:%d\r\n\r\n' % len(body) + body


def in_chunks(body: bytes, sizes: list[int]) -> bytes:
    parts, begin = [], 0
    for size in [*sizes, len(body)]:
        part = body[begin : begin + size]
        begin += size
        if part:
            parts.append(b"%x;note=1\r\n%s\r\n" % (len(part), part))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(parts) + b"0\r\nTrailer: 1\r\n\r\n"


@given(
    bodies=st.lists(st.binary(max_size=70_000), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 5000), max_size=5),
    cuts=st.lists(st.integers(0, 10**6), max_size=6),
    is_chunked=st.booleans(),
    has_interim=st.booleans(),
)
@examples(60)
def test_any_answer_in_any_pieces(
    bodies: list[bytes], sizes: list[int], cuts: list[int], is_chunked: bool, has_interim: bool
) -> None:
    def script(client: socket.socket, number: int) -> None:
        body = bodies[number]
        answer = in_chunks(body, sizes) if is_chunked else with_length(body)
        send(client, b"HTTP/1.1 100 Continue\r\n\r\n" * has_interim + answer, cuts)

    connections = Connections(60, 60)
    with serving(script) as server:
        for body in bodies:
            answer = ask(server, connections=connections)
            assert (answer.status, answer.is_whole) == (200 if is_chunked else 206, True)
            assert bytes(answer.content) == body
        assert server.connections == 1
        assert (
            server.requests[0] == f"GET /a?b=c HTTP/1.1\r\nHost: {server.host}\r\nX-One: 1\r\n\r\n".encode()
        )


def test_a_body_that_ends_with_the_connection() -> None:
    def script(client: socket.socket, number: int) -> None:
        client.sendall(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\n\r\n<Code>AccessDenied</Code>")
        client.close()

    with serving(script) as server:
        for _ in range(3):
            assert bytes(ask(server).content) == b"<Code>AccessDenied</Code>"


def test_answers_without_a_body_keep_the_connection() -> None:
    def script(client: socket.socket, number: int) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n")

    connections = Connections(60, 60)
    with serving(script) as server:
        for _ in range(3):
            answer = ask(server, "HEAD", connections=connections)
            assert (answer.headers["content-length"], len(answer.content)) == ("12345", 0)
        assert server.connections == 1


@pytest.mark.parametrize("body", [with_length(b"x" * 5000), in_chunks(b"x" * 5000, [2000])])
def test_a_body_that_is_too_long_is_not_read(body: bytes) -> None:
    with serving(lambda client, number: client.sendall(body)) as server:
        answer = ask(server, most_bytes=4999)
        assert (answer.is_whole, len(answer.content)) == (False, 0)
        assert len(ask(server, most_bytes=5000).content) == 5000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 200", "closed"),
        (with_length(b"x" * 100)[:-1], "cut off"),
        (in_chunks(b"x" * 100, [])[:-1], "cut off"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 abc\r\n\r\n", "not HTTP"),
        (b"x" * 100_000, "not HTTP"),
    ],
)
def test_half_an_answer_is_a_failure(content: bytes, reason: str) -> None:
    def script(client: socket.socket, number: int) -> None:
        client.sendall(content)
        client.shutdown(socket.SHUT_WR)

    with serving(script) as server, pytest.raises(ConnectionFailure, match=reason):
        ask(server)


@pytest.mark.parametrize("answer", [with_length(b"one"), in_chunks(b"one", []), b"HTTP/1.1 204 No\r\n\r\n"])
def test_what_comes_after_an_answer_is_not_taken_for_the_next_one(answer: bytes) -> None:
    stray = with_length(b"somebody else's")

    def script(client: socket.socket, number: int) -> None:
        client.sendall(answer + stray)

    connections = Connections(60, 60)
    with serving(script) as server:
        for _ in range(3):
            assert bytes(ask(server, connections=connections).content) in (b"one", b"")
        assert server.connections == 3


def test_what_comes_late_is_not_taken_for_the_next_answer() -> None:
    late, sent = threading.Event(), threading.Event()

    def script(client: socket.socket, number: int) -> None:
        client.sendall(with_length(b"one"))
        late.wait(60)
        client.sendall(with_length(b"somebody else's"))
        sent.set()

    connections = Connections(60, 60)
    with serving(script) as server:
        for _ in range(3):
            assert bytes(ask(server, connections=connections).content) == b"one"
            late.set()
            assert sent.wait(60)
            late.clear()
            sent.clear()
        assert server.connections == 3


def test_a_connection_that_was_closed_meanwhile_is_replaced() -> None:
    """Servers close connections that are not used for a while, and that is no failure."""
    closed = threading.Event()

    def script(client: socket.socket, number: int) -> None:
        client.sendall(with_length(b"one"))
        client.close()
        closed.set()

    connections = Connections(60, 60)
    with serving(script) as server:
        for _ in range(5):
            assert bytes(ask(server, connections=connections).content) == b"one"
            assert closed.wait(60)
            closed.clear()
        assert server.connections == 5


def test_a_server_that_says_nothing() -> None:
    silent = threading.Event()

    def script(client: socket.socket, number: int) -> None:
        silent.wait(60)

    with serving(script) as server, pytest.raises(ConnectionFailure, match="no answer in time"):
        first_answer(Connections(60, 0.1), request_to(server), None)
    silent.set()


def test_a_server_that_is_slow_but_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part comes in time, although the whole takes longer than a part may take."""
    content, clock = with_length(b"x" * 7000), [1000.0]
    monkeypatch.setattr(http.time, "monotonic", lambda: clock[0])

    def script(client: socket.socket, number: int) -> None:
        for begin in range(0, len(content), 1100):
            clock[0] += 15.0
            client.sendall(content[begin : begin + 1100])

    with serving(script) as server:
        assert len(first_answer(Connections(60, 20), request_to(server), None).content) == 7000
    assert clock[0] >= 1105.0


@pytest.mark.parametrize("part", [b"HTTP/1.1 100 Continue\r\n\r\n", b"X"])
def test_a_head_that_never_ends_is_given_up(part: bytes) -> None:
    def script(client: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                client.sendall(part)
                time.sleep(0.02)

    with serving(script) as server, pytest.raises(ConnectionFailure, match="no answer in time"):
        first_answer(Connections(60, 0.5), request_to(server), None)


def test_a_body_that_only_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_LEAST_BYTES_PER_SECOND", 1e9)

    def script(client: socket.socket, number: int) -> None:
        content = with_length(b"x" * 1_000_000)
        with contextlib.suppress(OSError):
            for byte in content:
                client.sendall(bytes([byte]))
                time.sleep(0.01 if byte == ord("x") else 0)

    with serving(script) as server, pytest.raises(ConnectionFailure, match="no answer in time"):
        first_answer(Connections(60, 0.2), request_to(server), None)


def test_a_reset_is_not_the_end_of_a_body() -> None:
    def script(client: socket.socket, number: int) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        has_read.wait(60)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()

    has_read = threading.Event()
    with serving(script) as server:
        exchange = Connections(60, 60).ask(request_to(server))
        while not exchange.advance():
            time.sleep(0.01)
        has_read.set()
        while not exchange.is_over:
            exchange.advance()
        assert (exchange.answer, str(exchange.failure)) == (None, "the answer was cut off")


@pytest.mark.parametrize("size", [b"-ffff", b"0x10", b"1_0", b"+5", b"zz", b"", b"ffffffff"])
def test_chunks_of_impossible_sizes(size: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(lambda client, number: client.sendall(head + size + b"\r\nabc")) as server:
        assert not ask(server).is_whole


def test_a_refusal_of_the_second_request_does_not_end_the_first() -> None:
    refused, has_come = threading.Event(), threading.Event()

    def script(client: socket.socket, number: int) -> None:
        if not has_come.is_set():
            has_come.set()
            assert refused.wait(60)
            client.sendall(with_length(b"right"))
            return
        client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")
        refused.set()

    with serving(script) as server:
        answer = first_answer(Connections(60, 60), request_to(server), 0.05)
        assert (answer.status, bytes(answer.content)) == (206, b"right")


def test_a_slow_request_is_sent_twice_and_the_first_answer_counts() -> None:
    first_may_go_on = threading.Event()
    has_come = threading.Event()

    def script(client: socket.socket, number: int) -> None:
        if not has_come.is_set():
            has_come.set()
            client.sendall(with_length(b"slow")[:-1])
            first_may_go_on.wait(60)
        client.sendall(with_length(b"fast"))

    with serving(script) as server:
        answer = first_answer(Connections(60, 60), request_to(server), 0.05)
        assert bytes(answer.content) == b"fast"
        assert server.connections == 2
        first_may_go_on.set()


def test_few_requests_are_sent_twice_at_once() -> None:
    go_on = threading.Event()

    def script(client: socket.socket, number: int) -> None:
        go_on.wait(60)
        client.sendall(with_length(b"x"))

    connections = Connections(60, 60)
    with serving(script) as server:
        threads = [
            threading.Thread(target=first_answer, args=(connections, request_to(server), 0.01))
            for _ in range(10)
        ]
        for thread in threads:
            thread.start()
        while len(server.requests) < 14:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(server.requests) == 14
        go_on.set()
        for thread in threads:
            thread.join()


def test_nobody_listens() -> None:
    with serving(lambda client, number: None) as server:
        pass
    with pytest.raises(ConnectionFailure, match="refused"):
        ask(server)


def test_certificates_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    body = bytes(range(256)) * 2000
    connections = Connections(60, 60)
    with serving(lambda client, number: client.sendall(with_length(body)), context) as server:
        http_connection._tls.cache_clear()
        with pytest.raises(ConnectionFailure, match="certificate"):
            ask(server)
        with authority.cert_pem.tempfile() as bundle:
            monkeypatch.setenv("AWS_CA_BUNDLE", bundle)
            http_connection._tls.cache_clear()
            for _ in range(3):
                assert bytes(ask(server, connections=connections).content) == body
        http_connection._tls.cache_clear()
    assert server.connections == 2


def test_what_comes_after_a_secure_answer_is_not_taken_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been decrypted already, where nobody sees it who looks at the socket."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)

    def script(client: socket.socket, number: int) -> None:
        head, _, _ = with_length(b"good").partition(b"good")
        client.sendall(head)
        client.sendall(b"good" + with_length(b"EVIL"))

    connections = Connections(60, 60)
    with serving(script, context) as server, authority.cert_pem.tempfile() as bundle:
        monkeypatch.setenv("AWS_CA_BUNDLE", bundle)
        http_connection._tls.cache_clear()
        for _ in range(4):
            assert bytes(ask(server, connections=connections).content) == b"good"
    http_connection._tls.cache_clear()
