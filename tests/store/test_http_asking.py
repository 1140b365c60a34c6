"""Many requests at once by one thread: every answer goes to its own request, whatever happens to the others."""

import contextlib
import random
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.store import http
from headrace.store.http import Connections
from headrace.store.http_asking import AT_ONCE, first_answer, outcomes_of
from headrace.store.http_connection import ConnectionFailure
from headrace.store.http_messages import Answer, Request
from tests.properties import examples
from tests.store.test_http import Server, serving, with_length


def requests_for(server: Server, numbers: range) -> list[Request]:
    return [Request(server.host, "GET", f"/{number}", {}, 1 << 20) for number in numbers]


class EchoServer(Server):
    """Answers each request with what `bodies` says for its number, and does to some of them what `fate` says."""

    def __init__(self, bodies: list[bytes], fates: list[str]) -> None:
        self.bodies, self.fates = bodies, fates
        self.open = self.most_open = 0
        self.lock = threading.Lock()
        super().__init__(self._answer)

    def _converse(self, client: socket.socket) -> None:
        with self.lock:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        with contextlib.suppress(OSError), client:
            while head := self._head(client):
                if not self._answered(client, int(head.split(b" ")[1][1:])):
                    break
        with self.lock:
            self.open -= 1

    def _head(self, client: socket.socket) -> bytes:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            came = client.recv(65536)
            if not came:
                return b""
            head += came
        return head

    def _answered(self, client: socket.socket, number: int) -> bool:
        """Whether the connection goes on."""
        content, fate = with_length(self.bodies[number]), self.fates[number]
        if fate == "refused":
            client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")
        elif fate == "cut":
            client.sendall(content[:-1])
            return False
        elif fate == "dropped":
            return False
        elif fate == "last":
            client.sendall(content)
            return False
        else:
            half = len(content) // 2
            client.sendall(content[:half])
            client.sendall(content[half:])
        return True

    def _answer(self, client: socket.socket, number: int) -> None:
        raise AssertionError("conversations go another way here")


@contextlib.contextmanager
def echoing(bodies: list[bytes], fates: list[str]):
    server = EchoServer(bodies, fates)
    try:
        yield server
    finally:
        server.close()


@given(seed=st.integers(0, 2**32), count=st.integers(0, 150))
@examples(25)
def test_every_answer_goes_to_its_own_request(seed: int, count: int) -> None:
    draw = random.Random(seed)
    bodies = [draw.randbytes(draw.choice([1, 100, 5000, 70_000])) for _ in range(count)]
    fates = draw.choices(["well", "well", "well", "last", "refused", "cut", "dropped"], k=count)
    connections = Connections(60, 60)
    with echoing(bodies, fates) as server:
        outcomes = outcomes_of(connections, requests_for(server, range(count)), None)
        assert server.most_open <= AT_ONCE + fates.count("last") + fates.count("dropped") + fates.count("cut")
    assert len(outcomes) == count
    for body, fate, outcome in zip(bodies, fates, outcomes, strict=True):
        if fate in ("cut", "dropped"):
            assert isinstance(outcome, ConnectionFailure)
        elif fate == "refused":
            assert isinstance(outcome, Answer)
            assert outcome.status == 503
        else:
            assert isinstance(outcome, Answer)
            assert bytes(outcome.content) == body


def test_requests_wait_for_each_other_only_when_there_are_very_many() -> None:
    """As many as may be under way at once are sent before the first answer comes."""
    arrived = threading.Semaphore(0)
    go_on = threading.Event()

    def script(client: socket.socket, number: int) -> None:
        arrived.release()
        go_on.wait(60)
        client.sendall(with_length(b"x"))

    with serving(script) as server:
        asking = threading.Thread(
            target=outcomes_of, args=(Connections(60, 60), requests_for(server, range(AT_ONCE)), None)
        )
        asking.start()
        for _ in range(AT_ONCE):
            assert arrived.acquire(timeout=60)
        go_on.set()
        asking.join(60)
        assert not asking.is_alive()


def test_slow_ones_of_many_are_sent_twice() -> None:
    go_on = threading.Event()
    seen: dict[bytes, int] = {}
    lock = threading.Lock()

    def script(client: socket.socket, number: int) -> None:
        with lock:
            head = server.requests[-1]
            is_first = head not in seen
            seen[head] = seen.get(head, 0) + 1
        if b"/0 " in head and is_first:
            go_on.wait(60)
        client.sendall(with_length(b"x"))

    with serving(script) as server:
        (outcome,) = outcomes_of(Connections(60, 60), requests_for(server, range(1)), 0.05)
        assert isinstance(outcome, Answer)
        go_on.set()
    assert len(server.requests) == 2


def test_the_next_address_is_tried_if_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda client, number: None) as closed:
        pass
    with serving(lambda client, number: client.sendall(with_length(b"there"))) as server:
        addresses = [(socket.AF_INET, ("127.0.0.1", port)) for port in (closed.host.port, server.host.port)]
        monkeypatch.setattr(http, "addresses_of", lambda host: addresses)
        answer = first_answer(Connections(60, 60), requests_for(server, range(1))[0], None)
        assert bytes(answer.content) == b"there"


def test_the_next_address_is_tried_if_one_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full lets others wait for ever."""
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        with serving(lambda client, number: client.sendall(with_length(b"there"))) as server:
            addresses = [
                (socket.AF_INET, full.getsockname()),
                (socket.AF_INET, ("127.0.0.1", server.host.port)),
            ]
            monkeypatch.setattr(http, "addresses_of", lambda host: addresses)
            answer = first_answer(Connections(0.2, 60), requests_for(server, range(1))[0], None)
            assert bytes(answer.content) == b"there"
            monkeypatch.setattr(http, "addresses_of", lambda host: addresses[:1])
            with pytest.raises(ConnectionFailure, match="no answer in time"):
                first_answer(Connections(0.2, 60), requests_for(server, range(1))[0], None)


def test_addresses_are_looked_up_again_when_a_host_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []

    def addresses_of(host):
        looked_up.append(time.monotonic())
        return [(socket.AF_INET, ("127.0.0.1", ports[0]))]

    monkeypatch.setattr(http, "addresses_of", addresses_of)
    with serving(lambda client, number: None) as closed:
        pass
    connections = Connections(60, 60)
    with serving(lambda client, number: client.sendall(with_length(b"there"))) as server:
        ports = [closed.host.port]
        (request,) = requests_for(server, range(1))
        with pytest.raises(ConnectionFailure, match="refused"):
            first_answer(connections, request, None)
        ports[0] = server.host.port
        assert bytes(first_answer(connections, request, None).content) == b"there"
    assert len(looked_up) == 2
