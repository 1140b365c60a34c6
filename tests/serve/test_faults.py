"""Servers that are killed, paused, restarted and refused: every batch comes once, in order, and soon."""

import itertools
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.errors import SettingsError, StageTimeoutError
from headrace.observe.host import CpuClock
from headrace.serve.worker import Served
from tests.serve import served
from tests.serve.servers import CommandServer, assert_equal_batches, assert_equal_values, thread_server

SLOW = "tests.serve.served:slow"


class Crowd:
    """Some servers, each at an address of its own, which one that is started again has too."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self.servers = [self.start(address) for address in addresses]
        for server, address in zip(self.servers, addresses, strict=True):
            server.address(address.partition(":")[0])

    def start(self, address: str) -> CommandServer:
        scheme, _, place = address.partition("://")
        listening = ["--socket", place] if scheme == "unix" else ["--port", place.rpartition(":")[2]]
        return CommandServer(SLOW, *listening, "--workers", "1")

    def kill(self, number: int) -> None:
        self.servers[number].close()

    def restart(self, number: int) -> None:
        self.servers[number] = self.start(self.addresses[number])

    def close(self) -> None:
        for server in self.servers:
            server.close()


def over_flight() -> str:
    """An address that nobody has."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"grpc://127.0.0.1:{found.getsockname()[1]}"


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    crowd = Crowd([f"unix://{tmp_path}/{number}" for number in range(2)])
    yield crowd
    crowd.close()


def test_killed_paused_and_restarted(crowd: Crowd) -> None:
    """One server is killed while the other is there, and comes back; then the other is paused, and goes on."""
    remote = headrace.RemoteLoader(crowd.addresses)
    longest = 0.0
    begun = time.monotonic()
    for number, (here, there) in enumerate(zip(remote, served.slow(), strict=False)):
        longest, begun = max(longest, time.monotonic() - begun), time.monotonic()
        assert_equal_batches(here, there)
        if number == 20:
            crowd.kill(0)
        elif number == 60:
            assert remote.stats().servers[crowd.addresses[0]].state == "down"
            crowd.restart(0)
            crowd.servers[0].address("unix")
            wait_until_up(remote, crowd.addresses[0])
            begun = time.monotonic()
        elif number == 100:
            crowd.servers[1].signal(signal.SIGSTOP)
        elif number > 100 and remote.stats().servers[crowd.addresses[1]].state == "silent":
            crowd.servers[1].signal(signal.SIGCONT)
            wait_until_up(remote, crowd.addresses[1])
            break
    # Without a clock nothing can be said about a second; this only fails if something waits for a timeout.
    assert longest < 30


def wait_until_up(remote: headrace.RemoteLoader, address: str) -> None:
    deadline = time.monotonic() + 120
    while remote.stats().servers[address].state != "up":
        assert time.monotonic() < deadline
        # A server that owes nothing is not asked whether it lives.
        remote.rows([0, 1, 2, 3])


def test_when_all_are_gone_the_loop_waits_and_goes_on(
    crowd: Crowd, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.serve.keeper.TELL_SECONDS", 0.2)
    remote, local = headrace.RemoteLoader(crowd.addresses, prefetch=2), served.slow()
    here, there = iter(remote), iter(local)
    assert_equal_batches(next(here), next(there))
    for number in range(2):
        crowd.kill(number)

    def come_back() -> None:
        # When somebody was told that nobody is there.
        deadline = time.monotonic() + 120
        while "no server can be reached" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
        crowd.restart(1)

    helper = threading.Thread(target=come_back)
    with caplog.at_level(logging.WARNING):
        helper.start()
        for _ in range(10):
            assert_equal_batches(next(here), next(there))
        helper.join()
    assert "no server can be reached, and a loop waits for one" in caplog.text


def test_when_all_are_gone_for_too_long(crowd: Crowd) -> None:
    remote = headrace.RemoteLoader(crowd.addresses, timeout_seconds=1.5, prefetch=0)
    iterator = iter(remote)
    next(iterator)
    for number in range(2):
        crowd.kill(number)
    with pytest.raises(StageTimeoutError, match=r"rows \d+ to \d+ .*timeout_seconds=1.5: unix://.* is down"):
        list(itertools.islice(iterator, 20))
    assert remote.servers.fleet().conversations.waiting_since is None, "it does not wait any more"


def test_no_server_at_all(tmp_path: Path) -> None:
    with pytest.raises(
        StageTimeoutError, match="no server has answered within timeout_seconds=0.5: .*No such file"
    ):
        headrace.RemoteLoader(f"unix://{tmp_path}/none", timeout_seconds=0.5)


def test_this_machine_when_all_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = CommandServer("tests.serve.served:records", "--socket", str(tmp_path / "s"), "--workers", "1")
    address = server.address("unix")
    remote = headrace.RemoteLoader(address, local=served.records(), fallback="local", prefetch=1)
    for number, (here, there) in enumerate(zip(remote, served.records(), strict=True)):
        assert_equal_batches(here, there)
        if number == 3:
            server.close()
    assert "batches are made on this machine" in caplog.text
    assert remote.stats().servers[_local_name(remote)].answers > 0


def _local_name(remote: headrace.RemoteLoader) -> str:
    return next(name for name in remote.stats().servers if name.startswith("this machine"))


def test_this_machine_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serve.local.read_cpu_clock", lambda: CpuClock(time.monotonic(), 0.0, 2.0))
    with thread_server(Served(loader=served.records()), tmp_path) as server:
        remote = headrace.RemoteLoader(
            server.unix, local="tests.serve.served:records", local_workers=1, timeout_seconds=300
        )
        name, used = _local_name(remote), False
        while not used:
            for here, there in zip(remote, served.records(), strict=True):
                for field in here:
                    assert_equal_values(here[field], there[field])
            used = remote.stats().servers[name].answers > 0
            remote.load_state_dict({**remote.state_dict(), "position": 0, "pass": 0})


def test_a_server_with_other_code_is_refused(tmp_path: Path) -> None:
    other = served.records().map(served.waits, per="batch")
    with (
        thread_server(Served(loader=served.records()), tmp_path) as one,
        thread_server(Served(loader=other), tmp_path) as two,
    ):
        with pytest.raises(
            SettingsError,
            match=r"does not serve the same rows as unix://\S+: its functions are .*map\(waits\)",
        ):
            headrace.RemoteLoader([one.unix, two.unix])
        with pytest.raises(SettingsError, match="does not serve the same rows as local="):
            headrace.RemoteLoader(two.unix, local=served.records(), fallback="local")


@pytest.mark.parametrize("how", ["a list", "a file"])
def test_servers_are_added_while_the_loop_runs(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is added, and the first one taken away."""
    monkeypatch.setattr("headrace.serve.keeper._LOOK_UP_SECONDS", 0.2)
    listed = tmp_path / "servers"
    with (
        thread_server(Served(loader=served.slow()), tmp_path) as one,
        thread_server(Served(loader=served.slow()), tmp_path) as two,
    ):
        listed.write_text(f"# those that are there\n{one.unix}\n")
        address = f"file://{listed}" if how == "a file" else one.unix
        remote, local = headrace.RemoteLoader(address), iter(served.slow())
        for number, here in enumerate(remote):
            assert_equal_batches(here, next(local))
            if number == 5:
                assert list(remote.stats().servers) == [one.unix]
                if how == "a file":
                    listed.write_text(f"{two.unix}\n")
                else:
                    remote.use_servers([two.unix])
            if two.unix in (servers := remote.stats().servers) and servers[two.unix].answers > 3:
                break
        assert list(remote.stats().servers) == [two.unix]


def test_a_server_with_other_code_that_turns_up_later_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not used, and when nobody else is left, the error says so."""
    other = served.records().map(served.waits, per="batch")
    with thread_server(Served(loader=other), tmp_path) as two:
        with thread_server(Served(loader=served.records()), tmp_path) as one:
            remote = headrace.RemoteLoader(one.unix, timeout_seconds=2, prefetch=1)
            here, there = iter(remote), iter(served.records())
            assert_equal_batches(next(here), next(there))
            remote.use_servers([one.unix, two.unix])
            while f"the server {two.unix} is not used" not in caplog.text:
                remote.rows(range(8))
            assert_equal_batches(next(here), next(there))
        remote.use_servers([two.unix])
        with pytest.raises(StageTimeoutError, match=r"is not used \(it does not serve the same rows"):
            list(here)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_ten_servers_killed_and_restarted_at_random(tmp_path: Path) -> None:
    """For ten minutes: equality of every batch, flat memory, descriptors and threads. Half of them use Arrow Flight."""
    import psutil

    minutes = float(os.environ.get("SOAK_MINUTES", "10"))
    addresses = [over_flight() if number % 2 else f"unix://{tmp_path}/{number}" for number in range(10)]
    crowd, rng, this = Crowd(addresses), random.Random(3), psutil.Process()
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(rng.uniform(0.2, 1.5)):
            number, what = rng.randrange(10), rng.random()
            if what < 0.6:
                crowd.kill(number)
                over.wait(rng.uniform(0, 2))
                crowd.restart(number)
            else:
                crowd.servers[number].signal(signal.SIGSTOP)
                over.wait(rng.uniform(0.1, 3))
                crowd.servers[number].signal(signal.SIGCONT)

    helper = threading.Thread(target=disturb)
    remote, local = headrace.RemoteLoader(crowd.addresses), iter(served.slow())
    usage: list[tuple[int, int, int]] = []
    helper.start()
    try:
        begun = looked = time.monotonic()
        for number in itertools.count():
            if number == 0:
                batches = iter(remote)
            assert_equal_batches(next(batches), next(local))
            if time.monotonic() - looked > 5:
                looked = time.monotonic()
                usage.append((this.memory_info().rss, this.num_fds(), this.num_threads()))
            if time.monotonic() - begun > 60 * minutes:
                break
    finally:
        over.set()
        helper.join()
        crowd.close()
    third = len(usage) // 3
    middle, last = (np.median(each, axis=0) for each in (usage[third:-third], usage[-third:]))
    assert last[0] < 1.1 * middle[0], "memory"
    assert last[1] < middle[1] + 20, "descriptors"
    assert last[2] < middle[2] + 20, "threads"
