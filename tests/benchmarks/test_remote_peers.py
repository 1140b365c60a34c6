"""The comparison of reading from a bucket runs with what is installed here, and its results can be drawn."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import PLOTS, scripts_with, skip_without

pytestmark = pytest.mark.soak
PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the results of a quick run are."""
    skip_without("torch", "obstore")
    folder = tmp_path_factory.mktemp("remote-peers")
    out = folder / "results.json"
    words = ["--quick", "--only", "remote_tokens", "--out", out, "--scratch", folder]
    ran = scripts_with().run(PEERS / "remote_run.py", *words)
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in folder.iterdir()] == ["results.json"], "temporary files stay behind"
    return out


@pytest.fixture(scope="module")
def tokens(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(results.read_text())["remote_tokens"]
    return found


def test_an_epoch_of_the_bucket_was_checked(tokens: dict[str, Any]) -> None:
    checked = tokens["peers"]["Headrace Loader"]["checked"]
    assert (checked["dtype"], checked["shape"]) == ("int64", [32, 2049])
    assert checked["twice"] == 0
    assert checked["share_of_epoch"] > 0.9


def test_it_says_how_long_starting_and_going_on_take(tokens: dict[str, Any]) -> None:
    figures = tokens["peers"]["Headrace Loader"]
    assert figures["tokens_per_second"]["median"] > 0
    assert figures["first_batch_seconds"]["median"] > figures["import_seconds"]["median"]
    assert figures["resume_seconds"]["median"] > 0


def test_nobody_is_dropped_silently(tokens: dict[str, Any]) -> None:
    named = {*tokens["peers"], *tokens["left_out"]}
    assert named >= {"MosaicML Streaming", "litdata", "s3torchconnector"}
    assert all(tokens["left_out"].values())


def test_results_name_no_place(results: Path) -> None:
    text = results.read_text()
    assert str(Path.home()) not in text
    assert "/tmp" not in text
    assert "://" not in text


def test_chart_has_a_panel_for_it(results: Path, tmp_path: Path) -> None:
    skip_without("matplotlib")
    out = tmp_path / "peers.svg"
    drawn = scripts_with(*PLOTS).run(PEERS / "chart.py", "--remote", results, "--out", out)
    assert drawn.returncode == 0, drawn.stderr
    local_panels = 3
    assert f'id="axes_{local_panels + 1}"' in out.read_text()
