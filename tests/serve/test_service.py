"""What a server keeps, shares and makes ahead; and how much of the machine its clients' own workers may take."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.observe.host import CpuClock
from headrace.serve.addresses import Address, Discovery
from headrace.serve.local import Local
from headrace.serve.worker import Served
from tests.serve import served
from tests.serve.servers import SECONDS, assert_equal_batches, thread_server
from tests.workers.waiting import wait_until

BATCHES = served.ROWS // 8


def test_a_batch_that_two_jobs_want_is_made_once(tmp_path: Path) -> None:
    with thread_server(Served(loader=served.records()), tmp_path) as server:
        jobs = [headrace.RemoteLoader(address) for address in (server.unix, server.grpc)]
        for here, there in zip(*jobs, strict=True):
            assert_equal_batches(here, there)
        state = server.state()
        assert state["answered"] == 2 * BATCHES
        assert state["made"] == BATCHES
        assert state["found"] + state["shared"] >= BATCHES


def test_batches_are_made_before_they_are_asked_for(tmp_path: Path) -> None:
    """A client says what it will ask for next, and the server begins with it while the client takes its time."""
    with thread_server(Served(loader=served.records()), tmp_path) as server:
        batches = iter(headrace.RemoteLoader(server.unix, prefetch=1))
        next(batches)
        wait_until(lambda: server.state()["ahead"] > 0, "a batch made ahead")
        assert sum(1 for _ in batches) == BATCHES - 1
        assert server.state()["made"] == BATCHES, "nothing was made in vain"


def test_results_take_no_more_memory_than_allowed(tmp_path: Path) -> None:
    """A batch has 200 KB: two of them fit, and several clients want more than that at once."""
    with thread_server(Served(loader=served.records()), tmp_path, workers=2, memory_bytes=500_000) as server:
        jobs = [headrace.RemoteLoader(server.unix, prefetch=8) for _ in range(3)]
        most = 0
        for batches in zip(*jobs, strict=True):
            most = max(most, server.state()["held_bytes"])
            for other in batches[1:]:
                assert_equal_batches(batches[0], other)
        assert 0 < most <= 500_000


def test_results_take_no_more_descriptors_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are dropped that nobody asks for, although there is memory for them."""
    monkeypatch.setattr("headrace.serve.kept._MOST_SEGMENTS", 3)
    with thread_server(Served(loader=served.records()), tmp_path) as server:
        most = 0
        for here, there in zip(headrace.RemoteLoader(server.unix), served.records(), strict=True):
            assert_equal_batches(here, there)
            most = max(most, server.call(lambda: server.service.results.held_segments))
        assert 0 < most <= 3


def test_answers_with_much_text_fit_into_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all of them are there already, several would go out together."""
    monkeypatch.setattr("headrace.serve.unix_client._MOST_MESSAGE_BYTES", 2**21)
    with thread_server(Served(loader=served.wordy()), tmp_path) as server:
        remote = headrace.RemoteLoader(server.unix, prefetch=16, timeout_seconds=SECONDS)
        for _ in range(2):
            assert sum(len(batch["text"][0]) == served.TEXT_LENGTH for batch in remote) == BATCHES
            remote.load_state_dict({**remote.state_dict(), "position": 0, "pass": 0})
        assert sum(each.faults for each in remote.stats().servers.values()) == 0


def test_the_monitor_sees_servers(tmp_path: Path) -> None:
    with (
        thread_server(Served(loader=served.records()), tmp_path) as server,
        headrace.monitor(headrace.RemoteLoader(server.unix), view="off") as watched,
    ):
        assert sum(1 for _ in watched) == BATCHES
        assert watched.stats().servers[server.unix].answers == BATCHES


def test_a_batch_that_is_larger_than_the_memory_is_still_made(tmp_path: Path) -> None:
    with thread_server(Served(loader=served.records()), tmp_path, memory_bytes=1000) as server:
        for here, there in zip(headrace.RemoteLoader(server.unix), served.records(), strict=True):
            assert_equal_batches(here, there)


def test_a_name_with_many_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a headless service of Kubernetes has: each is a server, whose certificate is for the name."""
    numbers = ["10.0.0.7", "10.0.0.8"]

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, port)) for number in numbers]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    discovery = Discovery(["grpc+tls://cpu.internal:9000"])
    assert discovery.may_change
    assert discovery.look() == [
        Address("grpc+tls", number, 9000, certified_name="cpu.internal") for number in numbers
    ]
    numbers.append("10.0.0.9")
    assert len(discovery.look()) == 3
    monkeypatch.setattr(socket, "getaddrinfo", _no_name_server)
    assert len(discovery.look()) == 3, "the last answer counts"
    assert "no name server" in discovery.problems["grpc+tls://cpu.internal:9000"]


def _no_name_server(*_: Any, **__: Any) -> list[Any]:
    raise socket.gaierror(-3, "no name server")


def test_workers_of_this_machine_pause_when_it_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is idle, then more than 40 % busy, then in between, then idle again."""
    at, busy = 0.0, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: at)
    local = Local(Served(), 3, read_clock=lambda: CpuClock(at, busy, 4.0))
    allowed = []
    for share in (0.0, 0.1, 0.1, 0.1, 0.5, 0.9, 0.35, 0.41, 0.2):
        at, busy = at + 1.0, busy + 4.0 * share
        allowed.append(local.most_tickets())
    assert allowed == [1, 2, 3, 3, 2, 1, 1, 0, 1]
