"""Builds into a bucket: the same files as on a disk, little traffic, versions that readers can rely on, and kills."""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.errors import BuildError, DirectoryInUseError, RebuiltError, UnfinishedBuildError
from headrace.store.address import open_store
from tests.cli.commands import run_command
from tests.fault_proxy import FaultProxy
from tests.ingest.deaths import wait_until_gone
from tests.samples import documents

SETTINGS = {"tokenizer": "bytes", "split": "line", "shard_bytes": 200_000}


@pytest.fixture
def texts(tmp_path) -> Path:
    """About a megabyte."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(8):
        lines = [text * 10 for text in documents(60, seed=number) if text]
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """Where temporary files go, of this process and of those it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def asked_bytes(proxy: FaultProxy) -> int:
    """How many bytes of shards were read; a request that was slow, and so was made twice, counts once."""
    ranges = {
        (request.path, request.range) for request in proxy.log if "shard-" in request.path and request.range
    }
    return sum(
        int(last) - int(first) + 1
        for _, asked in ranges
        for first, last in [asked.removeprefix("bytes=").split("-")]
    )


def assert_same(place: str, directory: Path) -> None:
    """The same files with the same bytes, and nothing left of the build."""
    there = open_store(place)
    expected = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert {file: there.read(file) for file in there.files()} == expected
    assert set(there.everything()) == set(expected)


@pytest.mark.parametrize("shuffle", [False, True])
def test_it_is_what_a_disk_would_hold_and_is_not_read_back(
    texts, s3_place, fault_proxy, tmp_path, temporary, shuffle
):
    """With worker processes, from a process that has used the store before."""
    assert not open_store(s3_place).exists()
    report = headrace.build(texts, s3_place, workers=2, shuffle=shuffle, **SETTINGS)
    assert report.bytes > 1_500_000
    # Tables of offsets and small files; never the shards.
    assert asked_bytes(fault_proxy) < report.bytes / 10
    headrace.build(texts, tmp_path / "local", workers=1, shuffle=shuffle, **SETTINGS)
    assert_same(s3_place, tmp_path / "local")
    assert headrace.open(s3_place).fingerprint == headrace.open(tmp_path / "local").fingerprint
    fault_proxy.clear()
    assert headrace.build(texts, s3_place, workers=1, shuffle=shuffle, **SETTINGS).built == 0
    assert asked_bytes(fault_proxy) < report.bytes / 10
    assert_same(s3_place, tmp_path / "local")
    assert list(temporary.glob("headrace-*")) == []


def test_versions_follow_each_other_as_on_a_disk(texts, s3_place, fault_proxy):
    headrace.build(texts, s3_place, workers=1, **SETTINGS)
    first = headrace.open(s3_place)
    tokens = [record["tokens"].tolist() for record in first]
    (texts / "more.txt").write_text("more\n" * 100)
    fault_proxy.clear()
    report = headrace.build(texts, s3_place, workers=1, **SETTINGS)
    assert (report.built, report.added) == (1, 1)
    assert asked_bytes(fault_proxy) < report.bytes / 10
    second = headrace.open(s3_place)
    assert len(second) == len(first) + 100

    # Everything anew, in other files: the version that was opened is the one before now, and can still be read.
    other = {**SETTINGS, "eos": False}
    with pytest.raises(BuildError, match=r"with other settings: .* Use rebuild=True"):
        headrace.build(texts, s3_place, workers=1, **other)
    report = headrace.build(texts, s3_place, workers=1, rebuild=True, **other)
    assert report.previous_bytes > 1_000_000
    assert [record["tokens"].tolist() for record in second][: len(tokens)] == tokens
    (texts / "more.txt").unlink()
    report = headrace.build(texts, s3_place, workers=1, drop_previous=True, **other)
    assert (report.removed, report.previous_bytes) == (1, 0)
    assert not open_store(s3_place).has(".previous.json")
    assert len(headrace.open(s3_place)) == len(first)
    with pytest.raises(RebuiltError, match=s3_place):
        pickle.loads(pickle.dumps(second))


def test_a_writer_is_continued(s3_place, tmp_path):
    fields = {"x": "int64", "name": "bytes"}

    def write(writer: headrace.Writer, until: int) -> None:
        for number in range(len(writer), until):
            writer.write({"x": number, "name": f"record {number}" * 50})

    first = headrace.Writer(s3_place, fields=fields, shard_bytes=5000)
    write(first, 30)
    with pytest.raises(DirectoryInUseError, match=rf"in use by headrace\.Writer, process {os.getpid()} on "):
        headrace.Writer(s3_place, fields=fields, shard_bytes=5000, resume=True)
    first.write_columns({"x": [30], "name": [b"record 30" * 50]})
    first.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    with pytest.raises(UnfinishedBuildError):
        headrace.open(s3_place)
    with headrace.Writer(s3_place, fields=fields, shard_bytes=5000, resume=True) as second:
        write(second, 60)
    with headrace.Writer(tmp_path / "local", fields=fields, shard_bytes=5000) as local:
        write(local, 60)
    assert_same(s3_place, tmp_path / "local")


def test_the_command_takes_standard_input(s3_place, temporary):
    words = ("build", "-", "--out", s3_place, "--split", "line", "--json")
    done = run_command(*words, input="first\nsecond\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["path"] == s3_place
    assert len(headrace.open(s3_place)) == 2
    assert list(temporary.glob("headrace-*")) == []


@pytest.mark.soak
@pytest.mark.parametrize("shuffle", [False, True])
def test_builds_killed_at_random_moments(texts, s3_place, fault_proxy, tmp_path, temporary, shuffle):
    """They are continued by the same build, which is killed as well, and then left alone."""
    random = np.random.default_rng(11)
    settings = {**SETTINGS, "shuffle": shuffle}
    code = f"import sys, headrace; headrace.build(sys.argv[1], sys.argv[2], workers=2, **{settings!r})"
    headrace.build(texts, tmp_path / "local", workers=2, **settings)
    outcomes = set()
    for trial in range(5):
        place = f"{s3_place}/{trial}"
        for _ in range(3):
            fault_proxy.clear()
            build = subprocess.Popen([sys.executable, "-c", code, texts, place], start_new_session=True)
            most = int(random.integers(1, 150))
            while build.poll() is None and sum(fault_proxy.requests.values()) < most:
                time.sleep(0.001)
            build.kill()
            outcomes.add(build.wait())
            wait_until_gone(build.pid)
            if open_store(place).has("headrace.json"):
                assert not [verdict.problem for verdict in headrace.verify(place) if verdict.problem]
        headrace.build(texts, place, workers=2, **settings)
        assert_same(place, tmp_path / "local")
    assert -signal.SIGKILL in outcomes


@pytest.mark.soak
def test_of_builds_at_once_one_wins(texts, s3_place, tmp_path):
    words = [sys.executable, "-m", "headrace", "build", str(texts), "--out", s3_place, "--split", "line"]
    builds = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [build.communicate()[1] for build in builds]
    codes = sorted(build.returncode for build in builds)
    assert codes[0] == 0
    for build, words_said in zip(builds, said, strict=True):
        assert build.returncode != -signal.SIGKILL
        assert build.returncode == 0 or "in use by headrace build, process" in words_said
    assert not [verdict.problem for verdict in headrace.verify(s3_place) if verdict.problem]
