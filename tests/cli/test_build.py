"""The build command as people meet it: on a terminal, in a pipe, and from another program."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from tests.cli.commands import Done, run_command, run_here

COMMAND = [sys.executable, "-m", "headrace", "build"]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(f"note {number} " * 50)
    return folder


def _run(*words: object) -> Done:
    return run_here("build", *words)


def test_the_outcome_in_words(notes: Path, tmp_path: Path) -> None:
    done = run_command("build", notes, "--out", tmp_path / "out")
    assert done.returncode == 0
    assert "30 documents" in done.stdout
    assert "next: headrace inspect" in done.stdout
    assert done.stderr == ""
    again = _run(notes, "--out", tmp_path / "out")
    assert "is up to date: 30 documents" in again.stdout


def test_the_outcome_as_one_json_document(notes: Path, tmp_path: Path) -> None:
    done = _run(notes, "--out", tmp_path / "out", "--json")
    outcome = json.loads(done.stdout)
    assert (outcome["records"], outcome["built"], outcome["bad_count"]) == (30, 1, 0)
    assert outcome["tokens"] == headrace.open(tmp_path / "out").num_tokens


def test_options_reach_the_build(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ttwo\tthree")
    done = _run(
        tmp_path / "a.txt", "--out", tmp_path / "out", "--separator", "\\t", "--no-eos", "--shard-size", "1MB"
    )
    assert done.returncode == 0, done.stderr
    dataset = headrace.open(tmp_path / "out")
    assert [bytes(record["tokens"].astype("uint8")) for record in dataset] == [b"one", b"two", b"three"]
    assert dataset.manifest is not None
    assert dataset.manifest.settings is not None
    assert dataset.manifest.settings["shard_bytes"] == 2**20
    (tmp_path / "t.csv").write_text("a,b,c\n1,2.5,x\n")
    assert _run(tmp_path / "t.csv", "--out", tmp_path / "table", "--columns", "a,b").returncode == 0
    assert list(headrace.open(tmp_path / "table").fields) == ["a", "b"]
    done = _run(tmp_path / "a.txt", "--out", tmp_path / "bos", "--bos", "auto")
    assert done.returncode == 0, done.stderr
    assert headrace.open(tmp_path / "bos")[0]["tokens"][0] == 257


def test_bad_records_are_listed_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\nbroken\n')
    stopped = _run(tmp_path / "a.jsonl", "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert stopped.returncode == 1
    assert "a.jsonl, line 2, byte 17" in stopped.stderr
    assert "--max-bad-records" in stopped.stderr
    done = _run(
        tmp_path / "a.jsonl", "--out", tmp_path / "out", "--tokenizer", "bytes", "--max-bad-records", 1
    )
    assert done.returncode == 0
    assert "left out:" in done.stderr
    assert "1 bad record left out" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing.txt", "--out", "o"], "no such file or directory"),
        (
            ["a.txt", "--out", "o", "--shard-size", "many"],
            "must be a number with an optional unit, such as 64MB",
        ),
        (["a.txt", "--out", "o", "--eos", "x", "--no-eos"], "give only one of them"),
        (["a.txt", "--out", "o", "--eos", "x"], "not a special token"),
        (["a.txt", "--out", "o", "--tokenizer", "x.json"], "no such file"),
        (["a.txt", "--out", "a.txt"], "--out='a.txt': is a file"),
        (["a.txt", "--out", "memory://o"], "would be gone when this command ends"),
        (["a.txt", "--out", "o", "--max-bad-records", "-1"], "--max-bad-records=-1: must be"),
        (["a.txt", "--out", "o", "--seed", "3"], "--seed 3: has no effect without --shuffle; add --shuffle"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    done = _run(*arguments)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_a_misspelt_command_gets_a_suggestion() -> None:
    done = run_here("biuld", "a.txt")
    assert done.returncode == 2
    assert "Did you mean 'build'?" in done.stderr


def test_a_terminal_shows_a_moving_line(notes: Path, tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    with open(reader, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [*COMMAND, notes, "--out", tmp_path / "out"],
            stdout=subprocess.PIPE,
            stderr=writer,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(writer)
        shown = b""
        try:
            while chunk := screen.read(4096):
                shown += chunk
        except OSError:
            pass  # the terminal closes with its last writer
        process.communicate()
    assert b"reading" in shown
    assert b"30 documents" in shown
    assert b"MB/s" in shown
