"""Builds on a Ray cluster: the bytes of a local build, whatever happens to nodes; errors that say what a node lacks."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import BuildError, MissingExtraError, SettingsError
from tests.ingest.ray_scenarios import TEXTS
from tests.samples import documents, tree

pytest.importorskip("ray")

TABLES = 400
"""So many, and with such names, that the outcome of a task is too long for Ray."""


def prepare(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number, text in enumerate(documents(40)):
        (folder / "texts" / f"{number:04d}.txt").write_text(text * 10)
    (folder / "tables").mkdir()
    for number in range(TABLES):
        path = folder / "tables" / f"{'a-table-with-a-rather-long-name-' * 6}{number:06d}.csv"
        path.write_text(f"x,name\n{number},n{number}\n")
    _train(folder / "tokenizer.json")
    broken = folder / "broken"
    for name in ("tokenizers", "gigatoken", "tiktoken"):
        (broken / name).mkdir(parents=True)
        (broken / name / "__init__.py").write_text(f"raise ImportError('No module named {name}')\n")


def _train(path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator(documents(40), trainer)
    tokenizer.save(str(path))


def run_scenarios(folder: Path, which: str) -> dict[str, Any]:
    prepare(folder)
    command = [sys.executable, "-m", "tests.ingest.ray_scenarios", str(folder), which]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr[-5000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    if "impossible" in found:
        pytest.skip(f"no network namespace can be made here: {found['impossible']}")
    return found


@pytest.mark.soak
def test_a_ray_of_its_own_and_a_bucket(tmp_path: Path) -> None:
    found = run_scenarios(tmp_path, "alone")
    local = headrace.build(tmp_path / "texts", tmp_path / "local", shuffle=True, **TEXTS)
    assert found == {"built": local.built, "ended": True, "parts": [0, 0, 0]}
    assert tree(tmp_path / "from-bucket") == tree(tmp_path / "local")
    headrace.build(tmp_path / "texts", tmp_path / "parts-local", **TEXTS)
    assert tree(tmp_path / "parts-ray") == tree(tmp_path / "parts-local")


def test_on_a_cluster_of_several_nodes(tmp_path: Path) -> None:
    found = run_scenarios(tmp_path, "cluster")

    local = headrace.build(tmp_path / "texts", tmp_path / "texts-local", **TEXTS)
    assert found["node killed"] == {"built": local.built, "killed": True, "again": 0}
    assert tree(tmp_path / "texts-ray") == tree(tmp_path / "texts-local")

    options: dict[str, Any] = {"shuffle": True, "seed": 3, "columns": ["x", "name"]}
    headrace.build(tmp_path / "tables", tmp_path / "tables-local", **options)
    assert found["shuffled records"] == {"records": TABLES, "most_done": pytest.approx(1, abs=0.1), "bad": 0}
    assert tree(tmp_path / "tables-ray") == tree(tmp_path / "tables-local")

    assert found["interrupted"] == {"interrupted": True, "jobs_ended": True, "shards": 0}
    assert found["other place"]["kind"] == "StorageError"
    assert "is not the same place here" in found["other place"]["message"]
    lacking = found["no tokenizer library"]
    assert lacking["kind"] == "BuildError"
    assert "on the node" in lacking["message"]
    assert "tokenizer cannot be loaded" in lacking["message"]


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"engine='ray' needs Ray: pip install 'headrace\[ray\]'"):
        headrace.build(tmp_path / "a.txt", tmp_path / "data", engine="ray")


def test_an_address_at_which_nobody_listens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(
            BuildError, match=f"address='{address}': nothing answers there .*check the address"
        ):
            headrace.build(tmp_path / "a.txt", tmp_path / "data", engine="ray", address=address)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "spark"}, "engine='spark': must be one of 'local', 'ray'"),
        ({"address": "auto"}, "address='auto': is that of a cluster; add engine='ray'"),
        (
            {"engine": "ray", "out": "memory://x"},
            "is in the memory of this process; build with engine='local'",
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(SettingsError, match=said):
        headrace.build(tmp_path / "a.txt", options.pop("out", tmp_path / "data"), **options)
