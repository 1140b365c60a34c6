"""Writing to a real S3 server through a proxy that injects faults: what is there is whole, and no work is lost."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import headrace
from headrace.errors import DirectoryInUseError, StorageError
from headrace.format.manifest import parse_manifest, read_manifest
from headrace.store.client import RemoteOptions
from headrace.store.remote import RemoteStore
from headrace.store.store import write_file
from headrace.store.upload import is_content_name
from headrace.store.uploads import abort_upload, unfinished_uploads
from tests.fault_proxy import Answer, Reset, Stall

PLAIN, NAMED_BY_CONTENT = "notes.json", "shard-0123456789abcdef.hdrc"
LARGE = bytes(range(256)) * (44 << 10)
"""Three parts of the least size that servers take."""


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("headrace.store.objects.PART_BYTES", 5 << 20)


@pytest.fixture
def store(fault_proxy, s3_place) -> RemoteStore:
    return RemoteStore(s3_place, RemoteOptions(write_seconds=5))


def wait_for(condition, process):
    """Until something has happened that a process does."""
    while not condition():
        assert process.poll() is None
        time.sleep(0.02)


def test_which_names_contain_a_checksum():
    assert is_content_name(NAMED_BY_CONTENT)
    assert is_content_name("0123456789abcdef0123456789abcdef.json")
    assert not any(
        map(is_content_name, [PLAIN, "headrace.json", "state.json", "shard-1.hdrc", "0-4096.json"])
    )


@pytest.mark.parametrize("name", [PLAIN, NAMED_BY_CONTENT])
@pytest.mark.parametrize(
    "fault", [Answer(503, "SlowDown"), Answer(500), Reset(), Reset(after_server=True)], ids=repr
)
def test_what_was_written_is_there_after_faults(store, fault_proxy, name, fault):
    fault_proxy.add(fault, method="PUT", count=2)
    write_file(store, name, [b"content"])
    assert store.read(name) == b"content"
    assert store.files() == [name]


def test_a_file_that_is_there_already_is_left_and_a_damaged_one_is_replaced(store, fault_proxy):
    write_file(store, NAMED_BY_CONTENT, [b"content"])
    stamp = store.stamp(NAMED_BY_CONTENT)
    write_file(store, NAMED_BY_CONTENT, [b"content"])
    assert store.stamp(NAMED_BY_CONTENT) == stamp
    store.remove(NAMED_BY_CONTENT)
    write_file(store, NAMED_BY_CONTENT, [b"cut"])
    write_file(store, NAMED_BY_CONTENT, [b"content"])
    assert store.read(NAMED_BY_CONTENT) == b"content"


def test_a_large_file_goes_in_parts_and_only_a_part_is_sent_again(store, fault_proxy, small_parts):
    fault_proxy.add(Answer(503, "SlowDown"), method="PUT", path="partNumber=2", count=1)
    write_file(store, NAMED_BY_CONTENT, [LARGE[:1000], LARGE[1000:]])
    assert fault_proxy.requests["PUT"] == 4
    fault_proxy.clear()
    write_file(store, NAMED_BY_CONTENT, [LARGE])
    assert fault_proxy.requests == {"HEAD": 1}
    assert store.read(NAMED_BY_CONTENT) == LARGE


def test_an_upload_that_fails_is_taken_back(store, fault_proxy, small_parts):
    fault_proxy.add(Answer(403, "AccessDenied"), method="PUT", path="partNumber=2")
    with pytest.raises(StorageError, match=rf"{store.name}/{PLAIN}: cannot be written: .*403 AccessDenied"):
        write_file(store, PLAIN, [LARGE])
    assert not store.exists()
    assert unfinished_uploads(store) == []


UPLOAD = """
import sys
import headrace.store.objects
from headrace.store.address import open_store
from headrace.store.store import write_file
headrace.store.objects.PART_BYTES = 1 << 20
write_file(open_store(sys.argv[1]), "large file", [bytes(3 << 20)])
"""


def test_uploads_of_a_killed_writer_are_found_and_aborted(store, fault_proxy):
    fault_proxy.add(Stall(), method="PUT", path="partNumber=3")
    writer = subprocess.Popen([sys.executable, "-c", UPLOAD, store.folder("inner").name])
    try:
        wait_for(lambda: fault_proxy.requests["PUT"] == 3, writer)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert not store.exists()
    write_file(store, "x", [b"content"])
    (upload,) = unfinished_uploads(store)
    assert upload.key == f"{store.address.prefix}/inner/large file"
    assert upload.started.year > 2000
    assert unfinished_uploads(store.folder("other")) == []
    abort_upload(store, upload)
    abort_upload(store, upload)
    assert unfinished_uploads(store) == []
    assert store.read("x") == b"content"


def test_uploads_are_listed_in_pages(store, fault_proxy):
    first = """<ListMultipartUploadsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>true</IsTruncated>
        <NextKeyMarker>a b</NextKeyMarker><NextUploadIdMarker>1</NextUploadIdMarker><Upload><Key>a b</Key>
        <UploadId>1</UploadId><Initiated>2026-01-02T03:04:05.000Z</Initiated></Upload></ListMultipartUploadsResult>"""
    fault_proxy.add(Answer(503, "SlowDown"), method="GET", count=1)
    fault_proxy.add(Answer(200, body=first.encode()), method="GET", count=1)
    fault_proxy.add(Answer(200, body=b"<ListMultipartUploadsResult/>"), method="GET", count=1)
    assert [upload.key for upload in unfinished_uploads(store)] == ["a b"]
    assert "key-marker=a%20b" in fault_proxy.log[-1].path
    fault_proxy.add(Answer(200, body=b"<html"), method="GET", count=1)
    with pytest.raises(StorageError, match="cannot be understood"):
        unfinished_uploads(store)


# Replacing what somebody else may replace


def test_a_file_is_replaced_only_if_it_is_the_one_that_was_seen(store, fault_proxy):
    inner = store.folder("new")
    write_file(inner, "m", [b"first"])
    store.replace("m", inner, None)
    store.replace("m", inner, None)  # as a repetition after an interrupt does
    seen = store.stamp("m")
    write_file(inner, "m", [b"second"])
    fault_proxy.add(Reset(after_server=True), method="PUT", path=r"/m$", count=1)
    store.replace("m", inner, seen)
    assert (store.read("m"), inner.files()) == (b"second", [])
    write_file(inner, "m", [b"third"])
    for expected in (seen, None):
        with pytest.raises(DirectoryInUseError, match=rf"{store.name}/m: was written by somebody else"):
            store.replace("m", inner, expected)
    assert store.read("m") == b"second"


def test_a_manifest_that_changed_under_a_writer_is_not_replaced(s3_place):
    writer = headrace.Writer(s3_place, fields={"x": "int64"})
    writer.write({"x": 1})
    write_file(RemoteStore(s3_place), "headrace.json", [b"somebody else's"])
    with pytest.raises(DirectoryInUseError, match="headrace.json: was written by somebody else"):
        writer.close()
    assert RemoteStore(s3_place).read("headrace.json") == b"somebody else's"


def test_http_can_only_be_read(s3_server):
    store = RemoteStore(f"http://127.0.0.1:{s3_server.port}/tests")
    for write in (
        lambda: write_file(store, "x", [b""]),
        lambda: store.remove("x"),
        store.create,
        lambda: store.lock("a test").__enter__(),
    ):
        with pytest.raises(StorageError, match="can only be read over HTTP"):
            write()


# Builds

BUILD = """
import sys
import headrace
headrace.build(sys.argv[1], sys.argv[2], tokenizer="bytes", shard_bytes=4096, workers=1)
"""


@pytest.fixture
def texts(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 1000)
    return str(tmp_path / "*.txt")


def test_a_killed_build_goes_on_and_another_one_waits(s3_place, fault_proxy, texts, tmp_path):
    # The build stops at its third shard, and holds the lock.
    fault_proxy.add(Stall(), method="PUT", path=r"/\.build/new/shard-", skip=2)
    build = subprocess.Popen([sys.executable, "-c", BUILD, texts, s3_place])
    try:
        wait_for(lambda: sum("/.build/new/shard-" in request.path for request in fault_proxy.log) == 3, build)
        with pytest.raises(DirectoryInUseError, match=f"in use by headrace build, process {build.pid} on "):
            headrace.build(texts, s3_place, tokenizer="bytes", shard_bytes=4096, workers=1)
    finally:
        build.send_signal(signal.SIGKILL)
        build.wait()
        fault_proxy.clear()
    headrace.build(texts, s3_place, tokenizer="bytes", shard_bytes=4096, workers=1)
    headrace.build(texts, tmp_path / "reference", tokenizer="bytes", shard_bytes=4096, workers=1)
    names = sorted(path.name for path in (tmp_path / "reference").iterdir())
    store = RemoteStore(s3_place)
    assert store.files() == names
    assert all(store.read(name) == (tmp_path / "reference" / name).read_bytes() for name in names)
    assert not store.folder(".build").exists()


@pytest.mark.soak
def test_a_reader_never_sees_a_lie_while_builds_are_killed(s3_place, fault_proxy, texts, tmp_path):
    """A dataset is extended by builds that are killed after random numbers of requests."""
    random = np.random.default_rng(5)
    settings = {"tokenizer": "bytes", "shard_bytes": 4096, "workers": 1}
    headrace.build(texts, s3_place, **settings)
    outcomes = set()
    for trial in range(40):
        if trial % 8 == 0:
            (tmp_path / f"more {trial}.txt").write_text(f"more {trial} " * 2000)
        records = len(headrace.open(s3_place))
        fault_proxy.clear()
        build = subprocess.Popen([sys.executable, "-c", BUILD, texts, s3_place])
        most = int(random.integers(1, 140))
        while build.poll() is None and sum(fault_proxy.requests.values()) < most:
            time.sleep(0.001)
        build.kill()
        outcomes.add(build.wait())
        assert [verdict.problem for verdict in headrace.verify(s3_place) if verdict.problem] == []
        assert len(headrace.open(s3_place)) >= records
    assert outcomes == {0, -signal.SIGKILL}
    headrace.build(texts, s3_place, **settings)
    headrace.build(texts, tmp_path / "reference", **settings)
    assert len(headrace.open(s3_place)) == len(headrace.open(tmp_path / "reference"))
    store = RemoteStore(s3_place)
    named = {stored.file for stored in read_manifest(store).files}
    if store.has(".previous.json"):
        named |= {stored.file for stored in parse_manifest(store.read(".previous.json"), "before").files}
    assert set(store.files()) == named | {"headrace.json", ".previous.json"}
    assert not store.folder(".build").exists()
