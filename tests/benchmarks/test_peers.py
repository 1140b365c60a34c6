"""The comparison with peers runs with what is installed here, and its chart is drawn from the committed results."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.scripts import PLOTS, scripts_with, skip_without

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
RESULTS = PEERS.parent / "results" / "peers.json"
FIGURES = {"note", "limit", "first_batch_seconds", "import_seconds", "peak_memory_mb", "checked"}


QUESTIONS = ["tokens", *(pytest.param(each, marks=pytest.mark.soak) for each in ("packed", "images"))]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The results of a quick run of one question."""
    skip_without("torch")

    @functools.cache
    def run(question: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("peers")
        out = folder / "results.json"
        words = ["--quick", "--only", question, "--out", out, "--scratch", folder]
        ran = scripts_with().run(PEERS / "run.py", *words)
        assert ran.returncode == 0, ran.stderr
        assert [path.name for path in folder.iterdir()] == ["results.json"], "temporary files stay behind"
        results: dict[str, Any] = json.loads(out.read_text())
        return results

    return run


Quick = Callable[[str], dict[str, Any]]


@pytest.mark.parametrize("question", QUESTIONS)
def test_measures_who_is_installed(quick: Quick, question: str) -> None:
    found = quick(question)
    assert found["benchmark"] == "peers"
    assert {"machine", "versions", "rounds", question} <= set(found)
    assert found[question]["peers"]
    for figures in found[question]["peers"].values():
        assert set(figures) >= FIGURES


def test_the_usual_ways_to_load_tokens_are_there(quick: Quick) -> None:
    wanted = {"Headrace Loader, 2 workers", "torch DataLoader, 0 workers"}
    assert wanted <= set(quick("tokens")["tokens"]["peers"])


def test_what_is_delivered_was_checked(quick: Quick) -> None:
    rows = quick("tokens")["tokens"]["peers"]["Headrace Loader, 2 workers"]["checked"]
    assert (rows["dtype"], rows["shape"]) == ("int64", [32, 2049])
    assert rows["every_one_once"]
    assert not rows["in_stored_order"]


@pytest.mark.soak
def test_what_is_packed_was_checked(quick: Quick) -> None:
    assert quick("packed")["packed"]["peers"]["Headrace Loader, 2 workers"]["checked"]["every_one_once"]


def test_nobody_is_dropped_silently(quick: Quick) -> None:
    tokens = quick("tokens")["tokens"]
    left_out = tokens["left_out"]
    named = {label.removesuffix(" workers") for label in (*tokens["peers"], *left_out)}
    for peer in ("MosaicML Streaming", "litdata", "grain", "HF datasets", "webdataset", "torchdata Stateful"):
        assert any(label.startswith(peer) for label in named), peer
    assert all(left_out.values())


@pytest.mark.parametrize("question", QUESTIONS)
def test_results_name_no_place(quick: Quick, question: str) -> None:
    check_no_place(json.dumps(quick(question)))


def test_committed_results_name_no_place() -> None:
    check_no_place(RESULTS.read_text())


def check_no_place(text: str) -> None:
    assert str(Path.home()) not in text
    assert "/tmp" not in text
    assert "://" not in text


def test_chart_is_drawn_from_the_committed_results(tmp_path: Path) -> None:
    skip_without("matplotlib")
    out = tmp_path / "peers.svg"
    drawn = scripts_with(*PLOTS).run(PEERS / "chart.py", "--out", out)
    assert drawn.returncode == 0, drawn.stderr
    assert ElementTree.parse(out).getroot().tag.endswith("svg")
    assert set(json.loads(RESULTS.read_text())) >= {"tokens", "packed", "images"}
