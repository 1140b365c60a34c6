"""`headrace build --part` and `--finish`."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import run_here
from tests.samples import documents


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(documents(12)):
        (folder / f"{number}.txt").write_text(text * 50)
    return folder


def test_parts_say_what_they_did_and_what_comes_next(texts: Path, tmp_path: Path) -> None:
    words = ("build", texts, "--out", tmp_path / "data", "--shard-size", 4096, "--workers", 1)
    first = run_here(*words, "--part", "0/2")
    assert first.returncode == 0, first.stderr
    assert "part 0 of 2 is done" in first.stdout
    assert "next: the same command with --finish instead of --part" in first.stdout
    early = run_here(*words, "--finish")
    assert early.returncode == 1
    assert "run part 1 of 2, and then finish" in early.stderr
    assert json.loads(run_here(*words, "--part", "1/2", "--json").stdout)["part"] == "1/2"
    done = run_here(*words, "--finish")
    assert done.returncode == 0, done.stderr
    assert "12 documents" in done.stdout
    assert "next: headrace inspect" in done.stdout


def test_errors_are_in_the_words_of_the_command(texts: Path, tmp_path: Path) -> None:
    words = ("build", texts, "--out", tmp_path / "data")
    assert "--part='2/2': parts are counted from 0" in run_here(*words, "--part", "2/2").stderr
    assert "add --engine='ray'" in run_here(*words, "--address", "auto").stderr
    run_here(*words, "--part", "0/1")
    said = run_here(*words).stderr
    assert "complete it with --finish when all parts are done, or use --rebuild to discard them" in said
