"""Benchmarks in processes of their own, with targets of every kind. What is asserted is what happened, not how fast."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.errors import SettingsError
from headrace.measure.reporting.report import METRICS, Point, Report
from headrace.measure.running import bench as bench_module
from headrace.measure.running import children, page_cache, resources
from headrace.measure.running.bench import BenchSettings, bench
from headrace.measure.running.children import Measured, TargetRun, run_child, run_ranks
from headrace.measure.running.run import Plan, Run
from headrace.measure.running.steps import Step
from headrace.measure.running.targets import find_target
from tests.measure.held_clock import HeldClock

PLAN = Plan(seconds=0.2, batches=20)
NEVER_SECONDS = 600.0
"""Longer than any test may take: what is given up after that fails by its test's own limit."""


def _bench(name: str, step: Step | None = None, plan: Plan = PLAN, **settings: Any) -> Report:
    chosen = BenchSettings(**{"runs": 1, "timeout_seconds": NEVER_SECONDS, **settings})
    return bench(find_target(name, {}), step or Step(), plan, chosen)


def _task(name: str, **more: Any) -> TargetRun:
    given = {
        "target": find_target(name, {}),
        "step": Step(),
        "plan": PLAN,
        "timeout_seconds": NEVER_SECONDS,
    }
    return TargetRun(**{**given, **more})


@pytest.fixture
def nothing_stays_behind() -> Iterator[None]:
    # Other tests may have left a server of multiprocessing's.
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_dataset_is_measured_from_cold_to_warm(data: Path) -> None:
    target = find_target(str(data), {"seq_len": 128, "batch_size": 4})
    report = bench(target, Step(compute_ms=1), PLAN, BenchSettings(runs=1, timeout_seconds=NEVER_SECONDS))
    (point,) = report.points
    found = point.summary
    assert report.notes == []
    elsewhere = ("network_", "beginning_", "server_")
    of_remote_data = {metric.name for metric in METRICS if metric.name.startswith(elsewhere)}
    wanted = {metric.name for metric in METRICS} - {"peak_rss_mb"} - of_remote_data
    assert set(found) == wanted, "every figure there is"
    assert found["padding"]["median"] < 0.1
    assert found["tokens_per_second"]["median"] == pytest.approx(512 * found["batches_per_second"]["median"])
    assert 0 < found["utilisation"]["median"] <= 1
    assert found["peak_pss_mb"]["median"] >= found["peak_uss_mb"]["median"] > 1
    assert point.runs[0]["stats"]["stages"]["gather"]["count"] > 0
    again = json.loads(json.dumps(report.to_json()))
    assert again["points"][0]["summary"]["wait_ms_p99"]["median"] == found["wait_ms_p99"]["median"]


def test_sweeps_make_points_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def measured(task: TargetRun, tell: Any) -> Measured:
        run = Run(first_batch_seconds=1.0, batches=3, seconds=1.0)
        tell(run, 0)
        return Measured(run)

    def tell(point: Point, turn: int, run: Any, pid: int) -> None:
        order.append(f"{turn} {point.name}")

    monkeypatch.setattr(bench_module, "run_child", measured)
    settings = BenchSettings(runs=2, sweeps={"num_workers": [0, 2], "batch_size": [4, 8]}, cold=False)
    report = bench(find_target("train:make_loader", {}), Step(), PLAN, settings, tell)
    names = [point.name for point in report.points]
    assert names == [f"num_workers={n}, batch_size={b}" for n in (0, 2) for b in (4, 8)]
    assert order == [f"0 {name}" for name in names] + [f"1 {name}" for name in names[1:] + names[:1]]
    assert all(len(point.runs) == 2 for point in report.points)


def test_each_point_is_measured_with_its_settings(targets: str) -> None:
    """On a clock that stands still but for the sleeping: a batch of 4 takes 4 ms, or 1 ms with four workers."""
    report = _bench("held_targets:sleeping", Step(compute_ms=1), sweeps={"num_workers": [0, 4]}, cold=False)
    assert [point.errors for point in report.points] == [[], []]
    rates = [point.median("samples_per_second") for point in report.points]
    assert rates == [pytest.approx(4 / 0.005, rel=0.01), pytest.approx(4 / 0.002, rel=0.01)]
    assert [point.median("wait_ms_p50") for point in report.points] == pytest.approx([4, 1], rel=0.01)
    assert [point.median("utilisation") for point in report.points] == pytest.approx([0.2, 0.5], rel=0.01)


def test_ranks_run_at_once_and_are_added_up(targets: str) -> None:
    report = _bench(f"{targets}:ranked", sweeps={"ranks": [2]})
    (point,) = report.points
    assert point.name == "ranks=2"
    assert point.errors == []
    (run,) = point.runs
    # Rank 0 has one sample a batch, rank 1 two.
    assert run["samples_per_second"] > run["batches_per_second"]


def test_the_size_of_a_dataset_can_be_swept(data: Path) -> None:
    target = find_target(str(data), {"seq_len": 64, "batch_size": 2})
    settings = BenchSettings(runs=1, sweeps={"dataset_size": [0.1, 1.0]}, cold=False)
    report = bench(target, Step(), PLAN, settings)
    assert [point.errors for point in report.points] == [[], []]
    assert [point.runs[0]["batches"] for point in report.points] == [20, 20]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", ["ValueError: no such bucket\nat "]),
        ("exits", ["SystemExit: 2\nat ", "its last lines:\nusage: nothing"]),
        ("empty", ["gave no batch"]),
        ("crashes", ["killed by SIGSEGV\nits last lines:\nabout to crash"]),
        ("not_a_loader", ["returned int"]),
    ],
)
def test_targets_that_fail_are_told(targets: str, name: str, said: list[str]) -> None:
    (point,) = _bench(f"{targets}:{name}", cold=False).points
    assert [each for each in said if each not in point.errors[0]] == []
    assert point.runs == []


def test_what_was_measured_before_a_failure_is_kept(targets: str) -> None:
    (point,) = _bench(f"{targets}:fails_later").points
    assert "after 10 batches: OSError: disk gone" in point.errors[0]
    assert point.runs[0]["batches"] == 7
    assert not point.runs[0]["complete"]


@pytest.mark.usefixtures("nothing_stays_behind")
def test_a_worker_that_dies_is_told(targets: str) -> None:
    pytest.importorskip("torch", reason="needs PyTorch's DataLoader")
    # It dies of the fiftieth batch, wherever the loop is at that moment.
    (point,) = _bench(f"{targets}:dying", plan=Plan(batches=100)).points
    assert "DataLoader worker" in point.errors[0]
    assert point.runs[0]["batches"] > 10


def test_early_ends_and_other_batch_sizes_are_noted(targets: str) -> None:
    (early,) = _bench(f"{targets}:early").points
    assert (early.errors, early.runs[0]["notes"]) == (
        [],
        ["the loader ended after 10 batches, and a new iteration of it gave none"],
    )
    (changing,) = _bench(f"{targets}:changing").points
    assert "3 to 4 samples" in changing.runs[0]["notes"][0]


@pytest.fixture
def let_time_pass(held: HeldClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The parent's clock stands still until so many targets hang; then an hour passes at every look but the first,
    which may come before the parent has read all that the targets have said."""

    def when_hanging(targets: int) -> None:
        looks = 0

        def now() -> float:
            nonlocal looks
            looks += len(list(tmp_path.glob("hanging-*"))) == targets
            if looks > 1:
                held.sleep(3600)
            return held.seconds

        monkeypatch.setattr(children.clock, "now", now)
        monkeypatch.setattr(children, "_LOOK_SECONDS", 0.05)

    return when_hanging


@pytest.mark.usefixtures("nothing_stays_behind")
@pytest.mark.parametrize(("name", "what"), [("never", "no first batch"), ("stalls", "no batch")])
def test_a_target_that_hangs_is_given_up_with_its_stack(
    targets: str, name: str, what: str, let_time_pass: Callable[[int], None]
) -> None:
    let_time_pass(1)
    report = _bench(f"{targets}:{name}", plan=Plan(batches=100), timeout_seconds=1.5)
    error = report.points[0].errors[0]
    assert error.startswith(f"{what} within 1.5 seconds")
    assert f"in {name}" in error


@pytest.mark.usefixtures("nothing_stays_behind")
def test_ranks_that_hang_are_all_given_up(targets: str, let_time_pass: Callable[[int], None]) -> None:
    let_time_pass(2)
    ranks = run_ranks(_task(f"{targets}:never", timeout_seconds=0.5), 2)
    assert all("no first batch" in str(each.error) for each in ranks)
    assert all("in never" in str(each.error) for each in ranks)


def test_a_step_that_raises_is_told(targets: str) -> None:
    report = _bench(f"{targets}:plain", Step(name=f"{targets}:bad_step"))
    assert "bad_step failed: RuntimeError: loss is nan" in report.points[0].errors[0]
    fine = _bench("held_targets:plain", Step(name="held_targets:step"))
    assert fine.points[0].median("step_ms_p50") == pytest.approx(2, rel=0.01)
    assert fine.points[0].median("utilisation") == pytest.approx(1, rel=0.01)


def test_ctrl_c_gives_what_was_measured_so_far(targets: str) -> None:
    task = _task(f"{targets}:sleeping", plan=Plan(seconds=600))
    told = threading.Event()

    def interrupt() -> None:
        told.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    def tell(run: Any, pid: int) -> None:
        if run.batches:
            told.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    measured = run_child(task, tell)
    thread.join()
    assert measured.interrupted
    assert measured.error is None
    assert measured.run.batches > 0
    assert measured.run.wait_ms["p50"] > 0


def test_caches_that_cannot_be_dropped_are_said(
    targets: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = _bench(f"{targets}:plain")
    assert report.notes == [
        "first batch, cold: not measured: the files that are read are unknown; give --files"
    ]
    assert "first_batch_warm_seconds" in report.points[0].summary
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)
    files = [path for path in data.iterdir() if path.stat().st_size > 4096]
    for path in files:
        path.read_bytes()
    assert "stayed in memory" in str(page_cache.drop_files(files))
    monkeypatch.delattr(os, "posix_fadvise")
    assert "this OS" in str(page_cache.drop_files(files))
    assert "could not be opened" in str(_refused(monkeypatch, files))


def _refused(monkeypatch: pytest.MonkeyPatch, files: list[Path]) -> str | None:
    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None, raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        return page_cache.drop_files(files)


def test_dropped_files_are_read_again_from_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2**20))
    problem = page_cache.drop_files([path])
    with path.open("rb") as file:
        resident = page_cache.resident_bytes(file.fileno())
    # A file system in memory has no other place for its pages, and says so.
    assert (problem is None) == (resident is not None and resident < 2**16)


def test_an_os_that_tells_less_gives_less(monkeypatch: pytest.MonkeyPatch) -> None:
    class Info:
        rss = 5_000_000

    monkeypatch.setattr(psutil.Process, "memory_full_info", lambda self: Info())
    found = resources.memory(os.getpid())
    assert (found.pss, found.uss) == (None, None)
    assert found.rss is not None

    def refused(self: Any) -> Any:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_full_info", refused)
    assert resources.memory(os.getpid()) == resources.MemoryMb()


def test_settings_are_checked() -> None:
    with pytest.raises(SettingsError, match="runs=0"):
        BenchSettings(runs=0)
    with pytest.raises(SettingsError, match="no values were given"):
        BenchSettings(sweeps={"num_workers": []})
    with pytest.raises(SettingsError, match="points"):
        BenchSettings(sweeps={"a": range(20), "b": range(20)})
    with pytest.raises(SettingsError, match="ranks='two'"):
        _bench("x:y", sweeps={"ranks": ["two"]})
