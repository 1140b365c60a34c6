"""Servers on hosts of their own, over cables that are slow, lose packets, or are cut: every batch comes, in order.

The functions with `hosts` run on the training host, which is another process: see `hosts.py`.
"""

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import headrace
from headrace.observe.stats import ServerStats
from tests.serve import served
from tests.serve.cable import CUT, PERFECT, Quality
from tests.serve.hosts import TOKEN, Hosts, ImpossibleError, Site
from tests.serve.servers import SECONDS, assert_equal_batches

EPOCH = served.ROWS // 8
"""How many batches it has."""
FAR = Quality(seconds=0.0125, jitter_seconds=0.003, loss=0.015)
"""25 ms for the way there and back."""
SLOW = Quality(bytes_per_second=30_000)
"""Half a second for each batch."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    try:
        site = Site(tmp_path_factory.mktemp("site"))
    except ImpossibleError as error:
        pytest.skip(f"no hosts can be made here: {error}")
    yield site
    site.close()


class Training:
    """A loop over a RemoteLoader, whose batches are compared with those of a Loader."""

    def __init__(self, hosts: Hosts, addresses: list[str]) -> None:
        self.hosts = hosts
        self.remote = headrace.RemoteLoader(addresses, token=TOKEN, tls_roots=hosts.roots)
        self._pairs = zip(self.remote, served.distant(), strict=True)
        self.steps = 0

    def step(self) -> None:
        here, there = next(self._pairs)
        assert_equal_batches(here, there)
        self.steps += 1

    def step_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < deadline, self.remote.stats()
            self.step()

    def server(self, address: str) -> ServerStats:
        return self.remote.stats().servers[address]


@contextlib.contextmanager
def training(hosts: Hosts, *addresses: str) -> Iterator[Training]:
    """Over cables that are perfect again afterwards."""
    loop = Training(hosts, list(addresses))
    try:
        yield loop
    finally:
        hosts.become(PERFECT)
        loop.remote.close()


def losses_with_tls(hosts: Hosts) -> None:
    far_and_lossy(hosts, hosts.secured)


def losses_on_the_way_to_two(hosts: Hosts) -> None:
    far_and_lossy(hosts, *hosts.addresses)


def far_and_lossy(hosts: Hosts, *addresses: str) -> None:
    """From the first greeting on."""
    before = hosts.lost(*addresses)
    hosts.become(FAR, *addresses)
    with training(hosts, *addresses) as loop:
        loop.step_until(lambda: loop.steps >= EPOCH and hosts.lost(*addresses) >= before + 5)
        # Which may be later: a server whose greeting was lost, or whose answers were late, has given none so far.
        loop.step_until(lambda: all(loop.server(address).answers > 0 for address in addresses))


@pytest.mark.parametrize("scenario", [losses_with_tls, losses_on_the_way_to_two])
def test_far_away_over_cables_that_lose_packets(site: Site, scenario: Callable[[Hosts], None]) -> None:
    site.run(scenario)


def one_is_cut_off(hosts: Hosts) -> None:
    with training(hosts, *hosts.addresses) as loop:
        loop.step_until(lambda: all(loop.server(address).answers > 5 for address in hosts.addresses))
        hosts.become(CUT, hosts.secured)
        loop.step_until(lambda: loop.server(hosts.secured).state != "up")
        before = loop.server(hosts.secured).answers
        for _ in range(EPOCH):
            loop.step()
        assert loop.server(hosts.secured).answers == before
        hosts.become(PERFECT, hosts.secured)
        loop.step_until(lambda: loop.server(hosts.secured).answers > before + 5)


def test_one_host_is_cut_off_and_comes_back(site: Site) -> None:
    """Nothing says that it is gone: its packets just do not come."""
    site.run(one_is_cut_off)


def all_are_cut_off(hosts: Hosts) -> None:
    with training(hosts, *hosts.addresses) as loop:
        loop.step()
        cut_all_until(loop, lambda: all(loop.server(address).state != "up" for address in hosts.addresses))
        before = {address: loop.server(address).answers for address in hosts.addresses}
        loop.step_until(lambda: all(loop.server(name).answers > before[name] for name in before))


def cut_all_until(loop: Training, is_so: Callable[[], bool]) -> None:
    """Cut all cables until something is so, and go on with the loop, which has to wait meanwhile."""
    hosts, seen = loop.hosts, threading.Event()

    def mend() -> None:
        deadline = time.monotonic() + SECONDS
        while not is_so() and time.monotonic() < deadline:
            time.sleep(0.02)
        hosts.become(PERFECT)
        seen.set()

    hosts.become(CUT)
    helper = threading.Thread(target=mend)
    helper.start()
    loop.step_until(seen.is_set)
    helper.join()


def test_all_hosts_are_cut_off_and_come_back(site: Site) -> None:
    site.run(all_are_cut_off)


def one_cable_is_slow(hosts: Hosts) -> None:
    hosts.become(SLOW, hosts.plain)
    with training(hosts, *hosts.addresses) as loop:
        for _ in range(3 * EPOCH):
            loop.step()
        assert loop.server(hosts.secured).answers > loop.steps / 2


def test_most_batches_come_over_the_fast_cable(site: Site) -> None:
    site.run(one_cable_is_slow)


# Longer ones


class Said(logging.Handler):
    """What the library has said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)


@contextlib.contextmanager
def listening() -> Iterator[Said]:
    said, log = Said(), logging.getLogger("headrace")
    log.addHandler(said)
    try:
        yield said
    finally:
        log.removeHandler(said)


def all_are_cut_off_for_long(hosts: Hosts) -> None:
    with listening() as said, training(hosts, *hosts.addresses) as loop:
        loop.step()
        # Connections are given up, and new ones cannot be made.
        cut_all_until(loop, lambda: all(loop.server(address).state == "down" for address in hosts.addresses))
        assert said.has("no server can be reached, and a loop waits for one")
        before = {address: loop.server(address).answers for address in hosts.addresses}
        loop.step_until(lambda: all(loop.server(name).answers > before[name] for name in before))
        assert said.has("a server is there again")


@pytest.mark.soak
def test_all_hosts_are_cut_off_for_long(site: Site) -> None:
    site.run(all_are_cut_off_for_long)


def cut_off_at_the_beginning(hosts: Hosts) -> None:
    hosts.become(CUT, hosts.plain)
    with training(hosts, *hosts.addresses) as loop:
        for _ in range(EPOCH):
            loop.step()
        assert loop.server(hosts.plain).answers == 0
        hosts.become(PERFECT, hosts.plain)
        loop.step_until(lambda: loop.server(hosts.plain).answers > 5)


@pytest.mark.soak
def test_a_host_is_cut_off_at_the_beginning(site: Site) -> None:
    site.run(cut_off_at_the_beginning)


def anything(hosts: Hosts) -> None:
    """Cables are cut, become bad and are mended at random, for some minutes."""
    rng, over = random.Random(3), threading.Event()

    def disturb() -> None:
        while not over.wait(rng.expovariate(1.0)):
            hosts.become(rng.choice([CUT, FAR, SLOW, PERFECT, PERFECT]), rng.choice(hosts.addresses))

    helper = threading.Thread(target=disturb)
    with training(hosts, *hosts.addresses) as loop:
        end = time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES", "10"))
        helper.start()
        try:
            while time.monotonic() < end:
                loop.step()
        finally:
            over.set()
            helper.join()
        hosts.become(PERFECT)
        before = {address: loop.server(address).answers for address in hosts.addresses}
        loop.step_until(lambda: all(loop.server(name).answers > before[name] for name in before))


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_anything_happens_to_the_cables(site: Site) -> None:
    site.run(anything)
