"""The comparison with peers runs with what is installed here, and its chart is drawn from the committed results."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
RESULTS = PEERS.parent / "results" / "peers.json"
FIGURES = {"note", "limit", "first_batch_seconds", "import_seconds", "peak_memory_mb", "checked"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("peers")
    out = folder / "results.json"
    command = [sys.executable, PEERS / "run.py", "--quick", "--out", out, "--scratch", folder]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in folder.iterdir()] == ["results.json"], "temporary files stay behind"
    results: dict[str, Any] = json.loads(out.read_text())
    return results


def test_measures_who_is_installed(quick: dict[str, Any]) -> None:
    assert quick["benchmark"] == "peers"
    assert {"machine", "versions", "rounds", "tokens", "packed", "images"} <= set(quick)
    assert {"Penstock Loader, 2 workers", "torch DataLoader, 0 workers", "nanoGPT get_batch"} <= set(
        quick["tokens"]["peers"]
    )
    for question in ("tokens", "packed", "images"):
        for figures in quick[question]["peers"].values():
            assert set(figures) >= FIGURES


def test_what_is_delivered_was_checked(quick: dict[str, Any]) -> None:
    rows = quick["tokens"]["peers"]["Penstock Loader, 2 workers"]["checked"]
    assert (rows["dtype"], rows["shape"]) == ("int64", [32, 2049])
    assert rows["every_one_once"]
    assert not rows["in_stored_order"]
    assert quick["packed"]["peers"]["Penstock Loader, 2 workers"]["checked"]["every_one_once"]


def test_nobody_is_dropped_silently(quick: dict[str, Any]) -> None:
    left_out = quick["tokens"]["left_out"]
    named = {label.removesuffix(" workers") for label in (*quick["tokens"]["peers"], *left_out)}
    for peer in ("MosaicML Streaming", "litdata", "grain", "HF datasets", "webdataset", "torchdata Stateful"):
        assert any(label.startswith(peer) for label in named), peer
    assert all(left_out.values())


def test_results_name_no_place(quick: dict[str, Any]) -> None:
    for text in (json.dumps(quick), RESULTS.read_text()):
        assert str(Path.home()) not in text
        assert "/tmp" not in text
        assert "://" not in text


def test_chart_is_drawn_from_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "peers.svg"
    command = [sys.executable, PEERS / "chart.py", "--out", out]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert ElementTree.parse(out).getroot().tag.endswith("svg")
    assert set(json.loads(RESULTS.read_text())) >= {"tokens", "packed", "images"}
