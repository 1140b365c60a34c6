"""Servers on a real Ray cluster: the batches of a local Loader, whatever happens to the servers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace

pytest.importorskip("ray")


def batches(folder: Path, epochs: int) -> list[list[int]]:
    loader = headrace.Loader(folder / "data", batch_size=4, seed=3, epochs=epochs)
    return [batch["x"].tolist() for batch in loader]


@pytest.mark.soak
def test_on_a_cluster_of_two_nodes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.serve.ray_scenarios", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr[-5000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    if "impossible" in found:
        pytest.skip(f"no network namespace can be made here: {found['impossible']}")

    killed = found["actor killed"]
    assert killed["ray"] == killed["file"] == batches(tmp_path, 6)
    assert killed["kept"] == 1, "the other server goes on, and the one that was killed has another address"
    assert killed["meets both"], "a client finds the new one too"
    assert "--name='lots': servers of this name run on this cluster already" in killed["refused"]
    assert killed["ended"] == {"code": 0, "left": False}
    assert killed["listed"] == []

    assert found["no such function"]["code"] == 1
    assert "on the node" in found["no such function"]["said"]
    assert "slow_loader has no 'make_nothing'; it has slow, make_loader" in found["no such function"]["said"]

    scaled = found["autoscale"]
    assert scaled["batches"] == batches(tmp_path, 100)[: len(scaled["batches"])]
    assert scaled["most"] == 2
    assert scaled["fewer"]
    assert scaled["ended"] == {"code": 0, "left": False}
