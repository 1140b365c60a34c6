"""Addresses on the command line: where they are taken, and what is said where they cannot be."""

from pathlib import Path

import pytest

import headrace
from tests.cli.commands import run_here
from tests.web_server import web_server


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset in the working directory."""
    monkeypatch.chdir(tmp_path)
    with headrace.Writer("data", {"tokens": "uint16[*]"}) as writer:
        writer.write([{"tokens": range(40)} for _ in range(20)])
    return tmp_path / "data"


def test_commands_on_a_plain_web_server(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", "off")
    with web_server(data.parent) as address:
        done = run_here("verify", f"{address}/data")
        assert (done.returncode, done.stderr) == (0, "")
        assert "is intact" in done.stdout
        assert run_here("inspect", f"{address}/data").returncode == 0
        raw = run_here("inspect", f"{address}/data", "--dtype", "uint16")
        assert "is a Headrace dataset; dtype applies only to files of raw tokens" in raw.stderr
        other = run_here("verify", f"{address}/nothing")
        assert (
            other.stderr == f"headrace: {address}/nothing: no such dataset; build one with `headrace build`\n"
        )
        manifest = run_here("inspect", f"{address}/data/headrace.json")
        assert manifest.stderr.endswith(f"did you mean {address}/data?\n")


@pytest.mark.parametrize(
    "words",
    [
        ("export", "data", "--megatron", "s3://bucket/meg"),
        ("show", "data", "--row", 0, "--seq-len", 16, "--png", "s3://bucket/row.png"),
        ("bench", "data", "--html", "s3://bucket/page.html"),
        ("bench", "data", "--trace", "s3://bucket/trace.json"),
        ("bench", "data", "--out", "s3://bucket/figures.json"),
    ],
)
def test_outputs_that_must_be_local(words: tuple[object, ...], data: Path) -> None:
    done = run_here(*words)
    assert done.returncode == 1
    assert done.stderr.startswith("headrace: s3://bucket/")
    assert "must be a local path" in done.stderr
    assert list(data.parent.iterdir()) == [data]


@pytest.mark.parametrize(
    "words",
    [
        ("copy", "data", "s3:/bucket/x"),
        ("copy", "s3:/bucket/x", "elsewhere"),
        ("inspect", "s3:/bucket/x"),
        ("inspect", "s3//bucket/x"),
        ("verify", "s3//bucket/x"),
        ("clean", "s3:/bucket/x"),
        ("bench", "s3:/bucket/x"),
        ("build", "data", "--out", "s3:/bucket/x"),
        ("build", "s3:/bucket/x", "--out", "elsewhere"),
    ],
)
def test_mistyped_addresses(words: tuple[str, ...], data: Path) -> None:
    done = run_here(*words)
    assert done.returncode == 1
    assert "bucket/x: did you mean s3://bucket/x?" in done.stderr
    assert list(data.parent.iterdir()) == [data]


def test_the_memory_of_a_command_is_gone_when_it_ends(data: Path) -> None:
    (data.parent / "a.txt").write_text("water")
    copied = run_here("copy", "data", "memory://x")
    built = run_here("build", "a.txt", "--out", "memory://x")
    assert copied.stderr == built.stderr
    assert "would be gone when this command ends; give a directory or an address" in built.stderr


def test_tokenizers_are_local_files(data: Path) -> None:
    (data.parent / "a.txt").write_text("water")
    done = run_here("build", "a.txt", "--out", "built", "--tokenizer", "s3://bucket/tokenizer.json")
    assert "must be a local file; download it first" in done.stderr


def test_the_manifest_of_a_dataset_is_not_the_dataset(data: Path) -> None:
    for command in (("inspect",), ("verify",)):
        done = run_here(*command, "data/headrace.json")
        assert done.stderr.endswith("did you mean data?\n")
    assert run_here("copy", "data/headrace.json", "elsewhere").stderr.endswith("did you mean data?\n")
