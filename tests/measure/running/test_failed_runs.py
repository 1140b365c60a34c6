"""A run that dies early, before its first batch or in the warm-up, is told clearly by everyone who shows runs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from headrace.cli.main import cli
from headrace.errors import TargetError
from headrace.measure.doctor import doctor
from headrace.measure.reporting.html import html
from headrace.measure.reporting.report import Report
from headrace.measure.reporting.table import table
from headrace.measure.running import bench as bench_module
from headrace.measure.running.bench import BenchSettings, bench
from headrace.measure.running.children import Measured, TargetRun
from headrace.measure.running.run import Plan, Run
from headrace.measure.running.steps import Step
from headrace.measure.running.targets import find_target
from headrace.measure.tuning import tune

KILLED = "the process that ran the target was killed by SIGKILL (out of memory?)"
SETTINGS = BenchSettings(runs=1, cold=False, timeout_seconds=600)


def before_the_first_batch() -> Measured:
    return Measured(Run(), error=KILLED)


def in_the_warm_up() -> Measured:
    return Measured(
        Run(first_batch_seconds=0.5, notes=["the loader gave no more batches than the warm-up"]), error=KILLED
    )


def after_some_batches() -> Measured:
    run = Run(first_batch_seconds=0.5, batches=7, seconds=0.7, samples=28, wait_share=0.1)
    return Measured(run, error=KILLED)


def finished(rate: float = 10.0) -> Measured:
    run = Run(first_batch_seconds=0.5, batches=10, seconds=10 / rate, samples=40, wait_share=0.1)
    run.knobs = {"count": "num_workers", "now": {"num_workers": 0}}
    run.complete = True
    return Measured(run)


EARLY = [before_the_first_batch, in_the_warm_up]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def measure_as(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Measured]], None]:
    """Runs end as a function of their settings says, without a process."""

    def choose(run: Callable[[Mapping[str, Any]], Measured]) -> None:
        def run_child(task: TargetRun, tell: Any = None) -> Measured:
            return run(task.settings)

        for module in (bench_module, doctor, tune):
            monkeypatch.setattr(module, "run_child", run_child)

    return choose


Choose = Callable[[Callable[..., Measured]], None]


def _bench(**sweeps: list[Any]) -> Report:
    settings = BenchSettings(runs=1, cold=False, sweeps=sweeps)
    return bench(find_target("train:make_loader", {}), Step(), Plan(), settings)


def _invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, [*words])


def test_what_died_before_its_first_batch_is_an_error_and_no_run(targets: str) -> None:
    (point,) = bench(find_target(f"{targets}:dies_at_once", {}), Step(), Plan(batches=20), SETTINGS).points
    assert point.errors[0].startswith(KILLED)
    assert point.runs == []


def test_what_died_in_the_warm_up_has_a_start_and_no_batches(targets: str) -> None:
    target = find_target(f"{targets}:dies_in_the_warm_up", {})
    (point,) = bench(target, Step(), Plan(batches=20), SETTINGS).points
    assert point.errors[0].startswith(KILLED)
    (run,) = point.runs
    assert (run["batches"], run["complete"]) == (0, False)
    assert "first_batch_warm_seconds" in run
    assert "batches_per_second" not in point.summary


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (before_the_first_batch, "Nothing was measured."),
        (in_the_warm_up, "No batch was counted: only the start was measured."),
        (after_some_batches, "No step was given"),
    ],
)
def test_a_report_of_one_point(ending: Callable[[], Measured], said: str, measure_as: Choose) -> None:
    measure_as(lambda settings: ending())
    report = _bench()
    lines = table(report, 120)
    assert said in "\n".join(lines)
    assert "failed: as given" in lines
    assert f"  {KILLED}" in lines
    page = html(report)
    assert said in page
    assert "The run failed." in page
    assert KILLED in page
    (point,) = json.loads(json.dumps(report.to_json()))["points"]
    assert point["errors"] == [KILLED]
    assert [run["batches"] for run in point["runs"]] == [run["batches"] for run in report.points[0].runs]


@pytest.mark.parametrize("ending", EARLY)
def test_the_other_points_of_a_sweep_stand(ending: Callable[[], Measured], measure_as: Choose) -> None:
    measure_as(lambda settings: ending() if settings["num_workers"] == 2 else finished())
    report = _bench(num_workers=[0, 2])
    text = "\n".join(table(report, 120))
    assert "failed: num_workers=2" in text
    assert "40.0" in text, "samples a second of the point that was measured"
    page = html(report)
    assert "1 of 2 points failed." in page
    assert "Best point: <b>num_workers=0</b>" in page
    assert report.points[0].errors == []


@pytest.mark.parametrize("ending", EARLY)
def test_a_rank_that_died(ending: Callable[[], Measured], folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(bench_module, "run_ranks", lambda task, ranks, tell: [finished(), ending()])
    report = _bench(ranks=[2])
    (point,) = report.points
    assert point.errors == [KILLED]
    assert point.runs[0]["complete"] is False
    assert any(KILLED in line for line in table(report, 120))
    assert KILLED in html(report)


@pytest.mark.parametrize("ending", EARLY)
def test_a_cold_start_that_died_is_not_tried_again(
    ending: Callable[[], Measured], measure_as: Choose, folder: Path
) -> None:
    measure_as(lambda settings: ending())
    (folder / "file").write_bytes(bytes(10_000))
    settings = BenchSettings(runs=3, files=(folder / "file",))
    report = bench(find_target("train:make_loader", {}), Step(), Plan(), settings)
    (point,) = report.points
    assert point.errors[0] == KILLED
    assert KILLED in html(report)


@pytest.mark.parametrize("ending", EARLY)
def test_the_command_bench(ending: Callable[[], Measured], measure_as: Choose, folder: Path) -> None:
    measure_as(lambda settings: ending())
    words = ("bench", "train:make_loader", "--runs", "1", "--no-cold")
    shown = _invoke(*words, "--html", "report.html", "--out", "report.json")
    assert shown.exit_code == 1
    assert KILLED in shown.output
    assert KILLED in (folder / "report.html").read_text()
    written = _invoke(*words, "--json")
    assert written.exit_code == 1
    for document in (json.loads(written.stdout), json.loads((folder / "report.json").read_text())):
        assert document["points"][0]["errors"] == [KILLED]


@pytest.mark.parametrize("ending", EARLY)
def test_doctor_says_it_instead_of_a_finding(ending: Callable[[], Measured], measure_as: Choose) -> None:
    measure_as(lambda settings: ending())
    with pytest.raises(TargetError, match="killed by SIGKILL"):
        doctor.examine_target(find_target("train:make_loader", {}), Step())
    shown = _invoke("doctor", "train:make_loader")
    assert shown.exit_code == 1
    assert "killed by SIGKILL" in shown.output


@pytest.mark.parametrize("ending", EARLY)
def test_tune_needs_what_was_given_to_run(ending: Callable[[], Measured], measure_as: Choose) -> None:
    measure_as(lambda settings: ending())
    with pytest.raises(TargetError, match="killed by SIGKILL"):
        tune.tune_target(find_target("train:make_loader", {}), step=Step())


@pytest.mark.parametrize("ending", EARLY)
def test_tune_passes_over_a_setting_that_dies(ending: Callable[[], Measured], measure_as: Choose) -> None:
    def run(settings: Mapping[str, Any]) -> Measured:
        workers = settings.get("num_workers", 0)
        return ending() if workers > 1 else finished(10.0 * (1 + workers))

    measure_as(run)
    shown = _invoke("tune", "train:make_loader")
    assert shown.exit_code == 0
    said = click.unstyle(shown.output)
    assert "set num_workers=1" in said
    assert said.count(f"failed: {KILLED}") == 2
    document = json.loads(_invoke("tune", "train:make_loader", "--json").stdout)
    assert document["recommended"] == {"num_workers": 1}
    assert [trial["error"] for trial in document["trials"]].count(KILLED) == 2


def test_an_error_while_it_is_summed_up_loses_no_figure(
    monkeypatch: pytest.MonkeyPatch, targets: str
) -> None:
    """PyTorch raises the death of a worker from a signal handler, wherever the main thread is."""
    from headrace.measure.running import run as run_module

    real, asked = run_module.cpu_seconds, 0

    def interrupted() -> Any:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
        return real()

    monkeypatch.setattr(run_module, "cpu_seconds", interrupted)
    told: list[Run] = []
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        run_module.measure(lambda: [[1, 2]] * 100, Step(), Plan(batches=20), told.append)
    assert told[-1].batches == 20
    assert told[-1].samples == 40
    assert not told[-1].complete
