"""What a user sees of a loop that is watched, in a log and after an error; on a terminal: test_live.py."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.errors import SettingsError
from headrace.measure.watching import monitor as monitor_module
from headrace.measure.watching.live import Picture
from headrace.measure.watching.monitor import Sampler, monitor
from headrace.measure.watching.watched import Watched
from headrace.observe.stats import LoaderStats, StageStats
from tests.measure.held_clock import HeldClock
from tests.measure.said import Said, check_lines, small_loader, wait_for


@pytest.mark.parametrize(
    ("make", "making"),
    [(small_loader, {"gather"}), (lambda: [{"x": np.zeros((4, 2))}] * 16, set())],
    ids=["Loader", "list"],
)
def test_elsewhere_there_are_lines_and_a_summary(
    make: Callable[[], Any], making: set[str], said: Said
) -> None:
    check_lines(make(), making, said)


def test_our_loader_may_be_iterated_over_itself(said: Said) -> None:
    loader = small_loader()
    list(loader)
    with monitor(loader):
        assert len(list(loader)) == 16
    assert said().startswith("headrace: 16 batches in ")  # since it was entered


def test_a_loader_that_is_iterated_over_past_the_monitor_gets_a_hint(said: Said) -> None:
    loader = [1, 2, 3]
    with monitor(loader):
        assert len(list(loader)) == 3
    assert "iterate over the object that headrace.monitor returns" in said()


def test_rows_are_counted_where_a_batch_tells() -> None:
    for batches, rows in (
        ([np.zeros((4, 2)), np.zeros((3, 2))], 7),
        ([{"x": np.zeros((5, 2)), "name": ["a"] * 5}], 5),
        ([(np.zeros((6, 2)), np.zeros(6))], 6),
        ([[np.zeros((6, 2)), np.zeros(6)]], 6),
        ([["a", "b", "c"]], 3),
        ([1, "a", None, (), [], np.float64(1)], 0),
    ):
        watched = Watched(batches)
        assert list(watched) is not None
        assert watched.stats().rows == rows


def test_what_is_watched_is_still_thesmall_loader() -> None:
    class Pages(list[int]):
        def __init__(self) -> None:
            super().__init__([1, 2, 3])
            self.batch_size = 4

    loader = Pages()
    watched = Watched(loader)
    assert watched.batch_size == 4
    assert len(watched) == 3
    assert bool(watched)
    assert not Watched([])
    with pytest.raises(AttributeError, match="no_such"):
        watched.no_such  # noqa: B018
    with pytest.raises(TypeError):
        len(Watched(iter([1])))
    assert list(Watched(iter([1]))) == [1]
    assert list(Watched(Watched([1, 2]))) == [1, 2]
    outer = Watched(inner := Watched([1, 2]))
    list(outer)
    assert inner.stats().batches == outer.stats().batches == 2


def test_the_users_error_passes_unchanged(said: Said) -> None:
    failure = RuntimeError("diverged")

    def loop() -> None:
        with monitor(small_loader()) as watched:
            for _ in watched:
                raise failure

    with pytest.raises(RuntimeError) as caught:
        loop()
    assert caught.value is failure
    assert failure.__context__ is None
    assert said().startswith("headrace: 1 batch in ")
    assert "headrace-monitor" not in [thread.name for thread in threading.enumerate()]


def test_a_view_that_fails_stops_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(picture: Picture) -> str:
        raise ValueError("cannot draw")

    monkeypatch.setattr(monitor_module, "one_line", broken)
    monkeypatch.setattr(monitor_module, "_LEAST_SECONDS", 0.0)
    with monitor(range(3), view="lines", every_seconds=0.01) as watched:
        wait_for(lambda: "cannot draw" in caplog.text)
        wait_for(lambda: "headrace-monitor" not in [thread.name for thread in threading.enumerate()])
        assert list(watched) == [0, 1, 2]
    assert caplog.text.count("Traceback") == 1


class Counted:
    """Stats as the test sets them, looked at by a sampler on a clock that the test holds."""

    def __init__(self, held: HeldClock) -> None:
        self.held, self.stats = held, LoaderStats()
        self.sampler = Sampler(lambda: self.stats, "loader")

    def goes_on(self, batches: int, wait: float, step: float) -> None:
        """So many batches come, and the loop waits and steps for so many seconds in all."""
        self.held.sleep(wait + step)
        was = self.stats
        stages = {
            "wait": StageStats(was.batches + batches, was.seconds("wait") + wait),
            "step": StageStats(was.batches + batches, was.seconds("step") + step),
        }
        self.stats = LoaderStats(was.batches + batches, rows=4 * (was.batches + batches), stages=stages)


@pytest.fixture
def counted(held: HeldClock) -> Counted:
    return Counted(held)


def test_rates_and_shares_are_of_the_last_seconds(counted: Counted) -> None:
    counted.goes_on(batches=100, wait=5, step=5)
    picture = counted.sampler.look()
    assert picture.batches_per_second == pytest.approx(10, rel=0.01)
    assert picture.rows_per_second == pytest.approx(40, rel=0.01)
    assert picture.wait_share == pytest.approx(0.5)
    for _ in range(6):
        counted.goes_on(batches=50, wait=0, step=1)
        picture = counted.sampler.look()
    assert picture.batches_per_second == pytest.approx(50, rel=0.01)
    assert picture.wait_share == 0
    assert picture.stages["step"] == (pytest.approx(1), pytest.approx(20))
    assert picture.history[0] == pytest.approx(0.5)
    assert picture.history[1:] == (0.0,) * 6
    assert (picture.batches, picture.elapsed_seconds) == (400, pytest.approx(16, rel=0.01))
    assert counted.sampler.summary().startswith("headrace: 400 batches in 16.0 s, 25/s: the loop waits 31%")


def test_a_loop_that_stalls_says_so(counted: Counted) -> None:
    counted.goes_on(batches=10, wait=1, step=1)
    assert "no batch" not in counted.sampler.look().verdict
    counted.held.sleep(4)
    assert "no batch" not in counted.sampler.look().verdict
    counted.held.sleep(3)
    assert counted.sampler.look().verdict == "no batch for 7 s"
    counted.goes_on(batches=1, wait=7, step=0)
    assert "no batch" not in counted.sampler.look().verdict


def test_settings_that_cannot_work_are_refused(said: Said) -> None:
    for options, expected in (
        ({"every_seconds": 0}, "every_seconds=0: must be at least 0.25"),
        ({"every_seconds": float("nan")}, "every_seconds=nan"),
        ({"view": "nice"}, "view='nice': must be"),
        ({"view": "live"}, "not a terminal"),
    ):
        with pytest.raises(SettingsError, match=expected), monitor([1], **options):
            pytest.fail("entered")
    with monitor([1], view="off"):
        pass
    assert said() == ""
