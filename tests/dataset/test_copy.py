"""A copy is the same dataset: on a disk, in a bucket, after faults, and after kills at any moment."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.errors import (
    CorruptError,
    DatasetNotFoundError,
    DirectoryInUseError,
    SettingsError,
    StorageError,
    UnfinishedBuildError,
)
from headrace.format.manifest import MANIFEST_NAME
from headrace.store.address import open_store
from headrace.store.store import Store
from tests.fault_proxy import Flip, Hold, Truncate
from tests.samples import documents, tree

DEADLINE_SECONDS = 90


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = folder / "texts"
    texts.mkdir()
    for number, text in enumerate(documents(12)):
        (texts / f"{number:04d}.txt").write_text(text * 10)
    headrace.build(texts, folder / "data", tokenizer="bytes", shard_bytes=4096, workers=1)
    return folder / "data"


def written(place: str | Path, values: range) -> None:
    with headrace.Writer(place, fields={"x": "int64"}, shard_bytes=64) as writer:
        writer.write_columns({"x": np.array(values)})


def content_of(store: Store) -> dict[str, bytes]:
    return {file: store.read(file) for file in store.files()}


def shard_of(place: Path) -> Path:
    return sorted(place.glob("shard-*"))[0]


def kinds(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("places", names, indirect=True)


@pytest.fixture
def places(request, data, tmp_path) -> tuple[str, str]:
    origin, end = request.param.split(" to ")
    if "bucket" not in (origin, end):
        return str(data), str(tmp_path / "copy")
    bucket = request.getfixturevalue("s3_place")
    if origin == "bucket":
        headrace.copy(data, f"{bucket}/source")
    source = f"{bucket}/source" if origin == "bucket" else str(data)
    return source, f"{bucket}/copy" if end == "bucket" else str(tmp_path / "copy")


@kinds("disk to disk", "disk to bucket", "bucket to disk", "bucket to bucket")
def test_the_copy_has_the_same_files(places, data):
    source, destination = places
    told = []
    report = headrace.copy(source, destination, progress=told.append)
    names = sorted(path.name for path in data.iterdir())
    assert (report.files, report.copied_files) == (len(names) - 1, len(names) - 1)
    assert report.copied_bytes == report.bytes > 0
    assert (told[-1].stage, told[-1].bytes, told[-1].total_bytes) == ("copying", report.bytes, report.bytes)
    assert (told[-1].files, told[-1].total_files) == (report.files, report.files)
    there = open_store(destination)
    assert content_of(there) == {name: (data / name).read_bytes() for name in names}
    assert not there.folder(".build").exists()
    assert headrace.open(destination).fingerprint == headrace.open(data).fingerprint


@kinds("disk to disk", "disk to bucket")
def test_a_complete_copy_is_left_alone(places):
    source, destination = places
    headrace.copy(source, destination)
    stamps = {file: open_store(destination).stamp(file) for file in open_store(destination).files()}
    for verify in (False, True):
        report = headrace.copy(source, destination, verify=verify)
        assert (report.copied_files, report.copied_bytes) == (0, 0)
    assert {file: open_store(destination).stamp(file) for file in stamps} == stamps


@kinds("disk to disk", "disk to bucket")
def test_what_a_copy_left_that_was_killed_at_its_very_end_goes(places):
    source, destination = places
    headrace.copy(source, destination)
    there = open_store(destination)
    before = set(there.everything())
    there.folder(".build").claim()
    assert headrace.copy(source, destination).copied_files == 0
    assert set(there.everything()) == before
    assert not there.folder(".build").exists()


@kinds("disk to bucket", "bucket to disk")
def test_a_missing_or_damaged_file_of_a_copy_is_copied_again(places):
    source, destination = places
    headrace.copy(source, destination)
    there = open_store(destination)
    expected = content_of(there)
    first, second = [file for file in there.files() if file.startswith("shard-")][:2]
    there.remove(first)
    assert headrace.copy(source, destination).copied_files == 1
    there.remove(second)
    with there.pending("x") as pending:
        pending.name = second
        pending.file.write(b"?" * len(expected[second]))
    assert headrace.copy(source, destination).copied_files == 0
    assert headrace.copy(source, destination, verify=True).copied_files == 1
    assert content_of(there) == expected


def test_a_large_file_goes_in_parts(s3_place, tmp_path):
    content = np.random.default_rng(1).integers(0, 2**62, 2_500_000)
    with headrace.Writer(tmp_path / "large", fields={"x": "int64"}) as writer:
        writer.write_columns({"x": content})
    headrace.copy(tmp_path / "large", s3_place)
    headrace.copy(s3_place, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(tmp_path / "large")


def test_another_dataset_is_replaced_only_if_asked_for_and_stays_for_its_readers(data, s3_place, tmp_path):
    for place in (s3_place, str(tmp_path / "copy")):
        written(place, range(100))
        before = headrace.open(place)
        with pytest.raises(SettingsError, match="holds another dataset; .* use replace=True"):
            headrace.copy(data, place)
        report = headrace.copy(data, place, replace=True)
        assert report.previous_bytes > 0
        assert headrace.open(place).fingerprint == headrace.open(data).fingerprint
        assert before[99]["x"] == 99
        assert not [verdict.problem for verdict in headrace.verify(place) if verdict.problem]


def test_a_damaged_source_is_not_copied(data, tmp_path):
    shutil.copytree(data, tmp_path / "source")
    shard = shard_of(tmp_path / "source")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptError, match=rf"{shard.name}: checksum .* was not copied\. Restore it"):
        headrace.copy(tmp_path / "source", tmp_path / "copy")
    assert shard.name not in [path.name for path in (tmp_path / "copy").rglob("*")]
    with pytest.raises(UnfinishedBuildError, match="the same copy"):
        headrace.open(tmp_path / "copy")
    shard.unlink()
    with pytest.raises(CorruptError, match=f"{shard.name}: is missing, although the manifest names it"):
        headrace.copy(tmp_path / "source", tmp_path / "copy")
    shutil.copy(data / shard.name, shard)
    headrace.copy(tmp_path / "source", tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(data)


@pytest.mark.parametrize("fault", [Flip(9), Truncate(9)])
def test_what_changes_on_the_way_is_fetched_again(data, s3_place, fault_proxy, tmp_path, fault):
    headrace.copy(data, s3_place)
    fault_proxy.add(fault, method="GET", path="shard-", count=1)
    headrace.copy(s3_place, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(data)


def test_what_is_nobody_elses_business_is_refused(data, tmp_path):
    with pytest.raises(SettingsError, match="is the source and the destination"):
        headrace.copy(data, data)
    with pytest.raises(DatasetNotFoundError, match="no such dataset"):
        headrace.copy(tmp_path / "nothing", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_files_of_others_stay(data, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "notes.txt").write_text("mine")
    name = shard_of(data).name
    (copy / name).write_text("mine as well")
    with pytest.raises(StorageError, match=f"{name}: is there already with another content"):
        headrace.copy(data, copy)
    assert (copy / name).read_text() == "mine as well"
    (copy / name).unlink()
    headrace.copy(data, copy)
    assert {**tree(data), **tree(copy)} == tree(copy)
    assert (copy / "notes.txt").read_text() == "mine"


def test_unfinished_work_of_others_is_discarded_only_if_asked_for(data, tmp_path):
    unfinished = headrace.Writer(tmp_path / "copy", fields={"x": "int64"}, shard_bytes=64)
    unfinished.write_columns({"x": np.arange(100)})
    with pytest.raises(DirectoryInUseError, match=r"headrace\.Writer"):
        headrace.copy(data, tmp_path / "copy")
    unfinished.write_columns({"x": np.arange(100)})
    unfinished.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    with pytest.raises(UnfinishedBuildError, match="a build or a writer was interrupted here"):
        headrace.copy(data, tmp_path / "copy")
    headrace.copy(data, tmp_path / "copy", replace=True)
    assert tree(tmp_path / "copy") == tree(data)


def test_an_unfinished_copy_is_not_taken_for_a_build(data, tmp_path):
    shutil.copytree(data, tmp_path / "source")
    shard_of(tmp_path / "source").unlink()
    with pytest.raises(CorruptError):
        headrace.copy(tmp_path / "source", tmp_path / "copy")
    with pytest.raises(UnfinishedBuildError, match="a copy was interrupted here"):
        headrace.build(data.parent / "texts", tmp_path / "copy", workers=1)
    for resume in (False, True):
        with pytest.raises(UnfinishedBuildError, match="a copy was interrupted here"):
            headrace.Writer(tmp_path / "copy", fields={"x": "int64"}, resume=resume)
    headrace.build(
        data.parent / "texts",
        tmp_path / "copy",
        tokenizer="bytes",
        shard_bytes=4096,
        workers=1,
        rebuild=True,
    )
    assert tree(tmp_path / "copy") == tree(data)


def test_a_dataset_of_an_earlier_version_is_copied_as_it_is(data, tmp_path, reseal):
    shutil.copytree(data, tmp_path / "old")
    for further in json.loads((data / MANIFEST_NAME).read_bytes())["further"]:
        (tmp_path / "old" / further["file"]).unlink()
    reseal(tmp_path / "old", lambda body: body.update(further=[]))
    headrace.copy(tmp_path / "old", tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(tmp_path / "old")


COPY = """
import sys, headrace
headrace.copy(sys.argv[1], sys.argv[2])
"""


def start_copy(source: object, destination: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", COPY, str(source), str(destination)])


def test_a_killed_copy_goes_on_where_it_was(data, s3_place, fault_proxy, tmp_path):
    """Killed while one object is on its way; the others are not sent again."""
    release = threading.Event()
    held = shard_of(data).name
    fault_proxy.add(Hold(release), method="PUT", path=held)
    copying = start_copy(data, s3_place)
    there = open_store(s3_place)
    names = {path.name for path in data.iterdir()} - {MANIFEST_NAME, held}
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while not names <= set(there.files()):
            assert copying.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(DirectoryInUseError, match=f"in use by headrace copy, process {copying.pid} on "):
            headrace.copy(data, s3_place)
        with pytest.raises(UnfinishedBuildError):
            headrace.open(s3_place)
    finally:
        copying.send_signal(signal.SIGKILL)
        copying.wait()
        fault_proxy.clear()
        release.set()
    report = headrace.copy(data, s3_place)
    assert report.copied_files <= 1
    assert content_of(there) == {path.name: path.read_bytes() for path in data.iterdir()}


@pytest.mark.soak
@pytest.mark.parametrize("to_bucket", [True, False])
def test_copies_killed_at_random_moments(s3_place, fault_proxy, tmp_path, to_bucket):
    random = np.random.default_rng(7)
    source, outcomes = tmp_path / "source", set()
    with headrace.Writer(source, fields={"x": "int64"}, shard_bytes=1 << 20) as writer:
        writer.write_columns({"x": random.integers(0, 2**62, 3_000_000)})
    if not to_bucket:
        headrace.copy(source, f"{s3_place}/source")
    given = source if to_bucket else f"{s3_place}/source"
    for trial in range(20):
        destination = f"{s3_place}/{trial}" if to_bucket else tmp_path / f"copy {trial}"
        for _ in range(2):
            fault_proxy.clear()
            copying = start_copy(given, destination)
            most = int(random.integers(1, 70))
            while copying.poll() is None and sum(fault_proxy.requests.values()) < most:
                time.sleep(0.001)
            copying.kill()
            outcomes.add(copying.wait())
            try:
                headrace.open(destination)
            except (UnfinishedBuildError, DatasetNotFoundError):
                continue
            assert not [verdict.problem for verdict in headrace.verify(destination) if verdict.problem]
        headrace.copy(given, destination)
        there = open_store(destination)
        assert content_of(there) == {path.name: path.read_bytes() for path in source.iterdir()}
        assert not there.folder(".build").exists()
    assert -signal.SIGKILL in outcomes
