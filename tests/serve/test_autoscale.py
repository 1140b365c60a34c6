"""How many servers there should be: enough that nobody waits, not many more, and no change without a reason."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.errors import SettingsError
from headrace.serve.autoscale import Autoscale, Autoscaler, Seen, parse_autoscale

shares = st.floats(0, 1)
limits = st.tuples(st.integers(1, 5), st.integers(0, 10)).map(
    lambda pair: Autoscale(least=pair[0], most=pair[0] + pair[1])
)


def what_clients_see(servers: int, demand: float) -> Seen:
    """One that wants as many batches in a second as `demand` servers can make."""
    if not servers:
        return Seen(0, 0.0, 0.0)
    return Seen(servers, max(0.0, 1 - servers / demand), min(1.0, demand / servers))


def run(scaler: Autoscaler, demand: float, *, seconds: int, starting_seconds: int = 0) -> list[int]:
    """How many servers were wanted in each second; those that are started take a while."""
    ready_at: list[int] = [0] * scaler.wanted
    history = []
    for now in range(seconds):
        ready = sum(at <= now for at in ready_at)
        wanted = scaler.decide(float(now), what_clients_see(ready, demand))
        ready_at = (ready_at + [now + starting_seconds] * wanted)[:wanted]
        history.append(wanted)
    return history


@given(limits, st.integers(0, 50), st.lists(st.tuples(st.integers(0, 40), shares, shares), max_size=200))
def test_the_limits_are_kept_whatever_is_seen(
    settings: Autoscale, first: int, looks: list[tuple[int, float, float]]
) -> None:
    scaler = Autoscaler(settings, first)
    before = scaler.wanted
    for now, look in enumerate(looks):
        wanted = scaler.decide(float(now), Seen(*look))
        assert settings.least <= wanted <= settings.most
        assert before - 1 <= wanted <= 2 * before
        if wanted > before:
            waited = max(seen[1] for seen in looks[max(0, now - 5) : now + 1])
            assert waited > settings.grow_share
        before = wanted


@given(limits, st.floats(0.01, 20), st.integers(1, 15), st.integers(0, 20))
@example(Autoscale(least=1, most=2), 0.6, 2, 0)
def test_it_settles_where_nobody_waits(
    settings: Autoscale, demand: float, first: int, starting_seconds: int
) -> None:
    scaler = Autoscaler(settings, first)
    history = run(scaler, demand, seconds=1300, starting_seconds=starting_seconds)
    settled = history[-1]
    assert history[-200:] == [settled] * 200
    seen = what_clients_see(settled, demand)
    assert settled == settings.most or seen.waited <= settings.grow_share
    # One fewer would be too full; averages are rounded.
    assert settled == settings.least or demand > (1 - 1e-9) * settings.shrink_busy * (settled - 1)


@given(st.integers(1, 10), st.floats(1.2, 2.0))
def test_servers_become_more_within_seconds_and_fewer_within_minutes(
    servers: int, times_as_many: float
) -> None:
    demand = servers * times_as_many
    scaler = Autoscaler(Autoscale(least=1, most=100), servers)
    history = run(scaler, demand, seconds=30)
    assert history[4] == servers
    assert history[5] >= math.floor(demand)
    rest = run(Autoscaler(Autoscale(least=1, most=100), history[-1]), 0.001, seconds=100)
    assert rest[59] == history[-1]
    assert rest[60] == history[-1] - 1


def test_a_client_that_waits_for_idle_servers_gets_no_more_of_them() -> None:
    scaler = Autoscaler(Autoscale(least=1, most=8), 2)
    wanted = [scaler.decide(float(now), Seen(2, 0.9, 0.1)) for now in range(300)]
    assert wanted == [2] * 300


def test_servers_that_have_no_place_are_not_asked_for_again_and_again() -> None:
    scaler = Autoscaler(Autoscale(least=1, most=8), 1)
    wanted = [scaler.decide(float(now), Seen(1, 0.5, 1.0)) for now in range(300)]
    assert wanted[-1] == 2


def test_nothing_is_decided_while_all_servers_are_gone() -> None:
    scaler = Autoscaler(Autoscale(least=1, most=8), 4)
    assert {scaler.decide(float(now), Seen(0, 0.0, 0.0)) for now in range(300)} == {4}


def test_limits_as_they_are_typed() -> None:
    assert parse_autoscale("2:16") == Autoscale(least=2, most=16)
    for wrong in ("", "4", "1:", ":3", "a:b", "-1:4", "1:2:3", "1.5:3"):
        with pytest.raises(SettingsError, match="must be MIN:MAX, such as 1:8"):
            parse_autoscale(wrong)
    with pytest.raises(SettingsError, match="autoscale=4:2: MAX must be at least MIN"):
        parse_autoscale("4:2")
    with pytest.raises(SettingsError, match="must be at least 1"):
        parse_autoscale("0:2")
