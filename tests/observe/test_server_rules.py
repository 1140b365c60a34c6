"""Findings about servers that make batches: where each must be said, and where not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.observe.advice import facts_of_loader
from headrace.observe.facts import Facts, RunFacts
from headrace.observe.findings import NotLooked
from headrace.observe.rules import RULES
from headrace.observe.serving import ServingTimes, serving_times
from headrace.observe.stats import ServerStats, StageStats

BUSY = ServingTimes(queue=0.030, making=0.010, network=0.002, here=0.0, made=0.012)
FAR = ServingTimes(queue=0.001, making=0.002, network=0.050, here=0.0, made=0.002)
UP = ServerStats(state="up", answers=100, bytes=400_000_000, seconds=4.0, slots=4)
FIRST, SECOND = "grpc://10.0.0.7:9000", "grpc://10.0.0.8:9000"
RUN = RunFacts(
    wait_share=0.4,
    busiest="server queue",
    cpu_cores=1.0,
    machine_cpu_share=0.5,
    padding=None,
    has_step=True,
    computes_here=False,
    seconds=2.0,
    servers={FIRST: UP, SECOND: UP},
    serving=BUSY,
    in_flight=16,
)
NAMES = ("servers", "server-network")


def outcome(name: str, **changes: Any) -> Any:
    return RULES[name].look(Facts(servers=2, run=replace(RUN, **changes)))


def test_servers_that_make_too_few_batches() -> None:
    (finding,) = outcome("servers")
    assert finding.level == "warning"
    assert "waits 40% of its time, mostly for its 2 servers" in finding.found
    assert "waits 30.0 ms for a worker, takes 12.0 ms to make, and is 2.0 ms on its way" in finding.found
    assert finding.found.endswith("8 batches can be made at once")
    assert "Add servers" in finding.remedy
    assert "several threads" in finding.remedy
    assert outcome("server-network") == []


def test_a_server_that_is_not_in_use_is_named() -> None:
    (finding,) = outcome("servers", servers={FIRST: UP, SECOND: ServerStats(state="silent", slots=4)})
    assert "mostly for its 1 server:" in finding.found
    assert finding.found.endswith(f"4 batches can be made at once; {SECOND} is silent")


def test_servers_that_are_asked_for_too_little() -> None:
    (finding,) = outcome("servers", serving=BUSY._replace(queue=0.0), in_flight=2)
    assert finding.found.endswith("8 batches can be made at once, but only 2 are asked for ahead")
    assert finding.remedy == "Give prefetch=16, or leave it out"


def test_a_network_that_is_too_slow() -> None:
    (finding,) = outcome("server-network", serving=FAR)
    assert finding.level == "warning"
    assert "400.0 MB/s came in batches of 4,000.0 KB" in finding.found
    assert "3.0 ms on a server and 50.0 ms on its way" in finding.found
    for remedy in ("fewer fields", "uint8", "more bandwidth", "it is 16 now"):
        assert remedy in finding.remedy
    assert "unix://" not in finding.remedy
    assert outcome("servers", serving=FAR) == []


@pytest.mark.parametrize("address", ["grpc://127.0.0.1:9000", "grpc+tls://[::1]:9000"])
def test_servers_on_the_same_machine_have_a_shorter_way(address: str) -> None:
    (finding,) = outcome("server-network", serving=FAR, servers={address: UP})
    assert finding.remedy.startswith("Reach servers on this machine by a Unix socket (unix:///path)")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_said_without_need(name: str) -> None:
    assert outcome(name, wait_share=0.05) == []
    # The loop's own process takes the time.
    assert outcome(name, serving=BUSY._replace(here=1.0)) == []
    for changes, why in (({"has_step": False}, "only waits"), ({"serving": None}, "no batch has come")):
        unjudged = outcome(name, **changes)
        assert isinstance(unjudged, NotLooked)
        assert why in unjudged.reason
    assert RULES[name].look(Facts(servers=2)) is None
    assert RULES[name].look(Facts(servers=2, run="the run failed")) == NotLooked("the run failed")
    assert RULES[name].look(Facts(run=RUN)) is None, "batches that are made on this machine"


def test_a_loader_without_servers() -> None:
    data = headrace.from_arrays({"x": np.zeros(8)})
    assert facts_of_loader(headrace.Loader(data, batch_size=2)).servers is None


def test_times_of_batches_are_means() -> None:
    stages = {
        "wait": StageStats(100, 9.0),
        "step": StageStats(100, 9.0),
        "server queue": StageStats(100, 2.0),
        # A quarter of the batches was there already.
        "server gather": StageStats(75, 0.3),
        "server transform": StageStats(75, 1.2),
        "network": StageStats(100, 0.5),
        "transform": StageStats(100, 0.1),
    }
    times = serving_times(stages)
    assert times == pytest.approx(
        ServingTimes(queue=0.02, making=0.015, network=0.005, here=0.001, made=0.02)
    )
    assert serving_times({"wait": StageStats(1, 1.0)}) is None


def test_a_server_that_comes_back_is_counted_from_there() -> None:
    before = ServerStats(state="up", answers=100, bytes=1000, seconds=1.0, late=3, faults=1)
    again = ServerStats(state="up", answers=7, bytes=70, seconds=0.1)
    assert again.since(before) == again
    assert before.since(again).answers == 93
