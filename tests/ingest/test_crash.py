"""kill -9 at any moment: a valid dataset or a build that continues, and the same bytes in the end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.errors import BadRecordsError, PenstockError, UnfinishedBuildError
from tests.samples import documents, tree


def _start(folder: Path, out: Path, *extra: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        "penstock",
        "build",
        str(folder),
        "--out",
        str(out),
        "--shard-size",
        "4096",
    ]
    return subprocess.Popen(
        [*command, "--workers", "2", *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _finish(process: "subprocess.Popen[str]") -> int:
    process.communicate()
    return process.returncode


def _workers_of(group: int) -> list[int]:
    """Processes of a session that are still alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("extra", [[], ["--shuffle", "--seed", "3"]])
def test_killed_at_any_moment_it_continues_to_the_same_bytes(
    extra: list[str], write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    _kill_and_continue(extra, write_texts, tmp_path, [moment / 10 for moment in range(1, 10)])


@pytest.mark.soak
@pytest.mark.parametrize("extra", [[], ["--shuffle", "--seed", "3"]])
def test_killed_at_a_hundred_moments_it_continues_to_the_same_bytes(
    extra: list[str], write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    _kill_and_continue(extra, write_texts, tmp_path, [moment / 100 for moment in range(1, 101)])


def _kill_and_continue(
    extra: list[str], write_texts: Callable[..., Path], tmp_path: Path, moments: list[float]
) -> None:
    """Kill the build at each of these shares of its time, continue it each time, compare with one never killed."""
    folder = write_texts([text * 20 for text in documents(400)])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    started = time.monotonic()
    assert _finish(_start(folder, whole, *extra)) == 0
    seconds = time.monotonic() - started
    kills = 0
    for moment in moments:
        process = _start(folder, cut, *extra)
        time.sleep(seconds * moment)
        process.kill()
        finished = _finish(process) == 0
        kills += not finished
        try:
            dataset = penstock.open(cut)
        except PenstockError as error:
            assert "build" in str(error)
        else:
            # A manifest is there: then the dataset must be whole.
            assert not [verdict for verdict in penstock.verify(cut) if verdict.problem]
            assert len(dataset) == 400
        _wait_until_gone(process.pid)
        if finished:
            shutil.rmtree(cut)
    assert kills >= 3
    assert _finish(_start(folder, cut, *extra)) == 0
    assert tree(cut) == tree(whole)


def _wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 20
    while _workers_of(group):
        assert time.monotonic() < deadline, "workers outlived the build that was killed"
        time.sleep(0.01)


def test_what_was_finished_before_the_kill_is_not_built_again(
    write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_texts([text * 20 for text in documents(400)])
    out = tmp_path / "out"
    journal = out / ".build" / "journal.jsonl"
    process = _start(folder, out)
    deadline = time.monotonic() + 30
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        assert process.poll() is None, "the build finished before it could be cut off"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finished = journal.read_bytes().count(b"\n")
    with pytest.raises(UnfinishedBuildError, match="run the same command again"):
        penstock.open(out)
    report = penstock.build(folder, out, shard_bytes=4096, workers=2)
    assert report.reused >= finished >= 3
    assert report.records == 400


def test_half_a_journal_line_is_ignored(write_texts: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_texts(documents(50))
    penstock.build(folder, tmp_path / "whole", shard_bytes=4096)
    out = tmp_path / "out"
    assert _finish(_start(folder, out)) == 0
    (out / ".build").mkdir()
    (out / ".build" / "journal.jsonl").write_text('{"result": {"slices": [{"pa')
    penstock.build(folder, out, shard_bytes=4096)
    assert tree(out) == tree(tmp_path / "whole")


def test_a_killed_worker_is_named_and_the_build_continues(
    write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_texts([text * 200 for text in documents(400)])
    process = _start(folder, tmp_path / "out")
    victims: list[int] = []
    deadline = time.monotonic() + 30
    while not victims and time.monotonic() < deadline:
        victims = [pid for pid in _workers_of(process.pid) if pid != process.pid]
        time.sleep(0.005)
    os.kill(victims[0], signal.SIGKILL)
    _, complaint = process.communicate()
    assert process.returncode == 1
    assert "worker process was killed" in complaint
    assert penstock.build(folder, tmp_path / "out", shard_bytes=4096).records == 400


def test_ctrl_c_leaves_no_process_and_a_build_that_continues(
    write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_texts([text * 200 for text in documents(400)])
    process = _start(folder, tmp_path / "out")
    while len(_workers_of(process.pid)) < 3 and process.poll() is None:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate()
    assert process.returncode != 0
    _wait_until_gone(process.pid)
    assert penstock.build(folder, tmp_path / "out", shard_bytes=4096).records == 400


def test_a_full_disk_loses_nothing(write_texts: Callable[..., Path], tmp_path: Path) -> None:
    """The limit on file sizes stands in for a full disk: the kernel refuses the write in the same way."""
    folder = write_texts(documents(50))
    out = tmp_path / "out"
    penstock.build(folder, out)
    before = tree(out)
    (folder / "large.txt").write_text("x" * 500_000)
    program = (
        "import resource, signal, sys, penstock\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    penstock.build(sys.argv[1], sys.argv[2], workers=1)\n"
        "except penstock.PenstockError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, folder, out], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("StorageError")
    assert "free some space" in done.stdout
    assert len(penstock.open(out)) == 50
    assert not list(out.rglob(".tmp-*"))
    assert {name: digest for name, digest in tree(out).items() if not name.startswith(".build")} == before
    assert penstock.build(folder, out).records == 51


def test_a_build_error_in_a_worker_keeps_its_kind(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"body": "x" * 3000}) + "\n")
    with pytest.raises(BadRecordsError, match="the record has: body"):
        penstock.build(
            str(tmp_path / "*.jsonl"), tmp_path / "out", tokenizer="bytes", workers=2, shard_bytes=4096
        )
