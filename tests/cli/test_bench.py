"""`headrace bench` and `headrace tune` as users meet them."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from headrace.cli.measure_options import parse_settings, parse_sweeps, parse_value
from headrace.cli.tune import describe, show_trial
from headrace.errors import SettingsError
from headrace.measure.running.children import Measured, TargetRun
from headrace.measure.running.run import Run
from headrace.measure.tuning import tune
from headrace.measure.tuning.search import Trial, Tuning
from tests.cli.commands import run_command, run_here
from tests.measure import held_clock

TARGETS = """
import numpy as np
from headrace.measure import clock

def sleeping(num_workers=0, batch_size=4):
    while True:
        clock.sleep(batch_size * 2e-3 / max(1, min(num_workers, 4)))
        yield {"tokens": np.zeros((batch_size, 16), np.int64)}

def raises():
    raise ValueError("no such bucket")

def step(batch):
    clock.sleep(0.001)
"""
HELD = """
from held_clock import hold_the_clock
from my_targets import *

hold_the_clock()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With targets; those of `held_targets` are on a clock of their own, on which a sleep takes no time."""
    path = tmp_path_factory.mktemp("bench")
    (path / "my_targets.py").write_text(TARGETS)
    (path / "held_targets.py").write_text(HELD)
    shutil.copy(held_clock.__file__, path / "held_clock.py")
    return path


@pytest.fixture(autouse=True)
def in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def data(write_dataset: Callable[..., Any], folder: Path) -> Path:
    rng = np.random.default_rng(0)
    write_dataset(folder / "data", {"tokens": "uint16[*]"}, [[{"tokens": rng.integers(0, 99, 200)}] * 200])
    return folder / "data"


def test_a_dataset_and_its_reports(folder: Path, data: Path) -> None:
    words = ["bench", "data", "--seq-len", 128, "--batch-size", 4, "--compute-ms", 1]
    words += ["--batches", 20, "--runs", 1, "--timeout", 600]
    done = run_here(*words, "--html", "r.html", "--out", "r.json", "--trace", "t.json")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("cold", "warm", "tokens/s", "p99", "MLPerf", "PSS", "written: r.html"):
        assert word in done.stdout
    assert "<html" in (folder / "r.html").read_text()
    report = json.loads((folder / "r.json").read_text())
    assert report["points"][0]["summary"]["tokens_per_second"]["median"] > 0
    stages = {event["name"] for event in json.loads((folder / "t.json").read_text())["traceEvents"]}
    assert {"gather", "wait", "step"} <= stages


def test_a_function_swept_as_json() -> None:
    words = ["bench", "held_targets:sleeping", "--sweep", "num_workers=0,4", "--set", "batch_size=2"]
    words += ["--step", "held_targets:step", "--seconds", "0.2", "--runs", "1", "--json"]
    done = run_here(*words)
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert [point["settings"] for point in report["points"]] == [{"num_workers": 0}, {"num_workers": 4}]
    assert report["settings"] == {"batch_size": 2}
    rates = [point["summary"]["samples_per_second"]["median"] for point in report["points"]]
    assert rates == [pytest.approx(2 / 0.005, rel=0.01), pytest.approx(2 / 0.002, rel=0.01)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "my_targets:raises", "--runs", "1"], "no such bucket"),
        (["bench", "nowhere"], "no such dataset"),
        (
            ["bench", "my_targets:sleeping", "--sweep", "num_workers"],
            "--sweep 'num_workers': write NAME=VALUE, such as --sweep 'num_workers=1,2,4'",
        ),
        (["bench", "my_targets:sleeping", "--set", "seq_len"], "such as --set 'num_workers=4'"),
        (["bench", "my_targets:sleeping", "--sweep", "batch_size="], "sweep 'batch_size': no values"),
        (
            ["bench", "my_targets:sleeping", "--seq-len", "2"],
            "seq_len: my_targets:sleeping has no such parameter",
        ),
        (["bench", "my_targets:sleeping", "--files", "nothing-here"], "no such file"),
        (
            ["bench", "my_targets:sleeping", "--compute-ms", "1", "--step", "my_targets:step"],
            "give only one of them",
        ),
        (["tune", "my_targets:raises"], "no such bucket"),
        (
            ["tune", "held_targets:sleeping", "--keep", "colour", "--budget", "1"],
            "it has 'num_workers', 'batch_size'",
        ),
    ],
)
def test_bad_input_is_told_in_a_line(arguments: list[str], said: str) -> None:
    done = run_here(*arguments)
    assert done.returncode == 1
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    "words", [["unimportable:make"], ["my_targets:sleeping", "--step", "unimportable:step"]]
)
def test_a_target_that_cannot_be_imported_is_all_that_is_told(folder: Path, words: list[str]) -> None:
    """Not once for each of the points, below a table of nothing."""
    (folder / "unimportable.py").write_text("import no_such_package\n")
    done = run_here("bench", *words, "--sweep", "num_workers=0,1,2", "--runs", "2", "--no-cold")
    assert (done.returncode, done.stdout) == (1, "")
    said = "cannot import unimportable: ModuleNotFoundError: No module named 'no_such_package'"
    assert said in done.stderr.splitlines()[0]
    assert done.stderr.count("no_such_package") == 1


def test_a_failed_trial_without_a_message_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (None, "", "\n"):
        show_trial(Trial(settings={"num_workers": 2}, rate=None, error=error))
        assert "num_workers=2" in capsys.readouterr().out


def test_the_real_command_fails_without_a_traceback() -> None:
    done = run_command("bench", "nowhere")
    assert done.returncode == 1
    assert "no such dataset" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_prints_what_was_measured(folder: Path) -> None:
    """In a terminal of its own, with the live view: the picture goes and the table stays."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "headrace", "bench", "my_targets:sleeping", "--seconds", "600", "--live"]
    # Alone in its process group, as the foreground job of a terminal is.
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    os.close(slave)
    try:
        shown = _read_until(master, r"[1-9][\d.,]* batches/s[^$]*wait")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
        os.close(master)
    assert "wait" in shown
    assert "█" in shown, "this terminal shows Unicode"
    assert "#" not in shown
    assert "interrupted" in output.lower()
    assert re.search(r"samples/s\s+[\d.,]+", output)


def _read_until(descriptor: int, pattern: str) -> str:
    shown, deadline = "", time.monotonic() + 100
    while not re.search(pattern, shown) and time.monotonic() < deadline:
        shown += os.read(descriptor, 2**16).decode(errors="replace")
    return shown


def test_tuning_says_what_to_set_what_it_gains_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(task: TargetRun) -> Measured:
        return Measured(_run_of(task.settings))

    monkeypatch.setattr(tune, "run_child", measured)
    done = run_here("tune", "my_targets:sleeping", "--budget", "20", "--keep", "batch_size")
    assert done.returncode == 0
    said = click.unstyle(done.stdout)
    assert "set num_workers=4" in said
    assert "4.00 times as fast" in said
    assert "because num_workers=4 is faster than 0" in said
    assert re.search(r"num_workers=2 +200\.0 samples/s", said)


def _run_of(settings: Mapping[str, Any]) -> Run:
    """Up to four workers load at once."""
    workers = min(4, max(1, settings.get("num_workers", 0)))
    run = Run(seconds=1.0, batches=25 * workers, samples=100 * workers)
    run.knobs = {"count": "num_workers", "batch": "batch_size", "now": {"num_workers": 0, "batch_size": 4}}
    return run


def test_a_tuning_that_is_interrupted_recommends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(task: TargetRun) -> Measured:
        return Measured(_run_of(task.settings), interrupted=bool(task.settings))

    monkeypatch.setattr(tune, "run_child", measured)
    for words in ([], ["--json"]):
        done = run_here("tune", "my_targets:sleeping", "--budget", "20", *words)
        assert done.returncode == 130
    done = run_here("tune", "my_targets:sleeping", "--budget", "20")
    said = click.unstyle(done.stdout)
    assert "Interrupted before anything was confirmed: nothing is recommended." in said
    assert "because" not in said


def test_a_tuning_that_found_nothing() -> None:
    trial = Trial(settings={}, rate=10.0)
    lines = [click.unstyle(line) for line in describe(Tuning(trial, [trial], why=["the loop hardly waits"]))]
    assert "keep the given settings" in lines
    assert "  because the loop hardly waits" in lines


def test_values_are_what_they_say() -> None:
    assert [parse_value(text) for text in ("4", "0.5", "10%", "true", "None", "block", "a%")] == [
        *(4, 0.5, 0.1, True, None),
        *("block", "a%"),
    ]
    for name in ("prefetch-factor", "--prefetch-factor", "prefetch_factor"):
        assert parse_settings([f"{name}=2"]) == {"prefetch_factor": 2}
    assert parse_sweeps(["a=1,2", "shuffle=none,global"]) == {"a": [1, 2], "shuffle": ["none", "global"]}
    with pytest.raises(SettingsError, match="write NAME=VALUE"):
        parse_settings(["=3"])
