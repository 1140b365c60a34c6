"""The build command as people meet it: on a terminal, in a pipe, and from another program."""

import json
import os
import pty
import re
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


def test_inputs_that_are_gone_are_told(notes: Path, tmp_path: Path) -> None:
    arguments = [notes, "--out", tmp_path / "out", "--shard-size", "4096"]
    _run(*arguments)
    (notes / "07.txt").unlink()
    done = _run(*arguments)
    assert "1 input of the version before was not found this time, so its documents are gone:" in done.stdout
    assert "notes/07.txt" in done.stdout
    assert "is up to date: 29 documents" in _run(*arguments).stdout
    for number in range(20, 30):
        (notes / f"{number}.txt").unlink()
    again = _run(*arguments).stdout
    assert "10 inputs of the version before were not found this time, so their documents are gone:" in again
    assert "notes/24.txt and 5 more" in again


def test_inputs_that_are_gone_are_told_if_nothing_is_built(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n' * 1000)
    arguments = ["--out", tmp_path / "out", "--tokenizer", "bytes", "--shard-size", "4096"]
    _run(tmp_path / "a.jsonl", tmp_path / "b.jsonl", *arguments)
    done = _run(tmp_path / "a.jsonl", *arguments)
    assert "1,000 documents" in done.stdout
    assert "up to date" not in done.stdout
    assert "1 input of the version before was not found this time" in done.stdout
    assert "b.jsonl" in done.stdout


def test_the_advice_about_files_of_unknown_format_adds_them(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.txt", "one.py", "two.py"):
        (tmp_path / "in" / name).write_text(name)
    done = run_command("build", "in", "--out", "out", cwd=tmp_path)
    assert "left out 2 files of unknown format, such as in/one.py" in done.stderr
    assert "--include would read only the files that match" in done.stderr
    advice = re.search(r"for example as '(.*?)'", done.stderr)
    assert advice is not None
    done = run_command("build", "in", advice[1], "--out", "out", cwd=tmp_path)
    assert "4 documents" in done.stdout
    assert "gone" not in done.stdout


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


def test_remedies_are_typed_as_options(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "a.csv").write_text("a,b c\n1,2\n3,\n")
    stopped = _run(tmp_path / "a.csv", "--out", out)
    assert "so choose --columns 'a,b c=float64'." in stopped.stderr
    assert "allow more with --max-bad-records N;" in stopped.stderr
    assert _run(tmp_path / "a.csv", "--out", out, "--columns", "a,b c=float64").returncode == 0
    changed = _run(tmp_path / "a.csv", "--out", out, "--columns", "a")
    assert "column 'b c' is no longer kept. Use --rebuild to build" in changed.stderr
    chosen = _run(tmp_path / "a.csv", "--out", out, "--columns", "a", "--rebuild")
    assert "1 column left out, as --columns does not name it: b c" in chosen.stdout
    (tmp_path / "long").write_text("x" * 100)
    arguments = ["--out", tmp_path / "o2", "--max-record-bytes", "20", "--max-bad-records", "1"]
    left_out = _run(tmp_path / "long", tmp_path / "a.csv", "--format", "text", *arguments)
    assert (
        "--max-record-bytes is 20; if it is one record, allow it with --max-record-bytes=100"
        in left_out.stderr
    )
    assert "max_" not in stopped.stderr + changed.stderr + left_out.stderr


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
        (["a.txt", "--out", "o", "--separator", "\\x"], "--separator='\\x': '\\x' stands for no character"),
        (["a.txt", "--out", "o", "--tokenizer", "x.json"], "no such file"),
        (["a.txt", "--out", "a.txt"], "--out='a.txt': is a file"),
        (["a.txt", "--out", "memory://o"], "would be gone when this command ends"),
        (["a.txt", "--out", "o", "--max-bad-records", "-1"], "--max-bad-records=-1: must be"),
        (["a.csv", "--out", "o", "--eos", "x"], "--eos='x': is about tokens, but without --tokenizer"),
        (["a.csv", "--out", "o", "--no-eos"], "--no-eos: is about tokens"),
        (["a.txt", "--out", "o", "--columns", "a"], "--columns can only be given for a dataset of records"),
        (["a.txt", "--out", "o", "--text-field", "a"], "for example with --format='jsonl'"),
        (["a.csv", "--out", "o", "--bos", "auto"], "--bos auto: is about tokens"),
        (["a.csv", "--out", "o", "--allow-special"], "--allow-special: is about tokens"),
        (["a.txt", "--out", "o", "--seed", "3"], "--seed 3: has no effect without --shuffle; add --shuffle"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
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
