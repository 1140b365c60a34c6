"""`headrace doctor` as a user meets it: findings and remedies, an exit code, one JSON document, clear errors."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.measure.doctor import doctor
from headrace.measure.running.children import Measured, TargetRun, run_child
from headrace.observe import advice
from tests.cli.commands import run_command, run_here

MODULE = """
import time
import numpy as np
import headrace

def make_loader(workers=2, batch_size=8, megabytes=0):
    held = {"x": np.zeros((64, max(1, megabytes) * 10**6 // 64), dtype=np.uint8)}
    return headrace.Loader(headrace.from_arrays(held), batch_size=batch_size, workers=workers, epochs=None)

def stock():
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    return DataLoader(TensorDataset(torch.arange(64)), batch_size=30)

def step(batch):
    def copy():
        return batch["x"].to("cuda")

def fails():
    raise RuntimeError("the disk is gone")

def empty():
    return []

def stuck(hangs=False):
    from torch.utils.data import DataLoader, Dataset
    class Stuck(Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, number):
            if hangs:
                time.sleep(600)
            raise OSError("the disk is gone")
    return DataLoader(Stuck(), batch_size=30)

def hangs():
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def folder(write_dataset: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor")
    (path / "train.py").write_text(MODULE)
    rng = np.random.default_rng(0)
    shards = [[{"tokens": rng.integers(0, 999, n)} for n in range(1, 60)] for _ in range(3)]
    write_dataset(path / "data", {"tokens": "uint16[*]"}, shards)
    return path


@pytest.fixture(autouse=True)
def in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is silenced there, and this is the only process of its job."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(advice, "_said", advice._Said())
    for name in (advice.VARIABLE, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_dataset_with_padding() -> None:
    words = ["data", "--seq-len", 60, "--set", "packing=pad", "--compute-ms", 20, "--seconds", 0.1]
    done = run_command("doctor", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "warning   padding" in done.stdout
    assert "packing='best-fit'" in done.stdout
    assert "batches in" in done.stdout
    (fine,) = [line for line in done.stdout.splitlines() if line.startswith("fine")]
    assert "batch-size" in fine
    assert "too small to measure" in done.stdout


def test_a_dataset_that_is_well_as_json() -> None:
    done = run_here("doctor", "data", "--seq-len", 60, "--seconds", 0.1, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["target"] == "data"
    assert found["findings"] == []
    assert {"batch-size", "padding", "in-ram"} <= set(found["fine"])
    assert "--compute-ms" in found["not_looked"]["cpu-use"]
    assert found["run"]["batches"] > 0


def test_ctrl_c_during_the_run_shows_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(task: TargetRun) -> Measured:
        return dataclasses.replace(run_child(task), interrupted=True)

    monkeypatch.setattr(doctor, "run_child", interrupted)
    words = ("doctor", "train:make_loader", "--set", "workers=99", "--seconds", 0.1)
    done = run_here(*words)
    assert done.returncode == 130
    assert "the run was interrupted" in done.stdout
    assert "workers" in done.stdout
    found = json.loads(run_here(*words, "--json").stdout)
    assert found["interrupted"]


def test_a_function_and_a_step() -> None:
    words = ["train:make_loader", "--step", "train:step", "--set", "workers=99", "--seconds", 0.1]
    done = run_here("doctor", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "blocking-copies" in done.stdout
    assert "train.py:" in done.stdout
    assert "99 workers for" in done.stdout


def test_a_dataloader_is_looked_at_without_being_run() -> None:
    pytest.importorskip("torch", reason="needs PyTorch's DataLoader")
    found = json.loads(run_here("doctor", "train:stock", "--no-run", "--json").stdout)
    assert {each["name"] for each in found["findings"]} == {"batch-size", "sample-by-sample"}
    assert {each["level"] for each in found["findings"]} == {"note"}
    assert found["run"] is None
    assert found["not_looked"]["random-reads"] == "the loop was not run"


def test_an_alarm_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    monkeypatch.setenv("HEADRACE_SILENCE", "workers")
    alarmed = run_here("doctor", "train:make_loader", "--set", "megabytes=200", "--no-run")
    assert alarmed.returncode == 1
    assert alarmed.stdout.startswith("alarm     in-ram")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["train:fails"], "train:fails failed: RuntimeError: the disk is gone"),
        (["train:hangs", "--timeout", 0.2, "--seconds", 0.1], "no first batch within 0.2 seconds"),
        (["train:no_such"], "has no 'no_such'"),
        (["nowhere"], "nowhere: no such dataset"),
        (["data", "--set", "packing"], "write NAME=VALUE"),
        (["data", "--step", "train:no_such", "--seq-len", 60], "has no 'no_such'"),
    ],
)
def test_targets_that_fail(words: list[Any], complaint: str) -> None:
    done = run_here("doctor", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("headrace: ")
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_known_is_told_even_if_the_run_fails() -> None:
    pytest.importorskip("torch")
    done = run_here("doctor", "train:stuck")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("note      batch-size")
    assert "unchecked waiting" in done.stdout
    assert "random-reads: the run failed" in done.stdout.replace("\n         ", "")
    assert "failed    the run: the loader failed: OSError: the disk is gone" in done.stdout
    found = json.loads(run_here("doctor", "train:empty", "--json").stdout)
    assert found["error"].startswith("the loader gave no batch")
    assert (found["run"], found["fine"]) == (None, ["in-ram"])


@pytest.mark.soak
def test_what_is_known_is_told_even_if_the_run_hangs() -> None:
    pytest.importorskip("torch")
    done = run_here("doctor", "train:stuck", "--set", "hangs=true", "--timeout", 20, "--seconds", 0.1)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("note      batch-size")
    failed = done.stdout.index("failed    the run: no first batch within 20 seconds")
    assert done.stdout.index("in __getitem__") > failed, "where the process was comes last"


def test_an_unknown_name_to_silence_is_told_even_if_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SILENCE", "batchsize")
    done = run_command("doctor", "train:make_loader", "--no-run")
    assert "HEADRACE_SILENCE names batchsize: there is no such finding; choose from" in done.stderr
