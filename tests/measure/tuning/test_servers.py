"""How many servers a step needs, on servers that are formulas: the search finds the fewest, and estimates the rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.measure.running.knobs import Knobs
from headrace.measure.tuning.search import Search, Trial, Tuning
from headrace.measure.tuning.servers import ServedTrial, servers_needed
from headrace.observe.serving import ServingTimes
from tests.properties import examples

BATCH = 8


@dataclass
class Servers:
    """Servers that make a batch in so many milliseconds, some at once, a way between them and the loop, and a step."""

    count: int
    making_ms: float
    slots: int
    step_ms: float
    network_ms: float = 1.0
    chosen_ahead: int = 64

    def __post_init__(self) -> None:
        self.now = 0.0
        self.asked: list[Mapping[str, Any]] = []

    def rate(self, servers: int, ahead: int) -> float:
        """Batches a second."""
        made = servers * self.slots / self.making_ms
        asked = ahead / (self.making_ms + self.network_ms)
        return 1e3 * min(made, asked, 1 / self.step_ms if self.step_ms else made)

    def measure(self, changes: Mapping[str, Any]) -> Trial:
        self.now += 1.0
        self.asked.append(dict(changes))
        servers, ahead = changes.get("servers", self.count), changes.get("prefetch", self.chosen_ahead)
        rate = self.rate(servers, ahead)
        waited = 1 - rate * self.step_ms / 1e3
        making = self.making_ms / 1e3
        served = ServedTrial(
            servers=servers,
            slots=servers * self.slots,
            in_flight=ahead,
            batches_per_second=rate,
            step_seconds=self.step_ms / 1e3,
            times=ServingTimes(making, making, self.network_ms / 1e3, 0.0, making),
        )
        headroom = waited if self.step_ms else None
        return Trial(
            settings=changes,
            rate=BATCH * rate,
            wait_share=waited,
            headroom=headroom,
            cost_seconds=1.0,
            served=served,
        )

    def tuned(self, **kept: Any) -> Tuning:
        now = {"prefetch": None, "servers": self.count}
        knobs = Knobs(depth="prefetch", servers="servers", now=now).without(kept)
        return Search(self.measure, 60, clock=lambda: self.now).run(self.measure({}), knobs)


@examples(100)
@given(
    count=st.integers(1, 16),
    making_ms=st.floats(1, 50),
    slots=st.integers(1, 4),
    step_ms=st.floats(1, 50),
)
def test_the_fewest_servers_are_found_or_more_are_estimated(
    count: int, making_ms: float, slots: int, step_ms: float
) -> None:
    servers = Servers(count, making_ms, slots, step_ms)
    tuning = servers.tuned()
    needed = tuning.servers
    assert needed is not None
    assert needed.count is not None
    exactly = making_ms / slots / step_ms
    """How many servers make as many batches as the step takes."""
    if needed.is_estimate:
        assert exactly > count
        assert exactly * 0.99 <= needed.count <= exactly + 1
        assert tuning.recommended == {}, "fewer of them would be slower"
    else:
        # A loop that waits a little is not worth another server.
        assert 0.85 * exactly <= needed.count < exactly + 2
        assert needed.count == tuning.recommended.get("servers", count)
    assert len(servers.asked) <= 1 + 5 + 2 * 5 + 2, "trying all numbers would take more"


def test_servers_that_are_not_needed_are_left_to_others() -> None:
    tuning = Servers(count=8, making_ms=20, slots=1, step_ms=10).tuned()
    assert tuning.recommended == {"servers": 2}
    assert "servers=2 is as fast as 8" in tuning.why
    assert tuning.servers is not None
    assert (tuning.servers.count, tuning.servers.is_estimate) == (2, False)
    assert (
        tuning.servers.said == "2 servers are enough for a step of 10.0 ms, which then waits 0% of the time; "
        "with 1 server it waits 50%"
    )
    written = tuning.to_json()
    assert written["servers"]["count"] == 2
    assert written["baseline"]["served"]["times"]["made"] == pytest.approx(0.02)


def test_too_few_servers_are_said_to_be_too_few_and_that_it_is_an_estimate() -> None:
    tuning = Servers(count=2, making_ms=20, slots=2, step_ms=2).tuned()
    assert tuning.recommended == {}
    assert tuning.servers is not None
    assert (tuning.servers.count, tuning.servers.is_estimate) == (5, True)
    for words in ("about 5 servers", "This is an estimate", "100.0 batches a second", "the step takes 500.0"):
        assert words in tuning.servers.said


def test_more_are_put_in_flight_before_servers_are_counted() -> None:
    """Two batches in flight cannot keep four workers busy."""
    tuning = Servers(count=2, making_ms=20, slots=2, step_ms=5.5, chosen_ahead=2).tuned()
    assert tuning.recommended == {"prefetch": 4}
    assert tuning.servers is not None
    assert (tuning.servers.count, tuning.servers.is_estimate) == (2, False)


def test_servers_that_are_not_saturated_are_judged_by_what_they_can_make() -> None:
    tuning = Servers(count=1, making_ms=20, slots=4, step_ms=4, chosen_ahead=2).tuned(prefetch=True)
    assert tuning.servers is not None
    assert tuning.servers.is_estimate
    # It can make 200 batches a second, and 95 came as no more were asked for.
    assert tuning.servers.count == 2


def test_without_a_step_nobody_knows() -> None:
    tuning = Servers(count=4, making_ms=20, slots=1, step_ms=0).tuned()
    assert tuning.recommended == {}
    assert tuning.servers is not None
    assert tuning.servers.count is None
    assert "depends on the step" in tuning.servers.said


@pytest.mark.parametrize(
    ("place", "words"), [("network", "on its way"), ("here", "in the process of the loop")]
)
def test_servers_that_are_not_the_reason(place: str, words: str) -> None:
    times = ServingTimes(0.001, 0.001, 0.0, 0.0, 0.001)._replace(**{place: 0.1})
    trial = ServedTrial(
        servers=2, slots=4, in_flight=8, batches_per_second=50.0, step_seconds=0.001, times=times
    )
    needed = servers_needed(trial, 0.9)
    assert needed.count is None
    assert "more servers would hardly help" in needed.said
    assert words in needed.said
