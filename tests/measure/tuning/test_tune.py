"""Tuning real loaders: the setting that is recommended was measured, and the loop waits less with it.

The clocks are held, here and in the processes that are measured: a loader takes as long as it sleeps.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import SettingsError, TargetError
from headrace.measure import clock
from headrace.measure.running.steps import Step
from headrace.measure.running.targets import find_target
from headrace.measure.tuning.search import Trial
from headrace.measure.tuning.tune import tune, tune_target
from tests.measure.held_clock import HeldClock

pytestmark = pytest.mark.usefixtures("held")


def sleeping(batch_size: int = 4, num_workers: int = 0) -> Iterator[Any]:
    """A sample takes 2 ms; up to four workers load at once."""
    batch = np.zeros((batch_size, 10))
    while True:
        clock.sleep(batch_size * 2e-3 / max(1, min(num_workers, 4)))
        yield batch


def test_workers_that_help_are_found() -> None:
    trials: list[Trial] = []
    tuning = tune(sleeping, compute_ms=1, budget_seconds=20, keep=["batch_size"], progress=trials.append)
    assert tuning.recommended == {"num_workers": 4}
    assert tuning.gain == {name: pytest.approx(9 / 3, rel=0.01) for name in ("median", "lowest", "highest")}
    assert [trial.name for trial in trials][:4] == [
        "as given",
        "num_workers=1",
        "num_workers=2",
        "num_workers=4",
    ]
    assert [trial.rate for trial in trials][:4] == pytest.approx(
        [4 / 0.009, 4 / 0.009, 4 / 0.005, 4 / 0.003], rel=0.01
    )
    assert tuning.trials == trials
    assert tuning.to_json()["recommended"] == {"num_workers": 4}


def test_it_ends_with_its_budget(held: HeldClock) -> None:
    begun = held.seconds
    tuning = tune(sleeping, compute_ms=1, budget_seconds=3, keep=["batch_size"])
    # The first trial and one confirmation are always there; each takes half a second or more.
    assert held.seconds - begun <= 4
    assert "the budget does not allow for the three that another setting needs" in tuning.ended
    assert "not needed" not in tuning.ended


def test_a_step_that_is_slower_than_its_loader_needs_nothing() -> None:
    tuning = tune(lambda num_workers=1: iter([[1, 2, 3]] * 10**6), step=lambda batch: clock.sleep(0.01))
    assert tuning.recommended == {}
    assert len(tuning.trials) == 1
    assert "hardly be faster" in tuning.why[0]


def test_a_machine_that_becomes_busier_is_not_taken_for_a_fast_loader() -> None:
    """The step alone is measured last. If it takes longer by then, the loop still waits for its loader."""
    latest: list[Any] = []

    def loading(num_workers: int = 0) -> Iterator[Any]:
        while True:
            clock.sleep(4e-3 / max(1, num_workers))
            yield np.zeros((4, 10))

    def step(batch: Any) -> None:
        is_alone = bool(latest) and batch is latest[0]
        clock.sleep(0.03 if is_alone else 0.01)
        latest[:] = [batch]

    tuning = tune(loading, step=step, budget_seconds=30)
    assert tuning.baseline.wait_share == pytest.approx(4 / 14, rel=0.01)
    assert tuning.baseline.headroom == tuning.baseline.wait_share
    assert tuning.recommended["num_workers"] > 0


def test_a_target_is_tuned_in_processes_of_its_own(targets: str) -> None:
    target = find_target("held_targets:sleeping", {"pause_ms": 2.0, "num_workers": 2})
    tuning = tune_target(target, step=Step(compute_ms=1), budget_seconds=20, keep=["batch_size"])
    assert tuning.recommended == {"num_workers": 4}
    assert tuning.gain is not None
    assert tuning.gain["lowest"] == pytest.approx(5 / 3, rel=0.01)


def test_what_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(SettingsError, match="nothing can be tuned"):
        tune(lambda: sleeping(), budget_seconds=1)
    with pytest.raises(
        SettingsError, match="keep='colour': the target has no such setting; it has 'num_workers'"
    ):
        tune(lambda num_workers=0: sleeping(), budget_seconds=1, keep=["colour"])
    with pytest.raises(SettingsError, match="make_loader=7"):
        tune(7)  # type: ignore[arg-type]


def test_a_target_that_fails_is_told(targets: str) -> None:
    with pytest.raises(TargetError, match="no such bucket"):
        tune_target(find_target(f"{targets}:raises", {}), step=Step(), budget_seconds=1)

    def fails(num_workers: int = 0) -> Any:
        raise OSError("gone")

    with pytest.raises(TargetError, match="OSError: gone"):
        tune(fails, budget_seconds=1)


def test_a_simulated_step_grows_with_the_batch() -> None:
    """Else twice the batch in the same time would always win."""
    tuning = tune(sleeping, compute_ms=8, budget_seconds=6, keep=["num_workers"])
    assert tuning.recommended == {}


def test_it_is_part_of_headrace() -> None:
    assert headrace.tune is tune
