import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from headrace.cli.main import cli, main
from headrace.format.fields import parse_fields
from headrace.format.finish import finish_dataset
from headrace.format.ragged import Ragged
from headrace.format.shard import ShardBuilder
from headrace.store.local import LocalStore


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    fields = parse_fields({"tokens": "uint16[*]"})
    entries = []
    for number in range(2):
        builder = ShardBuilder(fields)
        builder.append({"tokens": Ragged.from_items([np.full(5, number, np.uint16)], np.uint16)})
        entries.append(builder.write(LocalStore(path)))
    finish_dataset(LocalStore(path), fields, entries, "tests")
    return path


def damage(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "headrace", "verify", *words], capture_output=True, text=True, check=False
    )


def test_the_real_command_on_a_whole_dataset(directory):
    done = run(str(directory))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line[:8] for line in lines[:-1]] == ["ok      "] * 5
    assert "is intact: 5 files" in lines[-1]
    assert lines[-1].endswith("nothing to do.")


def test_the_real_command_on_a_damaged_dataset(directory):
    shard = next(directory.glob("shard-*"))
    damage(shard)
    done = run(str(directory))
    assert (done.returncode, done.stderr) == (1, "")
    assert f"damaged  {shard.name}: " in done.stdout
    assert "1 of 5 files" in done.stdout.splitlines()[-1]
    assert f"Restore {shard.name} from a copy" in done.stdout.splitlines()[-1]


def test_json_is_one_document(directory):
    result = CliRunner().invoke(cli, ["verify", str(directory), "--json"])
    document = json.loads(result.stdout)
    assert (result.exit_code, document["whole"], len(document["files"])) == (0, True, 5)
    inspected = json.loads(CliRunner().invoke(cli, ["inspect", str(directory), "--json"]).stdout)
    listed = [{entry["file"]: entry["bytes"] for entry in each["files"]} for each in (document, inspected)]
    assert listed[0] == listed[1]
    index = next(directory.glob("index*"))
    damage(index)
    result = CliRunner().invoke(cli, ["verify", str(directory), "--json"])
    document = json.loads(result.stdout)
    assert (result.exit_code, document["whole"]) == (1, False)
    assert {file["file"] for file in document["files"] if file["problem"]} == {index.name}


def test_a_missing_file_and_a_damaged_manifest_are_verdicts(directory):
    shard = next(directory.glob("shard-*"))
    shard.unlink()
    result = CliRunner().invoke(cli, ["verify", str(directory)])
    assert result.exit_code == 1
    assert f"damaged  {shard.name}" in result.stdout
    damage(directory / "headrace.json")
    result = CliRunner().invoke(cli, ["verify", str(directory), "--json"])
    assert result.exit_code == 1
    assert [file["file"] for file in json.loads(result.stdout)["files"]] == ["headrace.json"]


def test_what_cannot_be_verified_is_an_error(tmp_path, capsys):
    (tmp_path / "raw.bin").write_bytes(b"1234")
    for name, words in (
        ("raw.bin", "the files have no checksums"),
        ("none", "no such dataset"),
        ("", "not a dataset"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["verify", str(tmp_path / name)])
        assert stop.value.code == 1
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.out == ""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal_there_is_a_bar_and_the_lines_are_left_out(directory):
    import os
    import pty

    owner, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    words = [sys.executable, "-m", "headrace", "verify", str(directory)]
    with subprocess.Popen(
        words, stdout=terminal, stderr=terminal, stdin=terminal, env=environment
    ) as process:
        os.close(terminal)
        shown = b""
        try:
            while block := os.read(owner, 4096):
                shown += block
        except OSError:  # Linux: the other end is closed
            pass
    os.close(owner)
    text = shown.decode()
    assert process.returncode == 0
    assert "verifying" in text
    assert "is intact" in text
    assert "ok       shard" not in text
