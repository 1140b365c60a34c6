import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import headrace
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
    fields = parse_fields({"tokens": "uint32[*]", "label": "int64"})
    builder = ShardBuilder(fields)
    tokens = Ragged.from_items([np.arange(n, dtype=np.uint32) for n in (3, 0, 5)], np.uint32)
    builder.append({"tokens": tokens, "label": np.arange(3)})
    finish_dataset(LocalStore(path), fields, [builder.write(LocalStore(path))], "tests")
    return path


def test_the_real_command(directory, tmp_path):
    words = ["export", str(directory), "--megatron", str(tmp_path / "out" / "pair")]
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *words], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert "3 documents, 8 int32 tokens" in done.stdout
    assert "left out" in done.stdout
    assert "label" in done.stdout
    assert headrace.open(tmp_path / "out" / "pair").lengths.tolist() == [3, 0, 5]


def test_json_is_one_document(directory, tmp_path):
    words = ["export", str(directory), "--megatron", str(tmp_path / "pair"), "--json"]
    document = json.loads(CliRunner().invoke(cli, words).stdout)
    assert document == {
        "bin": str(tmp_path / "pair.bin"),
        "idx": str(tmp_path / "pair.idx"),
        "documents": 3,
        "tokens": 8,
        "dtype": "int32",
        "left_out": ["label"],
    }


def test_it_overwrites_only_when_asked(directory, tmp_path, capsys):
    words = ["export", str(directory), "--megatron", str(tmp_path / "pair")]
    assert CliRunner().invoke(cli, words).exit_code == 0
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 1
    assert "already exists; choose another prefix, or give --overwrite\n" in capsys.readouterr().err
    assert CliRunner().invoke(cli, [*words, "--overwrite"]).exit_code == 0


def test_a_raw_file_becomes_a_pair(tmp_path):
    np.array([1, 2, 0, 3, 0], dtype="<u2").tofile(tmp_path / "raw.bin")
    words = ["export", str(tmp_path / "raw.bin"), "--eos-id", "0", "--megatron", str(tmp_path / "pair")]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert [r["tokens"].tolist() for r in headrace.open(tmp_path / "pair")] == [[1, 2, 0], [3, 0]]


def test_the_format_must_be_named(directory):
    result = CliRunner().invoke(cli, ["export", str(directory)])
    assert result.exit_code == 2
    assert "--megatron" in result.output
