"""Inputs as they lie around: pipes, devices, names that are not UTF-8, files whose names say nothing."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.errors import BadRecordsError, SettingsError, StorageError
from headrace.readers.file_names import to_name, to_path

READ = """
import sys, headrace
call = {
    "build": lambda path: headrace.build(path, sys.argv[3], workers=1),
    "stream": lambda path: list(headrace.stream(path)),
    "open": headrace.open,
    "open tokens": lambda path: headrace.open(path, dtype="uint16"),
    "tokenize": lambda path: headrace.stream(headrace.__file__, format="text").tokenize(path),
}[sys.argv[1]]
try:
    call(sys.argv[2])
except headrace.errors.HeadraceError as error:
    print(type(error).__name__, error)
"""


def run(how: str, path: Path, out: Path) -> str:
    """What the call says. In a process of its own, because waiting for a pipe has no end."""
    arguments = [sys.executable, "-c", READ, how, str(path), str(out)]
    return subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("x")
    os.mkfifo(tmp_path / "in" / "f.txt")
    return tmp_path / "in" / "f.txt"


@pytest.mark.parametrize("how", ["build", "stream"])
def test_a_pipe_is_refused(pipe: Path, tmp_path: Path, how: str) -> None:
    for path in (pipe, pipe.parent):
        said = run(how, path, tmp_path / "out")
        assert said.startswith("StorageError")
        assert "f.txt: is a pipe, and only regular files can be read" in said


@pytest.mark.parametrize("how", ["build", "stream"])
def test_a_pipe_of_any_name_in_a_directory_is_refused(tmp_path: Path, how: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("x")
    os.mkfifo(tmp_path / "in" / "pipe")
    assert "pipe: is a pipe, and only regular files" in run(how, tmp_path / "in", tmp_path / "out")


def test_a_pipe_instead_of_a_manifest_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "headrace.json")
    assert "is a pipe or a device, not a file" in run("open", tmp_path, tmp_path)


def test_a_pipe_instead_of_a_tokenizers_config_is_refused(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
    os.mkfifo(tmp_path / "tokenizer_config.json")
    assert "is a pipe or a device, not a file" in run("tokenize", tmp_path, tmp_path)


def test_a_pipe_instead_of_an_index_is_passed_by(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100))
    os.mkfifo(tmp_path / "a.bin.headrace-index")
    assert run("open tokens", tmp_path / "a.bin", tmp_path) == ""


def test_devices_and_sockets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="/dev/zero: is a device or socket"):
        headrace.stream("/dev/zero")
    with pytest.raises(StorageError, match="/dev/null: is a device or socket"):
        headrace.build("/dev/null", tmp_path / "out")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.txt"))
        with pytest.raises(StorageError, match=r"s\.txt: is a device or socket"):
            headrace.stream(tmp_path)


@pytest.mark.parametrize(
    "path", ["a.txt", "b'x", 'b"', "b'\\xff'", "ü/\udcff\\x\n.txt", "\udc80", "'\"\udcff", "b'\udcff\udcfe'"]
)
def test_every_path_has_a_name_of_its_own(path: str) -> None:
    name = to_name(path)
    name.encode()
    assert str(to_path(name)) == path
    assert to_name("a.txt") == "a.txt"


@pytest.mark.parametrize("workers", [1, 2])
def test_names_that_are_not_utf8(tmp_path: Path, workers: int) -> None:
    folder = os.fsencode(tmp_path / "in") + b"\xfe"
    os.mkdir(folder)
    for number in range(6):
        with open(os.path.join(folder, b"%d\xff.jsonl" % number), "w") as file:
            file.write(f'{{"text": "{number}"}}\n')
    given = os.fsdecode(folder)
    options = {"tokenizer": "bytes", "eos": False, "shard_bytes": 4096, "workers": workers}
    report = headrace.build(given, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert report.records == 6
    assert headrace.build(given, tmp_path / "out", **options).built == 0  # type: ignore[arg-type]
    stream = headrace.stream(given, block_bytes=7)
    assert [record["text"] for record in stream] == [str(number) for number in range(6)]
    assert stream.state_dict()
    with open(os.path.join(folder, b"3\xff.jsonl"), "w") as file:
        file.write('{"\\ud800": "no text"}\n')
    with pytest.raises(BadRecordsError, match="no key 'text'"):
        headrace.build(given, tmp_path / "out", **options)  # type: ignore[arg-type]
    with pytest.raises(BadRecordsError, match="no field 'text'"):
        list(headrace.stream(given).tokenize("bytes"))
    left_out = headrace.build(given, tmp_path / "out", max_bad_records=1, **options)  # type: ignore[arg-type]
    (bad,) = left_out.bad
    assert bad.path.endswith(r"3\xff.jsonl'")


JSON_LINES = [b'{"t": "a"}\n{"t": "b"}\n', b'\xef\xbb\xbf\n {"t": 1}', b'{"t": "' + b"x" * 100_000 + b'"}\n']
CSV_ROWS = [
    b"id,name\n1,a\n2,b\n",
    b'id,note\n1,"two\nlines"\n2,"x, y"\n',
    b"id,name\n" + b"1,abc\n" * 20_000,
]
OTHER_JSON = [
    b'[{"t": 1}, {"t": 2}]',
    b'[\n {"t": 1}\n]\n',
    b'[{"t": "' + b"x" * 100_000,
    b'{\n  "a": 1\n}\n',
    b'{\n "a": 1\n}\n{\n "a": 2\n}\n',
    b'{\n "a": "' + b"x" * 100_000,
]
OTHER_TEXT = [
    b"Dear Ann,Bob,\nwe,you,\nall,of us,\n",
    b"red, green\nblue, white\nyes, no\n",
    b"a,b\n1,2\n",
    b"id,name\nand so on\nfor a while\n",
    b'{"a": 1} is how an object looks\n',
    b"[1, 2]\n",
    b"plain\n",
    b"{\n",
    b"",
    b"[1]\n{}\n",
    b"{oops}\n",
    b"{" * 70_000,
    b"\xff\xfe",
]


@pytest.mark.parametrize("content", JSON_LINES)
def test_json_lines_without_a_name_are_not_taken_for_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dump").write_bytes(content)
    for call in (
        lambda **options: headrace.build(tmp_path / "dump", tmp_path / "out", **options),
        lambda **options: list(headrace.stream(tmp_path / "dump", **options)),
    ):
        with pytest.raises(SettingsError, match="dump: looks like JSON lines.*format='jsonl'.*format='text'"):
            call()
        call(format="text")
    assert len(list(headrace.stream(tmp_path / "dump", format="jsonl"))) >= 1
    assert len(list(headrace.stream(tmp_path, include=["dump"]))) >= 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        *((content, r"looks like CSV.*format='csv'") for content in CSV_ROWS),
        *((content, r"looks like a JSON .*write one object on each line") for content in OTHER_JSON),
    ],
)
def test_other_records_without_a_name_are_not_taken_for_text(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    (tmp_path / "dump").write_bytes(content)
    with pytest.raises(SettingsError, match=rf"dump: {complaint}.*format='text'"):
        headrace.build(tmp_path / "dump", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    headrace.build(tmp_path / "dump", tmp_path / "out", format="text")


@pytest.mark.parametrize("content", OTHER_TEXT)
def test_other_files_without_a_name_are_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dump").write_bytes(content)
    headrace.stream(tmp_path / "dump")


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(SettingsError, match="text_field='body': the inputs are read as text.*format='jsonl'"):
        headrace.build(tmp_path / "a.txt", tmp_path / "out", text_field="body")
    with pytest.raises(SettingsError, match="separator='x': applies only to text"):
        headrace.build(tmp_path / "a.jsonl", tmp_path / "out", separator="x")
    with pytest.raises(SettingsError, match="split='file': applies only to text"):
        headrace.stream(tmp_path / "a.jsonl", split="file")
    with pytest.raises(SettingsError, match="separator=: applies only to text"):
        headrace.stream(tmp_path / "a.jsonl", separator="x")
    for setting in ({"text_field": "\ud800"}, {"separator": "\ud800"}, {"columns": ["\ud800"]}):
        with pytest.raises(SettingsError, match="not valid Unicode"):
            headrace.build(tmp_path / "a.jsonl", tmp_path / "out", **setting)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="separator=b'x': must be a string"):
        headrace.stream(tmp_path / "a.txt", separator=b"x")  # type: ignore[arg-type]
    assert (
        headrace.build(
            [tmp_path / "a.txt", tmp_path / "a.jsonl"], tmp_path / "out", text_field="text"
        ).records
        == 2
    )
