"""`penstock bench` and `penstock tune` as users meet them."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import cli
from penstock.cli.measure_options import parse_settings, parse_sweeps, parse_value
from penstock.cli.tune import describe
from penstock.errors import SettingsError
from penstock.measure.search import Trial, Tuning

TARGETS = """
import time
import numpy as np

def sleeping(num_workers=0, batch_size=4):
    while True:
        time.sleep(batch_size * 2e-3 / max(1, min(num_workers, 4)))
        yield {"tokens": np.zeros((batch_size, 16), np.int64)}

def raises():
    raise ValueError("no such bucket")

def step(batch):
    time.sleep(0.001)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    (path / "my_targets.py").write_text(TARGETS)
    return path


@pytest.fixture(scope="module")
def data(write_dataset: Callable[..., Any], folder: Path) -> Path:
    rng = np.random.default_rng(0)
    write_dataset(folder / "data", {"tokens": "uint16[*]"}, [[{"tokens": rng.integers(0, 99, 200)}] * 200])
    return folder / "data"


def _run(folder: Path, *arguments: str, code: int = 0) -> Result:
    before = os.getcwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(cli, [*arguments], catch_exceptions=False)
    finally:
        os.chdir(before)
    assert result.exit_code == code, result.output
    return result


def test_a_dataset_and_its_reports(folder: Path, data: Path) -> None:
    options = [
        "--seq-len",
        "128",
        "--batch-size",
        "4",
        "--seconds",
        "0.2",
        "--runs",
        "2",
        "--compute-ms",
        "1",
    ]
    result = _run(
        folder, "bench", "data", *options, "--html", "r.html", "--out", "r.json", "--trace", "t.json"
    )
    said = click.unstyle(result.output)
    for word in ("cold", "warm", "tokens/s", "p99", "MLPerf", "PSS", "written: r.html"):
        assert word in said
    assert "<html" in (folder / "r.html").read_text()
    report = json.loads((folder / "r.json").read_text())
    assert report["points"][0]["summary"]["tokens_per_second"]["median"] > 0
    stages = {event["name"] for event in json.loads((folder / "t.json").read_text())["traceEvents"]}
    assert {"gather", "wait", "step"} <= stages


def test_a_function_swept_as_json(folder: Path) -> None:
    sweeps = ["--sweep", "num_workers=0,4", "--set", "batch_size=2", "--step", "my_targets:step"]
    result = _run(
        folder, "bench", "my_targets:sleeping", *sweeps, "--seconds", "0.2", "--runs", "1", "--json"
    )
    report = json.loads(result.output)
    assert [point["settings"] for point in report["points"]] == [{"num_workers": 0}, {"num_workers": 4}]
    assert report["settings"] == {"batch_size": 2}
    slow, fast = (point["summary"]["samples_per_second"]["median"] for point in report["points"])
    assert fast > slow


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "my_targets:raises", "--runs", "1"], "no such bucket"),
        (["bench", "nowhere"], "no such dataset"),
        (["bench", "my_targets:sleeping", "--sweep", "num_workers"], "write NAME=VALUE"),
        (["bench", "my_targets:sleeping", "--files", "nothing-here"], "no such file"),
        (
            ["bench", "my_targets:sleeping", "--compute-ms", "1", "--step", "my_targets:step"],
            "give one of them",
        ),
        (["tune", "my_targets:raises"], "no such bucket"),
        (["tune", "my_targets:sleeping", "--keep", "colour", "--budget", "1"], "no such setting"),
    ],
)
def test_bad_input_is_told_in_a_line(folder: Path, arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "penstock", *arguments]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert said in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


def test_ctrl_c_prints_what_was_measured(folder: Path) -> None:
    """In a terminal of its own, with the live view: the picture goes and the table stays."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "penstock", "bench", "my_targets:sleeping", "--seconds", "600", "--live"]
    # Alone in its process group, as the foreground job of a terminal is.
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=slave, text=True, start_new_session=True
    )
    os.close(slave)
    try:
        shown = _read_until(master, r"[1-9][\d.,]* batches/s")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        os.close(master)
    assert "wait" in shown
    assert "interrupted" in output.lower()
    assert re.search(r"samples/s\s+[\d.,]+", output)


def _read_until(descriptor: int, pattern: str) -> str:
    shown, deadline = "", time.monotonic() + 60
    while not re.search(pattern, shown) and time.monotonic() < deadline:
        shown += os.read(descriptor, 2**16).decode(errors="replace")
    return shown


def test_tuning_says_what_to_set_what_it_gains_and_why(folder: Path) -> None:
    options = ["--compute-ms", "1", "--budget", "20", "--keep", "batch_size"]
    said = click.unstyle(_run(folder, "tune", "my_targets:sleeping", *options).output)
    assert re.search(r"set num_workers=[248]", said)
    assert re.search(r"gain \d\.\d\d times", said)
    assert "because num_workers: " in said
    assert "num_workers=1" in said


def test_a_tuning_that_found_nothing() -> None:
    trial = Trial(settings={}, rate=10.0)
    lines = [click.unstyle(line) for line in describe(Tuning(trial, [trial], why=["the loop hardly waits"]))]
    assert "keep what was given" in lines
    assert "  because the loop hardly waits" in lines


def test_values_are_what_they_say() -> None:
    assert [parse_value(text) for text in ("4", "0.5", "10%", "true", "None", "block", "a%")] == [
        *(4, 0.5, 0.1, True, None),
        *("block", "a%"),
    ]
    assert parse_settings(["prefetch-factor=2"]) == {"prefetch_factor": 2}
    assert parse_sweeps(["a=1,2", "shuffle=none,global"]) == {"a": [1, 2], "shuffle": ["none", "global"]}
    with pytest.raises(SettingsError, match="write NAME=VALUE"):
        parse_settings(["=3"])
