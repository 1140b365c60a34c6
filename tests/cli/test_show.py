import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import headrace
from headrace.cli.main import cli, main
from headrace.dataset.export import export_megatron
from headrace.errors import MissingExtraError
from headrace.format.fields import parse_fields
from headrace.format.finish import finish_dataset
from headrace.format.ragged import Ragged
from headrace.format.shard import ShardBuilder
from headrace.store.local import LocalStore

TEXTS = ["héllo", "", "a\x1b[31mb", "x" * 1000]
RAW = [b"plain", b"\xff\x00\xfe", "naïve\nlines".encode(), bytes(range(256))]
TOKENIZER = {
    "kind": "bytes",
    "name": "bytes",
    "vocab_size": 257,
    "eos_id": 256,
    "special_tokens": {"<|end|>": 256},
}


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    fields = parse_fields({"tokens": "uint16[*]", "raw": "bytes", "label": "int64", "image": "float32[2,2]"})
    builder = ShardBuilder(fields)
    tokens = [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in TEXTS]
    builder.append(
        {
            "tokens": Ragged.from_items(tokens, np.uint16),
            "raw": Ragged.from_items([np.frombuffer(raw, np.uint8) for raw in RAW], np.uint8),
            "label": np.array([5, 6, 7, 8]),
            "image": np.array([[[1, np.nan], [np.inf, 0.5]]] * 4, np.float32),
        }
    )
    entry = builder.write(LocalStore(path))
    finish_dataset(LocalStore(path), fields, [entry], "tests", tokenizer=TOKENIZER)
    return path


def show(*words):
    result = CliRunner().invoke(cli, ["show", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_real_command_shows_the_last_record(directory):
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "show", str(directory), "-1"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "record 3 of 4" in done.stdout
    assert "tokens (uint16[*], 1,000 elements)" in done.stdout
    assert "… 744 more" in done.stdout
    assert "label (int64)\n  8\n" in done.stdout
    assert "00 01 02" in done.stdout


def test_json_is_one_document_with_all_values(directory):
    document = json.loads(
        show(directory, 0, "--json"), parse_constant=lambda name: pytest.fail(f"not JSON: {name}")
    )
    assert (document["record"], document["of"]) == (0, 4)
    fields = document["fields"]
    assert fields["tokens"] == {
        "field": "uint16[*]",
        "length": 6,
        "text": "héllo",
        "values": list("héllo".encode()),
    }
    assert fields["raw"] == {"field": "bytes", "bytes": 5, "text": "plain"}
    assert fields["label"] == {"field": "int64", "shape": [], "values": 5}
    assert fields["image"]["values"] == [1.0, "nan", "inf", 0.5]
    assert len(json.loads(show(directory, 3, "--json"))["fields"]["tokens"]["values"]) == 1000


@pytest.mark.parametrize("number", [-4, -3, -2, -1, 0, 1, 2, 3])
def test_numbers_from_both_ends(directory, number):
    assert json.loads(show(directory, number, "--json"))["fields"]["tokens"]["text"] == TEXTS[number]
    assert json.loads(show("--json", directory, number, "--field", "label"))["fields"].keys() == {"label"}


def test_bytes_are_text_or_hex(directory):
    assert "  naïve\n  lines\n" in show(directory, 2, "--field", "raw")
    assert "raw (bytes, 3 bytes)\n  ff 00 fe\n" in show(directory, 1, "--field", "raw")
    assert "1f …" in show(directory, 3, "--field", "raw")
    assert json.loads(show(directory, 1, "--json"))["fields"]["raw"]["hex"] == "ff00fe"


def test_the_limit_counts_elements(directory):
    assert "120 120 … 998 more\n  xx\n" in show(directory, 3, "--limit", 2)
    limited = json.loads(show(directory, -1, "--limit", 3, "--json"))["fields"]
    assert limited["tokens"]["values"] == [120] * 3
    assert limited["tokens"]["length"] == 1000
    assert "empty" in show(directory, 1, "--field", "tokens")
    assert "… 1,000 more" in show(directory, 3, "--limit", 0, "--field", "tokens")


def test_escape_codes_in_the_data_do_not_reach_the_terminal(directory):
    assert "a\\x1b[31mb" in show(directory, 2)


def test_a_decoder_that_is_not_installed_leaves_the_numbers(directory, monkeypatch):
    def missing(directory, tokenizer):
        raise MissingExtraError("install it")

    monkeypatch.setattr("headrace.tokenizers.decoding.decoder_for", missing)
    result = CliRunner().invoke(cli, ["show", str(directory), "0"])
    assert "104 195 169" in result.stdout
    assert "not decoded: install it" in result.stderr


def test_neighbours_have_numbers_alone(directory, tmp_path):
    export_megatron(headrace.open(directory), tmp_path / "pair")
    fields = json.loads(show(tmp_path / "pair.idx", -4, "--json"))["fields"]
    assert fields == {"tokens": {"field": "uint16[*]", "length": 6, "values": list("héllo".encode())}}
    (tmp_path / "raw.bin").write_bytes(bytes([1, 2, 1, 2, 3]))
    assert "\n  1 2\n" in show(tmp_path / "raw.bin", 1, "--dtype", "uint8", "--eos-id", 2)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["4"], "record 4: the dataset has 4 records"),
        (["-5"], "record -5"),
        (["0", "--field", "x"], "no field 'x'; there are 'tokens'"),
        (["0", "--eos-id", "1"], "--eos-id=1"),
    ],
)
def test_mistakes_are_explained(directory, capsys, words, expected):
    with pytest.raises(SystemExit) as stop:
        main(["show", str(directory), *words])
    assert stop.value.code == 1
    assert expected in capsys.readouterr().err


def test_a_mistyped_option_is_called_one(directory):
    result = CliRunner().invoke(cli, ["show", str(directory), "0", "--jsno"])
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_a_dataset_from_build(tmp_path):
    (tmp_path / "notes.txt").write_text("The wind\n")
    headrace.build([str(tmp_path / "notes.txt")], str(tmp_path / "out"), tokenizer="bytes")
    assert "The wind" in show(tmp_path / "out", 0)
