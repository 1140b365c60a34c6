"""Every benchmark runs: small, in a process of its own, and its results have the keys that the docs quote."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    "dataloader": {"versions", "throughput", "steps", "start", "overhead", "snapshots", "targets"},
    "measuring": {"counting", "loaders", "agreement", "targets"},
    "resume": {
        "state_microseconds",
        "state_bytes",
        "first_batch_seconds",
        "first_batch_at_99_to_0_percent",
        "targets",
    },
}
NO_QUESTIONS = {
    "machine",
    "corpus",
    "rivals",
    "stretches",
    "loading_rivals",
    "packing_rivals",
    "dataloader_rivals",
}


def run(name: str, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    out = folder / "results.json"
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--out", out, "--scratch", folder]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert [path.name for path in folder.iterdir()] == ["results.json"], "temporary files stay behind"
    results: dict[str, Any] = json.loads(out.read_text())
    return results


@pytest.mark.parametrize("name", KEYS)
def test_runs_and_reports(name: str, tmp_path: Path, child_environment: dict[str, str]) -> None:
    if name == "build":
        pytest.importorskip("gigatoken")
    results = run(name, tmp_path, child_environment)
    assert KEYS[name] <= set(results)
    assert results["benchmark"] == name
    assert results["quick"] is True
    assert {"cores", "cpu", "memory_gb", "python", "packages", "date"} <= set(results["machine"])
    assert str(Path.home()) not in json.dumps(results)


def test_quick_runs_keep_no_results(tmp_path: Path, child_environment: dict[str, str]) -> None:
    before = sorted((BENCHMARKS / "results").glob("*"))
    command = [sys.executable, BENCHMARKS / "ordering.py", "--quick", "--scratch", tmp_path]
    subprocess.run(command, check=True, capture_output=True, env=child_environment, timeout=100)
    assert sorted((BENCHMARKS / "results").glob("*")) == before


def test_every_benchmark_is_tried() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - NO_QUESTIONS == set(KEYS)
