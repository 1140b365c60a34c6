"""What a user sees of a loop that is watched, in a log and after an error; on a terminal: test_live.py."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import penstock
from penstock.errors import SettingsError
from penstock.measure import monitor as monitor_module
from penstock.measure.live import Picture
from penstock.measure.monitor import monitor
from penstock.measure.watched import Watched
from penstock.torch import DataLoader

DEADLINE_SECONDS = 60.0


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """All that was written to standard error so far."""
    parts: list[str] = []

    def read() -> str:
        parts.append(capfd.readouterr().err)
        return "".join(parts)

    return read


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((50, 50), index**2)


def _loader(**options: Any) -> penstock.Loader:
    data = penstock.from_arrays({"x": np.arange(640.0).reshape(64, 10)})
    return penstock.Loader(data, batch_size=4, **options)


def _each_loader() -> Iterator[Any]:
    yield pytest.param(lambda: _loader(), {"gather"}, id="Loader")
    yield pytest.param(
        lambda: DataLoader(Squares(), batch_size=4, num_workers=2),
        {"read", "collate", "transport"},
        id="processes",
    )
    yield pytest.param(
        lambda: DataLoader(Squares(), batch_size=4, num_workers=2, workers="thread"),
        {"read", "collate"},
        id="threads",
    )
    yield pytest.param(lambda: torch.utils.data.DataLoader(Squares(), batch_size=4), set(), id="torch's")
    yield pytest.param(
        lambda: torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2),
        set(),
        id="torch's with workers",
    )
    yield pytest.param(lambda: [{"x": np.zeros((4, 2))}] * 16, set(), id="list")


@pytest.mark.parametrize(("make", "making"), list(_each_loader()))
def test_elsewhere_there_are_lines_and_a_summary(
    make: Callable[[], Any], making: set[str], said: Callable[[], str]
) -> None:
    loader = make()
    with monitor(loader, every_seconds=0.25) as watched:
        assert len(watched) == 16
        for _ in range(2):
            assert len([batch for batch in watched]) == 16  # noqa: C416 - the loop of a script
        wait_for(lambda: ", 32 batches in" in said())
    lines = said().splitlines()
    assert watched.stats().batches == 32
    assert set(watched.stats().stages) == {"start", "wait", "step"} | making
    assert re.match(
        rf"penstock: {type(loader).__name__}, \d+ batches in [\d.]+ s, [\d.]+ batches/s", lines[0]
    )
    assert all(f" {stage} " in lines[-2] for stage in ("wait", "step", *making))
    assert re.match(r"penstock: 32 batches in [\d.]+ s, [\d.]+/s: the loop waits \d+%", lines[-1])


@pytest.mark.parametrize("make", [_loader, lambda: DataLoader(Squares(), batch_size=4)])
def test_our_loaders_may_be_iterated_over_themselves(
    make: Callable[[], Any], said: Callable[[], str]
) -> None:
    loader = make()
    list(loader)
    with monitor(loader):
        assert len(list(loader)) == 16
    assert said().startswith("penstock: 16 batches in ")  # since it was entered


def test_a_loader_that_is_iterated_over_past_the_monitor_gets_a_hint(said: Callable[[], str]) -> None:
    loader = [1, 2, 3]
    with monitor(loader):
        assert len(list(loader)) == 3
    assert "iterate over what penstock.monitor gives" in said()


def test_rows_are_counted_where_a_batch_tells() -> None:
    for batches, rows in (
        ([np.zeros((4, 2)), np.zeros((3, 2))], 7),
        ([{"x": torch.zeros(5, 2), "name": ["a"] * 5}], 5),
        ([(torch.zeros(6, 2), torch.zeros(6))], 6),
        ([[torch.zeros(6, 2), torch.zeros(6)]], 6),
        ([["a", "b", "c"]], 3),
        ([1, "a", None, (), [], np.float64(1)], 0),
    ):
        watched = Watched(batches)
        assert list(watched) is not None
        assert watched.stats().rows == rows


def test_what_is_watched_is_still_the_loader() -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4)
    watched = Watched(loader)
    assert watched.batch_size == 4
    assert watched.dataset is loader.dataset
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


def test_the_users_error_passes_unchanged(said: Callable[[], str]) -> None:
    failure = RuntimeError("diverged")

    def loop() -> None:
        with monitor(_loader()) as watched:
            for _ in watched:
                raise failure

    with pytest.raises(RuntimeError) as caught:
        loop()
    assert caught.value is failure
    assert failure.__context__ is None
    assert said().startswith("penstock: 1 batches")
    assert "penstock-monitor" not in [thread.name for thread in threading.enumerate()]


def test_a_view_that_fails_stops_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(picture: Picture) -> str:
        raise ValueError("cannot draw")

    monkeypatch.setattr(monitor_module, "one_line", broken)
    with monitor(range(3), view="lines", every_seconds=0.25) as watched:
        wait_for(lambda: "cannot draw" in caplog.text)
        wait_for(lambda: "penstock-monitor" not in [thread.name for thread in threading.enumerate()])
        assert list(watched) == [0, 1, 2]
    assert caplog.text.count("Traceback") == 1


def test_a_loop_that_stalls_says_so(monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]) -> None:
    monkeypatch.setattr(monitor_module, "_STALL_SECONDS", 0.0)
    with monitor([1], every_seconds=0.25):
        wait_for(lambda: "no batch for" in said())


def test_settings_that_cannot_work_are_refused(said: Callable[[], str]) -> None:
    for options, expected in (
        ({"every_seconds": 0}, "every_seconds=0: must be at least 0.25"),
        ({"every_seconds": float("nan")}, "every_seconds=nan"),
        ({"view": "nice"}, "view='nice': must be"),
        ({"view": "live"}, "no terminal"),
    ):
        with pytest.raises(SettingsError, match=expected), monitor([1], **options):
            pytest.fail("entered")
    with monitor([1], view="off"):
        pass
    assert said() == ""
