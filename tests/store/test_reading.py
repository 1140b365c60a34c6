"""The ways to read an object give the same answers: our own requests, addresses signed by the library, the library."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from headrace.errors import StorageError
from headrace.store.client import Client, RemoteOptions
from headrace.store.reading import DirectReading, LibraryReading, Reading
from headrace.store.remote import RemoteStore
from headrace.store.s3 import LibrarySigner, S3Requests
from headrace.store.store import write_file
from tests.fault_proxy import Answer, FaultProxy, Hold, Truncate

CONTENT = np.random.default_rng(1).integers(0, 256, 100_000, np.uint8).tobytes()
WAYS = ["own", "signed by the library", "library"]


def reading_by(way: str, client: Client) -> Reading:
    if way == "library":
        return LibraryReading(client._library_read_store(), client._latencies)
    return DirectReading(S3Requests(LibrarySigner(client._presign), client._connections), client._latencies)


@pytest.fixture(params=WAYS)
def store(
    request: pytest.FixtureRequest,
    fault_proxy: FaultProxy,
    s3_place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> RemoteStore:
    if request.param != "own":
        monkeypatch.setattr(Client, "_choose_reading", lambda client: reading_by(request.param, client))
    # Options of its own: clients are shared by those that have the same.
    index = WAYS.index(request.param)
    store = RemoteStore(
        s3_place, RemoteOptions(hedge_seconds=0.05, read_seconds=20, retry_seconds=100 + index)
    )
    write_file(store, "a b+c%=ü.txt", [CONTENT])
    fault_proxy.clear()
    return store


NAME = "a b+c%=ü.txt"


def test_ranges_and_statuses(store: RemoteStore) -> None:
    for start, stop in ((0, 1), (5, 70_000), (99_999, 100_000), (0, 100_000)):
        assert store.fetch(NAME, start, stop) == CONTENT[start:stop]
    assert store.read(NAME, 99_000, 5000) == CONTENT[99_000:]
    assert store.read(NAME, 200_000, 10) == b""
    assert store.status(NAME).bytes == 100_000
    assert store.head(NAME, 10) == (CONTENT[:10], 100_000)
    with pytest.raises(StorageError, match="has 100000 bytes, but"):
        store.fetch(NAME, 90_000, 100_001)
    with pytest.raises(FileNotFoundError, match=r"missing\.txt: no such object"):
        store.fetch("missing.txt", 0, 10)
    assert not store.has("missing.txt")


def test_stamps_are_those_of_writes(store: RemoteStore) -> None:
    before = store.stamp(NAME)
    assert before == store.stamp(NAME)
    expected = store._objects.put("other", b"1")
    assert store.stamp("other") == expected
    assert store._objects.put_expecting("other", b"2", expected) == store.stamp("other") != expected


def test_faults(store: RemoteStore, fault_proxy: FaultProxy) -> None:
    for fault in (Answer(503, "SlowDown"), Truncate(1000), Answer(200, body=CONTENT)):
        fault_proxy.add(fault, method="GET", count=1)
        assert store.fetch(NAME, 10, 50_000) == CONTENT[10:50_000]
    fault_proxy.add(Answer(403, "AccessDenied"), method="GET")
    with pytest.raises(StorageError, match="403 AccessDenied: check the credentials"):
        store.fetch(NAME, 0, 10)


def test_expired_credentials_are_renewed(
    store: RemoteStore, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.store.credentials.CredentialProvider.renew", lambda provider: True)
    fault_proxy.add(Answer(400, "ExpiredToken"), method="GET", count=1)
    assert store.fetch(NAME, 0, 10) == CONTENT[:10]
    assert fault_proxy.requests["GET"] == 2


def test_a_slow_answer_is_asked_for_twice(store: RemoteStore, fault_proxy: FaultProxy) -> None:
    for _ in range(30):
        store.fetch(NAME, 0, 50)
    release = threading.Event()
    fault_proxy.add(Hold(release), method="GET", count=1)
    assert store.fetch(NAME, 0, 50) == CONTENT[:50]
    release.set()


def test_a_file_that_is_replaced_while_it_is_read(
    store: RemoteStore, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.store.objects.READ_BYTES", 10_000)
    assert store.read(NAME) == CONTENT
    fault_proxy.add(Answer(412, "PreconditionFailed"), method="GET", skip=5, count=1)
    with pytest.raises(StorageError, match="was replaced while it was read"):
        store.read(NAME)


def test_a_server_that_does_not_tell_a_size(s3_place: str, fault_proxy: FaultProxy) -> None:
    store = RemoteStore(s3_place)
    write_file(store, "x", [b"1234"])
    fault_proxy.add(Answer(200, headers={"Content-Length": "5, 5"}), method="HEAD")
    with pytest.raises(StorageError, match="no size of the object"):
        store.status("x")


def test_a_missing_object_with_a_name_like_a_service_for_credentials(s3_place: str) -> None:
    assert not RemoteStore(s3_place).folder("latest").folder("meta-data").has("x")
    assert not RemoteStore(s3_place).has("performing GET http:__169.254.1.1")


ENDS_EARLY = """
import sys, threading
from headrace.store.client import Client, RemoteOptions
from headrace.store.fetching import fetching
from headrace.store.reading import LibraryReading
from headrace.store.remote import RemoteStore
if sys.argv[2] == "library":
    Client._choose_reading = lambda client: LibraryReading(client._library_read_store(), client._latencies)
store = RemoteStore(sys.argv[1])
store.fetch("x", 0, 1)
pending = [fetching().ahead(lambda: store.fetch("x", 0, 3_000_000)) for _ in range(20)]
for each in pending[: int(sys.argv[3])]:
    each.result()
print("end")
"""


@pytest.mark.parametrize("way", ["own", "library"])
def test_a_process_may_end_while_requests_are_under_way(
    way: str, s3_place: str, fault_proxy: FaultProxy
) -> None:
    write_file(RemoteStore(s3_place), "x", [CONTENT * 30])
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", ENDS_EARLY, s3_place, way]
    for done in (0, 3, 7):
        run = subprocess.run([*command, str(done)], capture_output=True, text=True, env=dict(os.environ))
        assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")
