"""`headrace verify-resume` as a user meets it: a verdict in words, an exit code, one JSON document."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from headrace.cli import loader_options, verify_resume
from headrace.cli.main import cli, main
from headrace.load.loader import Loader
from headrace.load.settings import LoaderSettings
from headrace.measure.proving import proof
from headrace.order.shuffle import ShuffleKind
from headrace.pack.overlong import Overlong


@pytest.fixture(scope="module")
def directory(write_dataset: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume") / "data"
    rng = np.random.default_rng(0)
    shards = [[{"tokens": rng.integers(0, 999, n), "label": n} for n in range(1, 40)] for _ in range(3)]
    write_dataset(path, {"tokens": "uint16[*]", "label": "int64"}, shards)
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["verify-resume", *map(str, words)])


def test_the_real_command_says_what_it_did(directory: Path) -> None:
    words = ["verify-resume", str(directory), "--seq-len", "32", "--batch-size", "4", "--trials", "2"]
    done = subprocess.run([sys.executable, "-m", "headrace", *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    rows = Loader(directory, seq_len=32, batch_size=1).rows_per_epoch
    assert lines[0].endswith(f"data: {rows:,} rows of 32 tokens an epoch")
    assert "all rows of the epoch and the beginning of the next" in lines[1]
    assert lines[2].startswith("trials   2, with ")
    assert "stops and resumes" in lines[2]
    assert "ranks, batches of 1 to " in lines[3]
    assert lines[4].startswith("Resuming is exact: every row came exactly once")
    assert len(lines) == 5


@pytest.mark.parametrize(
    "words",
    [
        ["--packing", "windows", "--align-documents", "--shuffle", "block"],
        ["--packing", "pad", "--overlong", "drop", "--shuffle", "none"],
        ["--group-shards", "2", "--seed", "9", "--epochs", "2"],
        ["--token-field", "tokens", "--trial-seed", "3"],
    ],
)
def test_every_setting_of_the_rows_can_be_proved(directory: Path, words: list[str]) -> None:
    result = run(directory, "--seq-len", 16, "--batch-size", 3, "--trials", 1, "--json", *words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["exact"] is True


def test_without_seq_len_the_records_are_proved(directory: Path) -> None:
    result = run(directory, "--batch-size", 5, "--trials", 2)
    assert result.exit_code == 0, result.output
    assert "117 records an epoch" in result.stdout


def test_a_batch_size_that_was_not_tried_is_said(directory: Path) -> None:
    for batch_size, is_tried in ((3, True), (1000, False)):
        result = run(directory, "--batch-size", batch_size, "--trials", 3)
        assert result.exit_code == 0
        assert (f"--batch-size {batch_size:,} itself was not tried" in result.output) != is_tried


def test_json_is_one_document(directory: Path) -> None:
    words = ("--seq-len", 32, "--batch-size", 4, "--epochs", 2, "--rows", 40, "--trials", 2, "--json")
    result = run(directory, *words)
    document = json.loads(result.stdout)
    assert (result.exit_code, document["exact"], document["problems"]) == (0, True, [])
    assert (document["dataset"], document["trials"], document["whole"]) == (str(directory), 2, False)
    assert document["rows"] == sum(last - first for first, last in document["stretches"])
    assert document["stretches"][0][0] == 0
    assert document["stops"] > 0
    assert set(document["world_sizes"]) <= set(range(1, 9))
    assert document["seconds"] > 0


def test_a_limit_on_the_rows_is_said(directory: Path) -> None:
    result = run(directory, "--seq-len", 4, "--batch-size", 2, "--rows", 48, "--trials", 1)
    assert "stretches of the epoch: the beginning, the end with the step into the next epoch" in result.stdout
    assert "--rows N checks more" in result.stdout


def test_a_loader_that_loses_a_row_is_told_with_its_place(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Loader.load_state_dict
    monkeypatch.setattr(
        Loader,
        "load_state_dict",
        lambda self, state: honest(self, {**state, "position": state["position"] + 1}),
    )
    words = (directory, "--seq-len", 8, "--batch-size", 4, "--trials", 7)
    result = run(*words)
    assert result.exit_code == 1
    document = json.loads(run(*words, "--json").stdout)
    first = min(problem["position"] for problem in document["problems"])
    assert document["exact"] is False
    assert (
        f"position {document['problems'][0]['position']:,} (epoch 0): it was never handed out"
        in result.stdout
    )
    assert "7 of 7 trials went wrong" in result.stdout
    assert f"the first wrong row is at position {first:,}." in result.stdout
    assert result.stdout.count("problem  trial ") == 5
    assert "... and 2 more problems" in result.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--seq-len", "1", "--batch-size", "4"], "--seq-len=1: must be at least 2"),
        (["--seq-len", "16", "--batch-size", "0"], "--batch-size=0: must be at least 1"),
        (["--batch-size", "4", "--trials", "0"], "trials=0: must be at least 1"),
        (["--batch-size", "4", "--rows", "-1"], "rows=-1: must be at least 1"),
        (["--seq-len", "16", "--batch-size", "4", "--align-documents"], "--align-documents: "),
        (["--seq-len", "99999", "--batch-size", "4", "--packing", "windows"], "too few for one row"),
        (["--batch-size", "4", "--block", "8"], "--block=8 only applies to --shuffle block"),
        (["--batch-size", "4", "--shuffle", "block", "--window", "0"], "window=0: must be a whole number"),
    ],
)
def test_mistakes_are_explained(
    directory: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["verify-resume", str(directory), *words])
    assert stop.value.code == 1
    assert expected in capsys.readouterr().err


def test_the_batch_size_must_be_said(directory: Path) -> None:
    result = run(directory)
    assert result.exit_code == 2
    assert "--batch-size" in result.output


def test_help_has_examples_and_the_choices_and_defaults_are_those_of_the_loader() -> None:
    shown = run("--help").stdout
    assert "headrace verify-resume data --seq-len 2048 --batch-size 32" in shown
    assert list(loader_options.SHUFFLES) == list(ShuffleKind)
    assert list(loader_options.OVERLONG) == list(Overlong)
    plain = LoaderSettings(batch_size=1)
    defaults = {
        each.name: each.default for each in verify_resume.command.params if isinstance(each, click.Option)
    }
    for name in ("packing", "seed", "overlong", "epochs"):
        assert defaults[name] == getattr(plain, name)
    assert defaults["shuffle"] == plain.shuffle.kind
    assert defaults["trials"] == proof.DEFAULT_TRIALS


def test_the_command_has_a_dash_in_its_name_and_no_other_spelling() -> None:
    assert "verify-resume" in CliRunner().invoke(cli, ["--help"]).stdout
    assert CliRunner().invoke(cli, ["verify_resume", "--help"]).exit_code == 2
