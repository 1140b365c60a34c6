"""Every benchmark runs: small, in a process of its own, and its results have the keys that the docs quote."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import scripts_with, skip_without

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEYS = {
    "open": {
        "dataset",
        "open_seconds",
        "limit_seconds",
        "open_to_limit",
        "memory_mb",
        "pickled_bytes",
        "targets",
    },
    "build": {"corpora", "candidates", "ratios", "peak_memory_mb", "nothing_left_to_do_seconds", "targets"},
    "ordering": {"sizes"},
    "limit": {"tokens_per_second", "to_memcpy"},
    "loading": {"versions", "left_out", "rows", "packed", "short"},
    "packing": {"dataset", "plan", "first_batch", "rivals", "left_out", "versions"},
    "overlap": {"step_seconds", "to_longer_of_both", "targets"},
    "dataloader": {"versions", "targets"},
    "defaults": {"asking", "stepping", "tensors", "fields", "functions", "late", "targets"},
    "measuring": {"counting", "loaders", "agreement", "targets"},
    "resume": {
        "state_microseconds",
        "state_bytes",
        "first_batch_seconds",
        "first_batch_at_99_to_0_percent",
        "targets",
    },
    "remote": {"dataset", "network", "epochs", "steps", "starting", "targets"},
    "serve": {"wire", "feeding", "client", "first", "targets"},
    "scale": {"opening", "planning", "packing", "lanes", "finishing", "extrapolated"},
}
NO_QUESTIONS = {
    "serve_targets",
    "shuffle_quality",
    "machine",
    "corpus",
    "rivals",
    "stretches",
    "loading_rivals",
    "packing_rivals",
    "dataloader_rivals",
    "remote_child",
    "remote_data",
    "remote_reads",
    "remote_server",
    "remote_start",
}


NEEDS = {
    "build": ("tokenizers", "gigatoken"),
    "dataloader": ("torch",),
    "measuring": ("torch",),
    "remote": ("obstore",),
}
USE_TORCH = ("dataloader", "measuring", "loading", "defaults")
"""The last two compare with it where it is installed."""
ROUNDS = ("loading", "measuring", "ordering")
"""Two or three of them in a quick run: one is enough here, as those of others show how rounds are summed up."""
QUESTIONS = ("throughput", "steps", "overhead", "snapshots")


def run(name: str, folder: Path, *more: str) -> dict[str, Any]:
    skip_without(*NEEDS.get(name, ()))
    out = folder / "results.json"
    if name in ROUNDS:
        more = ("--rounds", "1", *more)
    modules = ["torch"] if name in USE_TORCH and importlib.util.find_spec("torch") else []
    script = BENCHMARKS / f"{name}.py"
    ran = scripts_with(*modules).run(script, "--quick", "--out", out, "--scratch", folder, *more)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert [path.name for path in folder.iterdir()] == ["results.json"], "temporary files stay behind"
    results: dict[str, Any] = json.loads(out.read_text())
    assert KEYS[name] <= set(results)
    assert results["benchmark"] == name
    assert results["quick"] is True
    assert {"cores", "cpu", "memory_gb", "python", "packages", "date"} <= set(results["machine"])
    assert str(Path.home()) not in json.dumps(results)
    return results


LONG = ("build", "defaults", "serve")
"""Each takes ten seconds and more, even with little data: interpreters with tokenizers, many loaders, and servers."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.soak) if name in LONG else name
        for name in KEYS
        if name != "dataloader"
    ],
)
def test_runs_and_reports(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_dataloader_is_asked_one_thing_at_a_time(question: str, tmp_path: Path) -> None:
    assert question in run("dataloader", tmp_path, "--only", question)


@pytest.mark.soak
def test_the_start_of_the_dataloader(tmp_path: Path) -> None:
    """Interpreters that import PyTorch, one for each loader and one for each worker."""
    assert "start" in run("dataloader", tmp_path, "--only", "start")


@pytest.mark.soak
def test_loading_beside_all_rivals(tmp_path: Path) -> None:
    skip_without("transformers")
    assert "transformers' collator, 0 workers" not in run("loading", tmp_path, "--rivals")["left_out"]


def test_quick_runs_keep_no_results(tmp_path: Path) -> None:
    before = sorted((BENCHMARKS / "results").glob("*"))
    ran = scripts_with().run(BENCHMARKS / "limit.py", "--quick", "--scratch", tmp_path)
    assert "a quick run keeps no results without --out" in ran.stdout
    assert sorted((BENCHMARKS / "results").glob("*")) == before


def test_every_benchmark_is_tried() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - NO_QUESTIONS == set(KEYS)


def test_the_quality_of_shuffles_is_drawn(tmp_path: Path) -> None:
    picture, figures = tmp_path / "quality.svg", tmp_path / "quality.json"
    command = [sys.executable, "benchmarks/shuffle_quality.py", "--rows", str(8 * 16384)]
    root = Path(__file__).parents[2]
    subprocess.run([*command, "--out", str(picture), "--json", str(figures)], check=True, cwd=root)
    found = json.loads(figures.read_text())
    assert found["global shuffle"] < 1.1 < found["units, 32 lanes"] < found["no shuffle"]
    assert "units, 128 lanes" in picture.read_text()
