import json
import os
import shutil

import pytest

from headrace.errors import (
    CorruptError,
    DatasetNotFoundError,
    StorageError,
    UnfinishedBuildError,
    VersionError,
)
from headrace.format.container import StoredFile
from headrace.format.manifest import read_manifest
from headrace.store.local import LocalStore

EMPTY_HEADER = "2d06800538d394c2"


@pytest.fixture(scope="module")
def written(write_dataset, tmp_path_factory):
    shards = [[{"t": [1, 2], "x": 1}], [{"t": [], "x": 2}, {"t": [3], "x": 3}]]
    directory = tmp_path_factory.mktemp("written")
    write_dataset(directory, {"t": "uint16[*]", "x": "int8"}, shards)
    return directory


@pytest.fixture
def directory(written, tmp_path):
    """A copy, to be spoilt."""
    return shutil.copytree(written, tmp_path / "d")


def test_a_manifest_comes_back(write_dataset, tmp_path):
    other = StoredFile("provenance.json", 3, "0" * 32, 0, EMPTY_HEADER)
    tokenizer = {"name": "ü", "stored": {**other.__dict__, "file": "tokenizer.json"}}
    written = write_dataset(
        tmp_path, {"t": "uint16[*]"}, [[]], tokenizer=tokenizer, settings={"a": [1]}, provenance=other
    )
    assert read_manifest(LocalStore(tmp_path)) == written
    assert [stored.file.split("-")[0] for stored in written.files] == [
        *("shard", "index", "provenance.json", "tokenizer.json", "units")
    ]


def test_nothing_to_read(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="no such dataset"):
        read_manifest(LocalStore(tmp_path / "absent"))
    with pytest.raises(DatasetNotFoundError, match=r"it has no headrace\.json; build one"):
        read_manifest(LocalStore(tmp_path))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DatasetNotFoundError, match="no such dataset"):
        read_manifest(LocalStore(tmp_path / "file"))
    (tmp_path / ".build").mkdir()
    with pytest.raises(UnfinishedBuildError, match="is not complete yet"):
        read_manifest(LocalStore(tmp_path))
    (tmp_path / "headrace.json").mkdir()
    with pytest.raises(StorageError, match=r"headrace\.json: cannot be read: Is a directory"):
        read_manifest(LocalStore(tmp_path))


def test_a_build_beside_a_dataset_does_not_matter(directory):
    (directory / ".build").mkdir()
    (directory / ".lock").write_text("someone")
    (directory / ".tmp-1-x").write_text("half")
    assert read_manifest(LocalStore(directory)).records == 3


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_manifest_that_may_not_be_read(directory):
    (directory / "headrace.json").chmod(0)
    with pytest.raises(StorageError, match="Permission denied"):
        read_manifest(LocalStore(directory))


def test_any_change_is_noticed(directory):
    path = directory / "headrace.json"
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CorruptError):
            read_manifest(LocalStore(directory))
    path.write_bytes(good.replace(b"\n", b"\r\n"))
    with pytest.raises(CorruptError, match="not a Headrace manifest: its first line is"):
        read_manifest(LocalStore(directory))
    path.write_bytes(good + b"\n")
    with pytest.raises(CorruptError, match="its checksum does not match"):
        read_manifest(LocalStore(directory))


def test_versions(directory, reseal):
    for version, advice in ((2, "upgrade Headrace"), (0, "rebuild the dataset")):
        reseal(directory, lambda body, version=version: body.update(version=version))
        with pytest.raises(VersionError, match=f"format version {version}.*reads version 1: {advice}"):
            read_manifest(LocalStore(directory))
    for version in ("1", 1.0, True, None):
        reseal(directory, lambda body, version=version: body.update(version=version))
        with pytest.raises(CorruptError, match="damaged manifest"):
            read_manifest(LocalStore(directory))


def edits():
    def shard(**changes):
        return lambda body: body["shards"][0].update(changes)

    def field(**changes):
        return lambda body: body["fields"][0].update(changes)

    for name in (
        "../x",
        "/etc/passwd",
        "..",
        ".hidden",
        "a/b",
        "a\\b",
        "",
        "x\n",
        "headrace.json",
        "a" * 256,
        3,
    ):
        yield shard(file=name)
    for number in (-1, 1.0, True, None, "3", 2**63, 10**30, float("nan"), [1]):
        yield shard(bytes=number)
        yield shard(header_bytes=number)
        yield shard(records=number)
        yield shard(elements={"t": number, "x": 1})
        yield lambda body, number=number: body.update(records=number)
    yield shard(bytes=2**62, header_bytes=2**62)
    yield shard(records=2**32, elements={"t": 2, "x": 2**32})
    for text in ("", "0" * 16, "0" * 31, "g" * 32, "A" * 32, 3, None):
        yield shard(checksum=text)
    for text in ("", "0" * 32, "G" * 16, 3, None):
        yield shard(header_checksum=text)
    for elements in ({}, {"t": 2}, {"t": 2, "x": 1, "y": 1}, {"t": 2, "x": 2}, [], None, "t"):
        yield shard(elements=elements)
    yield field(name="x")
    yield field(name="a/b")
    yield field(name=["t"])
    yield field(shape=[2**62, 2**62])
    yield field(extra=1)
    for key in ("format", "version", "records", "fields", "shards", "index", "provenance", "tokenizer"):
        yield lambda body, key=key: body.pop(key)
    for key in ("fields", "shards", "index", "provenance", "tokenizer", "settings", "written_by"):
        for value in (3, [3], True, "x" if key != "written_by" else 1, [[]], 0):
            yield lambda body, key=key, value=value: body.update({key: value})
    yield lambda body: body.update(tokenizer={"stored": {"file": "../x"}})
    yield lambda body: body.update(tokenizer={"stored": 0})
    yield lambda body: body.update(provenance={**body["index"], "bytes": body["index"]["bytes"] + 64})
    yield lambda body: body["shards"].append(body["shards"][0])


@pytest.mark.parametrize("number", range(len(list(edits()))))
def test_forged_manifests_are_refused(directory, reseal, number):
    reseal(directory, list(edits())[number])
    with pytest.raises(CorruptError, match=r"headrace\.json: damaged manifest: .*Restore it") as caught:
        read_manifest(LocalStore(directory))
    assert len(str(caught.value)) < 700


def test_keys_of_later_writers_are_ignored(directory, reseal):
    reseal(directory, lambda body: (body.update(later=1), body["shards"][0].update(later=1)))
    assert read_manifest(LocalStore(directory)).records == 3


def test_one_line_a_shard(directory):
    lines = (directory / "headrace.json").read_text().splitlines()
    assert sum(line.startswith('  {"file": "shard-') for line in lines) == 2
    assert json.loads("\n".join(lines))["records"] == 3
