"""The beginning of a loop over remote data: when it is over, that it is not counted, and what is said of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.format import units as format_units
from headrace.measure import clock
from headrace.measure.reporting.report import figures
from headrace.measure.running import run as run_module
from headrace.measure.running.beginning import Beginning, beginning_of
from headrace.measure.running.children import Measured
from headrace.measure.running.network import IN_MEMORY, network_figures, network_notes
from headrace.measure.running.run import Plan, Run, measure
from headrace.measure.running.steps import Step
from headrace.observe.counting import Counted
from headrace.observe.stats import FetchStats, LoaderStats
from tests.uploads import upload

RECORD_BYTES = 2048
RECORDS_PER_UNIT = 8


@pytest.fixture
def remote(tmp_path: Path, s3_place: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """160 units of 16 KB, which are more than stay in memory."""
    monkeypatch.setattr(format_units, "UNIT_BYTES", RECORDS_PER_UNIT * RECORD_BYTES)
    with headrace.Writer(tmp_path / "data", {"image": f"uint8[{RECORD_BYTES}]"}) as writer:
        for number in range(160 * RECORDS_PER_UNIT):
            writer.write({"image": np.full(RECORD_BYTES, number % 256, np.uint8)})
    return upload(tmp_path / "data", s3_place)


@pytest.fixture
def small(tmp_path: Path, s3_place: str) -> str:
    """All of it stays in memory."""
    with headrace.Writer(tmp_path / "small", {"image": "uint8[64]"}) as writer:
        for number in range(64):
            writer.write({"image": np.full(64, number, np.uint8)})
    return upload(tmp_path / "small", f"{s3_place}-small")


def arrived(bytes: int = 0, rows: int = 0, **more: int) -> LoaderStats:
    return LoaderStats(rows=rows, fetched=FetchStats(bytes=bytes, **more))


def watched(loader: Any) -> Beginning:
    found = beginning_of(loader, 0.0)
    assert found is not None
    return found


# When it is over


def test_the_units_of_all_lanes_must_arrive(remote: str) -> None:
    beginning = watched(headrace.Loader(remote, batch_size=8))
    needed = 128 * RECORDS_PER_UNIT * RECORD_BYTES
    assert not beginning.is_over(arrived(needed - 1))
    assert beginning.is_over(arrived(needed))
    assert beginning.is_over(arrived(1, cached_bytes=needed - 1))
    assert beginning.is_over(arrived(rows=160 * RECORDS_PER_UNIT))
    fewer = watched(headrace.Loader(remote, batch_size=8, shuffle=headrace.Shuffle(kind="units", lanes=4)))
    assert fewer.is_over(arrived(needed // 32))
    half = watched(headrace.Loader(remote, batch_size=8, rank=0, world_size=2))
    assert not half.is_over(arrived(needed // 2 - 1))
    assert half.is_over(arrived(needed // 2))


def test_single_rows_are_never_faster_than_at_the_beginning(remote: str) -> None:
    assert watched(headrace.Loader(remote, batch_size=8, shuffle="global")).is_over(arrived())


def test_local_data_has_none(data: Path) -> None:
    assert beginning_of(headrace.Loader(data, seq_len=64, batch_size=4), 0.0) is None
    assert beginning_of([1, 2], 0.0) is None


def test_what_has_not_arrived_is_told(remote: str) -> None:
    beginning = watched(headrace.Loader(remote, batch_size=8))
    (note,) = beginning.notes(arrived(1_000_000), now=30.0)
    assert note.startswith("after 30 s, only 1 MB of the 2 MB had arrived")
    assert beginning.notes(arrived(3_000_000), now=30.0) == []


# What is counted


class Arriving(Counted):
    """A loader whose first batches are slow, and which tells what has arrived, a byte with each batch."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(1000):
            clock.sleep(1.0 if number < 10 else 0.001)
            self.counters.fetched = FetchStats(requests=number, bytes=number)
            yield np.zeros((4, 2))


class OverAt(Beginning):
    def __init__(self, bytes: int, begun: float) -> None:
        self._begun, self._needed_bytes, self._epoch_rows = begun, bytes, 10**9
        self._stays_in_memory = False


@pytest.fixture
def over_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(bytes: int) -> None:
        monkeypatch.setattr(run_module, "beginning_of", lambda loader, begun: OverAt(bytes, begun))

    return choose


@pytest.mark.usefixtures("held")
def test_counting_begins_after_it(over_at: Any) -> None:
    over_at(9)
    run = measure(Arriving, Step(), Plan(batches=20, warmup=3))
    assert run.wait_ms["max"] == pytest.approx(1, rel=0.01)
    assert run.beginning is not None
    assert run.beginning["seconds"] == pytest.approx(10, rel=0.01)
    assert (run.beginning["is_over"], run.beginning["bytes"]) == (True, 9)
    found = network_figures([run])
    assert found["beginning_requests"] == 9
    assert found["network_requests"] == 20
    assert run.notes == []


@pytest.mark.usefixtures("held")
def test_it_is_not_waited_for_without_end(over_at: Any) -> None:
    over_at(10**9)
    run = measure(Arriving, Step(), Plan(batches=20, beginning_seconds=5.0))
    assert run.batches == 20
    assert run.beginning is not None
    assert run.beginning["seconds"] == pytest.approx(5, rel=0.01)
    assert not run.beginning["is_over"]
    assert "the figures are partly those of the beginning" in run.notes[0]


def test_a_loader_on_remote_data(small: str) -> None:
    loader = headrace.Loader(small, batch_size=8, epochs=None)
    run = measure(lambda: loader, Step(), Plan(batches=30))
    assert run.beginning is not None
    assert run.beginning["is_over"]
    assert run.beginning["bytes"] >= 64 * 64
    assert network_figures([run])["beginning_requests"] > 0
    assert network_notes(run) == [IN_MEMORY]


# Figures of several ranks


def _measured(**changes: Any) -> Run:
    fetched = FetchStats(requests=10, bytes=6_000_000, cached_bytes=2_000_000)._asdict()
    beginning = {"seconds": 2.0, "is_over": True, "stays_in_memory": False, **fetched}
    given = {"batches": 5, "seconds": 3.0, "beginning": beginning, "stats": {"fetched": fetched}}
    return Run(**{**given, **changes})


def test_ranks_are_added_up() -> None:
    found = figures([Measured(_measured()), Measured(_measured(seconds=1.0))])
    assert {name: found[name] for name in found if name.startswith(("network_", "beginning_"))} == {
        "network_requests": 20,
        "network_mb": 12.0,
        "network_mb_per_second": 8.0,
        "network_cached_share": 0.25,
        "beginning_seconds": 2.0,
        "beginning_requests": 20,
        "beginning_mb": 12.0,
        "beginning_mb_per_second": 6.0,
        "beginning_cached_share": 0.25,
    }
    assert network_figures([_measured(beginning=None, stats=None)]) == {}
    assert network_notes(_measured()) == network_notes(_measured(beginning=None)) == []
