"""The search for a setting, on machines that are formulas: what it finds is compared with trying everything."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingsError
from headrace.measure.running.knobs import Knobs
from headrace.measure.tuning.search import WORTH, Search, Trial, Tuning
from tests.properties import examples

COUNTS = (0, 1, 2, 4, 8)
GIVEN = {"num_workers": 0, "worker_kind": "process", "prefetch_factor": None, "batch_size": 8}
KNOBS = Knobs(count="num_workers", kind="worker_kind", depth="prefetch_factor", batch="batch_size", now=GIVEN)


@dataclass
class Machine:
    """A sample takes so long to load in the loop; workers share that, up to the cores; a batch has a fixed cost."""

    load_ms: float
    compute_ms: float
    batch_ms: float
    cores: int
    threads_help: bool
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.now, self.asked = 0.0, 0
        self._random = np.random.default_rng(self.seed)

    def rate(self, changes: Mapping[str, Any]) -> float:
        """Samples a second."""
        chosen = {**GIVEN, **changes}
        size, count = chosen["batch_size"], chosen["num_workers"]
        load, compute = size * self.load_ms, size * self.compute_ms + self.batch_ms
        if not count:
            return 1e3 * size / (load + compute)
        useful = min(count, self.cores)
        if chosen["worker_kind"] == "thread":
            useful = min(count, 2 * self.cores) if self.threads_help else 1
        return 1e3 * size / max(load / useful, compute)

    def measure(self, changes: Mapping[str, Any]) -> Trial:
        self.now += 1.0
        self.asked += 1
        chosen = {**GIVEN, **changes}
        rate = self.rate(changes) * (1 + self.noise * self._random.uniform(-1, 1))
        size = chosen["batch_size"]
        alone = 1e3 * size / (size * self.compute_ms + self.batch_ms) if self.compute_ms else None
        headroom = None if alone is None else 1 - rate / alone
        return Trial(settings=dict(changes), rate=rate, headroom=headroom, cost_seconds=1.0)

    def tuned(self, budget: float = 60.0, knobs: Knobs = KNOBS) -> Tuning:
        search = Search(self.measure, budget, clock=lambda: self.now)
        return search.run(self.measure({}), knobs)


machines = st.builds(
    Machine,
    load_ms=st.floats(0.1, 20),
    compute_ms=st.floats(0.1, 20),
    batch_ms=st.floats(0, 5),
    cores=st.sampled_from([1, 2, 4, 8]),
    threads_help=st.booleans(),
)


@examples(100)
@given(machine=machines)
def test_as_good_as_trying_everything(machine: Machine) -> None:
    tuning = machine.tuned()
    assert machine.asked <= 20, "trying everything would take 80"
    # Larger batches are tried only if the loop still waits, so the best is that of the size that it stayed at.
    size = tuning.recommended.get("batch_size", 8)
    every = itertools.product(COUNTS, ("process", "thread"))
    best = max(machine.rate({"num_workers": n, "worker_kind": kind, "batch_size": size}) for n, kind in every)
    # Each step that is not worth it is left out, and stopping near the ceiling costs a little more.
    assert machine.rate(tuning.recommended) >= (1 - WORTH) ** 3 * best


@examples(100)
@given(machine=machines)
def test_what_is_recommended_was_measured_and_is_faster(machine: Machine) -> None:
    tuning = machine.tuned()
    measured = [trial.settings for trial in tuning.trials]
    if tuning.recommended:
        assert measured.count(tuning.recommended) >= 2
        assert machine.rate(tuning.recommended) > (1 - WORTH) * machine.rate({})
    else:
        assert tuning.why


@examples(50)
@given(machine=machines, budget=st.floats(0.5, 60))
def test_it_stays_within_its_budget(machine: Machine, budget: float) -> None:
    tuning = machine.tuned(budget)
    # The baseline and one confirmation are always there.
    assert machine.now <= max(budget, 3) + 1
    assert tuning.seconds <= machine.now


@pytest.mark.parametrize("cores", [2, 4])
def test_two_runs_with_a_little_noise_agree(cores: int) -> None:
    def found(seed: int) -> dict[str, Any]:
        return Machine(10, 1, 0.1, cores, False, noise=0.01, seed=seed).tuned().recommended

    assert found(1) == found(2) == found(3) == {"num_workers": cores}


def test_a_step_that_never_waits_is_left_alone() -> None:
    machine = Machine(load_ms=0.001, compute_ms=10, batch_ms=0, cores=2, threads_help=False)
    tuning = machine.tuned()
    assert tuning.recommended == {}
    assert machine.asked == 1
    assert "hardly be faster" in tuning.why[0]


def test_fewer_workers_are_recommended_if_they_are_as_fast() -> None:
    machine = Machine(load_ms=1, compute_ms=0, batch_ms=1, cores=1, threads_help=False)
    given = {"num_workers": 8}

    def measure(changes: Mapping[str, Any]) -> Trial:
        return machine.measure({**given, **changes})

    search = Search(measure, 60, clock=lambda: machine.now)
    tuning = search.run(measure({}), Knobs(count="num_workers", now=given))
    assert tuning.recommended == {"num_workers": 1}
    assert any("as fast" in why for why in tuning.why)


def test_a_gain_that_does_not_come_again_is_not_recommended() -> None:
    rates = {
        "as given": itertools.repeat(100.0),
        "num_workers=1": itertools.chain([200.0], itertools.repeat(100.0)),
    }
    asked: list[str] = []

    def measure(changes: Mapping[str, Any]) -> Trial:
        trial = Trial(settings=changes, rate=None)
        asked.append(trial.name)
        return Trial(settings=changes, rate=next(rates.get(trial.name, iter([50.0]))), cost_seconds=0.1)

    search = Search(measure, 60, clock=lambda: 0.1 * len(asked))
    tuning = search.run(measure({}), Knobs(count="num_workers", now={"num_workers": 0}))
    assert tuning.recommended == {}
    assert tuning.why == [
        "num_workers=1 was faster when it was tried, but not faster when both were measured again 5 times"
    ]


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1.4, 0.9, 1.2, 0.8, 1.1], "faster only 3 times when both were measured again 5 times"),
        (
            [1.01, 1.02, 1.03, 1.04, 1.01],
            "gained only 2.0% when both were measured again, which may be chance",
        ),
    ],
)
def test_what_the_confirmations_have_shown_is_told(ratios: list[float], said: str) -> None:
    again = iter([rate for ratio in ratios for rate in (100.0, 100.0 * ratio)])
    tried = iter([100.0, 200.0, 50.0, 50.0])

    def measure(changes: Mapping[str, Any]) -> Trial:
        rate = next(tried, None) or next(again)
        return Trial(settings=changes, rate=rate, cost_seconds=0.1)

    search = Search(measure, 60, clock=lambda: 0.0)
    tuning = search.run(measure({}), Knobs(count="num_workers", now={"num_workers": 0}))
    assert tuning.why == [f"num_workers=1 was faster when it was tried, but {said}"]


def test_the_budget_is_used_for_confirmations_and_what_is_left_is_explained() -> None:
    machine = Machine(load_ms=10, compute_ms=1, batch_ms=0, cores=2, threads_help=False)
    tuning = machine.tuned(100, Knobs(count="num_workers", now={"num_workers": 0}))
    assert tuning.recommended == {"num_workers": 2}
    confirmed = [trial.settings for trial in tuning.trials if trial.why == "confirmation"]
    assert confirmed == [{}, {"num_workers": 2}] * 5
    left = 100 - machine.asked
    assert f"no other is likely to help, so {left} s of the budget were not needed" in tuning.ended


def test_a_budget_that_is_used_up_needs_no_explanation() -> None:
    machine = Machine(load_ms=10, compute_ms=1, batch_ms=0, cores=2, threads_help=False)
    tuning = machine.tuned(12, Knobs(count="num_workers", now={"num_workers": 0}))
    assert "not needed" not in tuning.ended


@examples(50)
@given(machine=machines, budget=st.floats(0.5, 60))
def test_it_ends_for_one_reason(machine: Machine, budget: float) -> None:
    tuning = machine.tuned(budget)
    reasons = ("a larger budget may find better settings", "likely to help", "hardly be faster")
    assert sum(reason in tuning.ended for reason in reasons) == 1
    if "larger budget" in tuning.ended:
        assert "not needed" not in tuning.ended
        assert "hardly be faster" not in " ".join(tuning.why)


def test_a_trial_is_judged_by_the_headroom_of_its_own() -> None:
    """Not by the speed of the step in the first trial, which a busy machine may have slowed down."""
    first = Trial(settings={}, rate=100.0, headroom=0.2, cost_seconds=1.0)

    def measure(changes: Mapping[str, Any]) -> Trial:
        # Faster than the first step alone, and the loop still waits a quarter of its time.
        rate = 130.0 if changes else 100.0
        return Trial(settings=changes, rate=rate, headroom=0.25, cost_seconds=1.0)

    knobs = Knobs(count="num_workers", batch="batch_size", now={"num_workers": 0, "batch_size": 8})
    tuning = Search(measure, 60, clock=lambda: 0.0).run(first, knobs)
    assert any(trial.why == "larger batches" for trial in tuning.trials)
    assert "no other is likely to help" in tuning.ended


def test_settings_that_fail_are_passed_over() -> None:
    def measure(changes: Mapping[str, Any]) -> Trial:
        if changes.get("num_workers", 0) > 1:
            return Trial(settings=changes, rate=None, error="out of memory", cost_seconds=0.1)
        return Trial(settings=changes, rate=100.0 * (1 + len(changes)), cost_seconds=0.1)

    tuning = Search(measure, 60).run(measure({}), Knobs(count="num_workers", now={"num_workers": 0}))
    assert tuning.recommended == {"num_workers": 1}
    assert [trial.error for trial in tuning.trials].count("out of memory") == 2


def test_ctrl_c_gives_what_was_measured() -> None:
    count = 0

    def measure(changes: Mapping[str, Any]) -> Trial:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return Trial(settings=changes, rate=100.0 * count, cost_seconds=0.1)

    tuning = Search(measure, 60).run(measure({}), Knobs(count="num_workers", now={"num_workers": 0}))
    assert tuning.interrupted
    assert len(tuning.trials) == 2
    assert tuning.recommended == {}


def test_a_budget_must_be_some_time() -> None:
    with pytest.raises(SettingsError, match="budget"):
        Search(lambda changes: Trial(settings={}, rate=1.0), 0)
