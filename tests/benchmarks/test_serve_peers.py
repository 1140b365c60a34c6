"""The comparison of servers that make batches runs with what is installed here, and says what it could not ask."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import scripts_with

pytestmark = pytest.mark.soak
PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
HEADRACE = {"Headrace, grpc", "Headrace, unix"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the results of a quick run are."""
    folder = tmp_path_factory.mktemp("serve-peers")
    out = folder / "results.json"
    ran = scripts_with().run(PEERS / "serve_run.py", "--quick", "--out", out, "--scratch", folder)
    assert ran.returncode == 0, ran.stderr
    return out


@pytest.fixture(scope="module")
def found(results: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(results.read_text())
    return read


@pytest.mark.parametrize("question", ["burning", "waiting"])
def test_every_row_came_once_and_in_order(found: dict[str, Any], question: str) -> None:
    peers = found[question]["peers"]
    assert set(peers) >= HEADRACE
    for name in HEADRACE:
        assert all(peers[name]["checked"].values())
        assert peers[name]["batches_per_second"]["median"] > 0


def test_a_killed_worker_costs_no_row(found: dict[str, Any]) -> None:
    for name in HEADRACE:
        figures = found["killing"]["peers"][name]
        assert figures["killed"]
        assert figures["ended"]
        assert figures["in_defined_order"]
        assert figures["rows_lost"]["median"] == figures["rows_twice"]["median"] == 0


def test_nobody_is_dropped_silently(found: dict[str, Any]) -> None:
    for question in ("burning", "waiting", "killing"):
        named = {*found[question]["peers"], *found[question]["left_out"]}
        assert named >= HEADRACE | {"Ray Data", "tf.data service"}
        assert all(found[question]["left_out"].values())


def test_results_name_no_place(results: Path) -> None:
    text = results.read_text()
    assert str(Path.home()) not in text
    assert "/tmp" not in text
