"""What commands print of foreign names, keys and values cannot act on a terminal, and options mean what people type."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.cli.build import parse_separator
from headrace.cli.terminal import SafeFormatter, safe_text
from headrace.errors import SettingsError
from headrace.format.checksum import checksum
from tests.cli.commands import Done, run_here

EVIL = "\x1b]0;pwned\x07\x9b31m\u202e"
ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def check(done: Done, *words: str) -> None:
    said = done.stdout + done.stderr
    assert not ACTING.search(said), said
    for word in words:
        assert word in said


def test_every_control_code_is_shown() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    safe = safe_text(every)
    assert not ACTING.search(safe)
    assert "\t" in safe
    assert "\n" in safe
    assert safe_text("plain é 😀") == "plain é 😀"


def test_logged_names_are_safe() -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "left out %s", (EVIL,), None)
    assert not ACTING.search(SafeFormatter("headrace: %(message)s").format(record))


def test_builds(tmp_path: Path) -> None:
    bad = tmp_path / f"{EVIL}.jsonl"
    bad.write_text(json.dumps({EVIL: 1}) + "\n")
    out = tmp_path / "out"
    check(run_here("build", bad, "--out", out, "--tokenizer", "bytes"), "no key 'text'", "pwned")
    check(run_here("build", bad, "--out", out, "--text-field", EVIL), "pwned")
    bad.write_text(json.dumps({"text": "x"}) + "\n" + json.dumps({EVIL: 1}) + "\n")
    done = run_here("build", bad, "--out", out, "--tokenizer", "bytes", "--max-bad-records", "1")
    check(done, "left out:", "line 2", "pwned")
    table = tmp_path / "t.csv"
    table.write_text(f"a,{EVIL}\n1,2\n")
    check(run_here("build", table, "--out", tmp_path / "o", "--columns", "a"), "1 column left out", "pwned")
    with open(os.fsencode(tmp_path) + b"/\xff.jsonl", "w") as file:
        file.write("oops\n")
    check(
        run_here("build", os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl"), "--out", tmp_path / "p"),
        "headrace: ",
    )


def test_datasets(tmp_path: Path) -> None:
    name = "tok\x9b31mens"
    with headrace.Writer(tmp_path / "m", fields={name: "uint16[*]"}) as writer:
        writer.write({name: [1]})
    manifest = tmp_path / "m" / "headrace.json"
    body = json.loads(b"{" + manifest.read_bytes().split(b"\n", 1)[1])
    body["written_by"] = EVIL
    rest = json.dumps(body).encode()[1:]
    manifest.write_bytes(b'{"checksum": "' + checksum(rest).encode() + b'",\n' + rest)
    for command in (["inspect"], ["show"], ["verify"]):
        check(run_here(*command, tmp_path / "m", *(["0"] if command == ["show"] else [])))
    check(run_here("inspect", tmp_path / f"none{EVIL}"), "pwned")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(("", ""), ("<|end|>", "<|end|>"), (r"\n\n", "\n\n"), (r"\t\r", "\t\r"), (r"\\n", r"\n")),
        *((r"\x1e", "\x1e"), (r"\u2028", "\u2028"), (r"\U0001f600", "😀"), ("é→", "é→"), (r"\xe9", "é")),
    ],
)
def test_separators_as_people_type_them(typed: str, meant: str) -> None:
    assert parse_separator(typed) == meant


@pytest.mark.parametrize("typed", [r"\x", r"\x1", r"\u20", r"\ud800", r"\Uffffffff", "\\", r"\q"])
def test_separators_that_mean_nothing(typed: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="stands for no character"):
        parse_separator(typed)
    (tmp_path / "a.txt").write_text("x")
    done = run_here("build", tmp_path / "a.txt", "--out", tmp_path / "o", "--separator", typed)
    assert (done.returncode, done.stderr.startswith("headrace: --separator=")) == (1, True)


def test_json_lines_on_standard_input(tmp_path: Path) -> None:
    def build(*words: str) -> Done:
        command = [sys.executable, "-m", "headrace", "build", "-", "--out", str(tmp_path / "o"), *words]
        content = '{"body": "a"}\n{"body": "b"}\n'
        return subprocess.run(command, input=content, capture_output=True, text=True, check=False)

    refused = build("--tokenizer", "bytes")
    assert refused.returncode == 1
    assert "standard input: looks like JSON lines" in refused.stderr
    assert "the inputs are read as text" in build("--text-field", "body").stderr
    assert "the keys are: 'body'" in build("--format", "jsonl", "--tokenizer", "bytes").stderr
    done = build("--format", "jsonl", "--text-field", "body")
    assert done.returncode == 0, done.stderr
    assert len(headrace.open(tmp_path / "o")) == 2


def test_the_bound_of_a_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 3000)
    done = run_here("build", tmp_path / "a.txt", "--out", tmp_path / "o", "--max-record-bytes", "2KB")
    assert done.returncode == 1
    assert "a record of 3,000 bytes, and --max-record-bytes is 2,048" in done.stderr
    assert (
        run_here(
            "build", tmp_path / "a.txt", "--out", tmp_path / "o", "--max-record-bytes", "3000"
        ).returncode
        == 0
    )
