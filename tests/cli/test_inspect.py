import json
import re
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import headrace
from headrace.cli.inspect import draw_lengths
from headrace.cli.main import cli
from headrace.cli.terminal import bar, byte_size, safe_text
from headrace.dataset.export import export_megatron
from headrace.dataset.summary import summarize_lengths
from headrace.format.fields import parse_fields
from headrace.format.finish import finish_dataset
from headrace.format.ragged import Ragged
from headrace.format.shard import ShardBuilder
from headrace.store.local import LocalStore

TOKENIZER = {"kind": "bytes", "name": "bytes", "vocab_size": 257, "eos_id": 256, "fingerprint": "f" * 32}


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    fields = parse_fields({"tokens": "uint16[*]", "scores": "float32[*]", "label": "int64"})
    builder = ShardBuilder(fields)
    tokens = Ragged.from_items([np.arange(n, dtype=np.uint16) for n in (3, 900, 3, 40)], np.uint16)
    scores = Ragged.from_items([np.zeros(n, dtype=np.float32) for n in (1, 0, 0, 0)], np.float32)
    builder.append({"tokens": tokens, "scores": scores, "label": np.arange(4)})
    entry = builder.write(LocalStore(path))
    finish_dataset(
        LocalStore(path), fields, [entry], "headrace 0.1.0", tokenizer=TOKENIZER, settings={"seed": 7}
    )
    return path


def test_the_real_command_says_everything_in_plain_text(directory):
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "inspect", str(directory)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    for words in (
        *("records      4", "tokens       946", "tokens: uint16[*], scores: float32[*], label: int64"),
        *("kind=bytes, name=bytes, vocab_size=257, eos_id=256", "seed=7", "written by   headrace 0.1.0"),
        *("length of 'tokens'", "min 3  mean 236.5  p50 3  p90 900  p99 900  max 900", "length of 'scores'"),
        *("in 4 files", "shards       1"),
    ):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_json_is_one_document(directory):
    result = CliRunner().invoke(cli, ["inspect", str(directory), "--json"])
    document = json.loads(result.stdout)
    assert (document["records"], document["tokens"], document["shards"]) == (4, 946, 1)
    assert document["tokenizer"] == TOKENIZER
    assert document["settings"] == {"seed": 7}
    assert document["fields"]["scores"] == "float32[*]"
    assert document["bytes"] == sum(path.stat().st_size for path in directory.iterdir())
    lengths = document["lengths"]["tokens"]
    statistics = [lengths[key] for key in ("min", "mean", "p50", "p90", "p99", "max")]
    assert statistics == [3, 236.5, 3, 900, 900, 900]
    assert sum(bucket["records"] for bucket in lengths["histogram"]) == 4


def test_neighbours(directory, tmp_path):
    export_megatron(headrace.open(directory), tmp_path / "pair")
    document = json.loads(CliRunner().invoke(cli, ["inspect", str(tmp_path / "pair"), "--json"]).stdout)
    assert (document["records"], document["tokens"], document["tokenizer"]) == (4, 946, None)
    (tmp_path / "raw.bin").write_bytes(bytes([1, 2, 1, 2, 3]))
    raw = ["inspect", str(tmp_path / "raw.bin"), "--dtype", "uint8", "--eos-id", "2", "--json"]
    assert json.loads(CliRunner().invoke(cli, raw).stdout)["records"] == 3


def test_a_dataset_without_records_or_ragged_fields(tmp_path):
    fields = parse_fields({"tokens": "uint16[*]"})
    finish_dataset(LocalStore(tmp_path), fields, [], "tests")
    assert "no records" in CliRunner().invoke(cli, ["inspect", str(tmp_path)]).stdout


def test_an_error_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "inspect", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("headrace: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("fancy", [True, False])
def test_the_picture_fits_its_width_and_shows_every_bucket(columns, fancy):
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6, 1.5, 5000).astype(int)
    lines = draw_lengths("tokens", summarize_lengths(np.unique(lengths, return_counts=True)), columns, fancy)
    bars = [re.sub(r"\x1b\[\d*m", "", line) for line in lines[2:]]
    assert all(len(line) <= max(columns, 40) for line in bars)
    assert max(map(len, bars)) >= min(columns, 40) - 4
    if not fancy:
        assert all(line.isascii() for line in bars)


def test_bars_sizes_and_safe_text():
    assert (bar(1, 3), bar(0.5, 3), bar(0.0001, 3), bar(0, 3)) == ("███", "█▌", "▏", "")
    assert (bar(1, 3, fancy=False), bar(0.0001, 3, fancy=False)) == ("###", "#")
    assert [byte_size(n) for n in (0, 1023, 1536, 2**40, 2**60)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "1.0 TiB",
        "1024.0 PiB",
    ]
    assert safe_text("a\tb\x1b[31m\u202e é") == "a\tb\\x1b[31m\\u202e é"


def test_help_has_an_example_for_each_command():
    for name in ("inspect", "show", "verify", "export"):
        result = CliRunner().invoke(cli, [name, "--help"])
        assert result.exit_code == 0
        assert f"headrace {name} data" in result.stdout


def test_help_imports_neither_numpy_nor_rich():
    program = """
import sys, headrace.cli.main
try:
    headrace.cli.main.main(['--help'])
finally:
    print(sorted(set(sys.modules) & {'numpy', 'rich', 'pyarrow'}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
