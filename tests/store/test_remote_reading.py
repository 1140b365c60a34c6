"""Reading from a real S3 server through a proxy that injects faults: right bytes, or a clear error."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingsError, StorageError
from headrace.store.client import RemoteOptions
from headrace.store.remote import RemoteStore
from headrace.store.store import write_file
from tests.fault_proxy import Answer, FaultProxy, Flip, Hold, Reset, Stall, Truncate
from tests.properties import examples

CONTENT = np.random.default_rng(1).integers(0, 256, 200_000, np.uint8).tobytes()
IMPATIENT = RemoteOptions(read_seconds=1.0, retry_seconds=120)


@pytest.fixture
def store(fault_proxy: FaultProxy, s3_place: str) -> RemoteStore:
    store = RemoteStore(s3_place, IMPATIENT)
    write_file(store, "x", [CONTENT])
    fault_proxy.clear()
    return store


PASSING_FAULTS = {
    "503 three times": (Answer(503, "SlowDown"), 3),
    "429": (Answer(429, "TooManyRequests"), 2),
    "500": (Answer(500, "InternalError"), 1),
    "502 without XML": (Answer(502, body=b"bad gateway"), 1),
    "504": (Answer(504), 1),
    "400 of a timeout": (Answer(400, "RequestTimeout"), 1),
    "a cut body": (Truncate(1000), 2),
    "a head without a body": (Truncate(0), 1),
    "no answer": (Stall(), 1),
    "a body that stalls": (Stall(1000), 1),
    "a reset": (Reset(), 2),
    "an ignored range": (Answer(200, body=CONTENT), 1),
    "another range": (Answer(206, body=CONTENT[7:107], headers={"Content-Range": "bytes 7-106/200000"}), 1),
    "a short body": (
        Answer(206, body=CONTENT[100:150], headers={"Content-Range": "bytes 100-149999/200000"}),
        1,
    ),
    "fewer bytes": (Answer(206, body=CONTENT[:50], headers={"Content-Range": "bytes 0-199999/200000"}), 1),
}


@pytest.mark.parametrize("fault", PASSING_FAULTS)
def test_bytes_are_right_after_faults_that_pass(store, fault_proxy, fault):
    injected, count = PASSING_FAULTS[fault]
    fault_proxy.add(injected, method="GET", count=count)
    assert store.fetch("x", 100, 150_000) == CONTENT[100:150_000]
    assert fault_proxy.requests == {"GET": count + 1}
    assert store.read("x") == CONTENT


def test_repeated_requests_draw_nothing_from_random(store, fault_proxy):
    """They are made in threads of their own: programs with a seed would draw other numbers from run to run."""
    fault_proxy.add(Answer(503, "SlowDown"), method="GET", count=2)
    before = random.getstate()
    assert store.fetch("x", 0, 10) == CONTENT[:10]
    assert fault_proxy.requests == {"GET": 3}
    assert random.getstate() == before


@pytest.mark.parametrize("fault", ["503 three times", "a reset", "a cut body"])
def test_listings_and_statuses_survive_faults_too(store, fault_proxy, fault):
    injected, count = PASSING_FAULTS[fault]
    fault_proxy.add(injected, count=count)
    assert store.files() == ["x"]
    fault_proxy.clear()
    if not isinstance(injected, Truncate):
        fault_proxy.add(injected, count=count)
    assert store.status("x").bytes == len(CONTENT)


QUICK_FAULTS = [
    "500",
    "429",
    "a cut body",
    "a head without a body",
    "a reset",
    "another range",
    "fewer bytes",
]


@pytest.fixture(scope="module")
def through_a_proxy(s3_server):
    """A store and its proxy, for many examples."""
    with pytest.MonkeyPatch.context() as patch, FaultProxy(s3_server.port) as proxy:
        for name, value in s3_server.environment(proxy.endpoint).items():
            patch.setenv(name, value)
        store = RemoteStore("s3://tests/examples of ranges", IMPATIENT)
        write_file(store, "x", [CONTENT])
        yield store, proxy


@given(
    start=st.integers(0, len(CONTENT) - 1),
    count=st.integers(1, 100_000),
    faults=st.lists(st.sampled_from(QUICK_FAULTS), max_size=2),
)
@examples(15)
def test_any_range_is_right_after_any_faults(through_a_proxy, start, count, faults):
    store, proxy = through_a_proxy
    stop = min(start + count, len(CONTENT))
    proxy.clear()
    for fault in faults:
        proxy.add(PASSING_FAULTS[fault][0], method="GET", count=1)
    assert store.fetch("x", start, stop) == CONTENT[start:stop]
    assert store.read("x", start, count) == CONTENT[start : start + count]


def test_a_server_that_is_gone_for_a_while(store, fault_proxy):
    fault_proxy.refuse()
    back = threading.Timer(1.0, fault_proxy.accept)
    back.start()
    assert store.fetch("x", 0, 10) == CONTENT[:10]
    back.join()


@pytest.mark.soak
def test_a_server_that_is_gone_for_twenty_seconds(s3_place, fault_proxy):
    store = RemoteStore(s3_place)
    write_file(store, "x", [CONTENT])
    fault_proxy.refuse()
    back = threading.Timer(20.0, fault_proxy.accept)
    back.start()
    assert store.fetch("x", 0, 10) == CONTENT[:10]
    back.join()


def test_a_server_that_does_not_come_back(fault_proxy, s3_place):
    store = RemoteStore(s3_place, RemoteOptions(retry_seconds=0.5))
    fault_proxy.refuse()
    with pytest.raises(StorageError) as caught:
        store.fetch("x", 0, 10)
    assert f"{s3_place}/x: cannot be read: the connection was refused" in str(caught.value)
    assert "check the network and the endpoint" in str(caught.value)


def test_a_host_without_an_address(s3_place, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid:1")
    store = RemoteStore(s3_place, RemoteOptions(retry_seconds=0.2))
    with pytest.raises(StorageError, match="the host's name cannot be resolved"):
        store.read("x")


def test_a_retry_budget_from_the_environment(s3_place, monkeypatch):
    monkeypatch.setenv("HEADRACE_RETRY_SECONDS", "7.5")
    assert RemoteStore(s3_place).options.retry_seconds == 7.5
    monkeypatch.setenv("HEADRACE_RETRY_SECONDS", "soon")
    with pytest.raises(SettingsError, match="HEADRACE_RETRY_SECONDS=soon: must be a number of seconds"):
        RemoteStore(s3_place)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(403, "AccessDenied"), "the server answered 403 AccessDenied: check the credentials"),
        (Answer(403, "ExpiredToken"), "the credentials have expired, and asking for new ones gave none"),
        (Answer(400, "ExpiredToken"), "the credentials have expired"),
        (Answer(403, "SignatureDoesNotMatch"), "the secret key does not belong to the access key"),
        (Answer(403, "RequestTimeTooSkewed"), "the clock of this machine differs too much"),
        (Answer(301, "PermanentRedirect"), "the bucket is in another region"),
        (Answer(400, "AuthorizationHeaderMalformed"), "set AWS_REGION to the bucket's region"),
        (Answer(400, "InvalidArgument"), "the server answered 400 InvalidArgument"),
        (Answer(501, "NotImplemented"), "the server answered 501 NotImplemented"),
    ],
)
def test_what_does_not_pass_is_an_error_at_once(store, fault_proxy, answer, message):
    fault_proxy.add(answer)
    with pytest.raises(StorageError) as caught:
        store.fetch("x", 0, 10)
    assert f"{store.name}/x: cannot be read: " in str(caught.value)
    assert message in str(caught.value)
    assert fault_proxy.requests == {"GET": 1}


def test_an_object_that_is_not_there(store, fault_proxy):
    for ask in (store.read, store.status, store.view, lambda file: store.fetch(file, 0, 1)):
        fault_proxy.clear()
        with pytest.raises(FileNotFoundError, match=f"{store.name}/y: no such object; check the spelling"):
            ask("y")
        assert sum(fault_proxy.requests.values()) == 1


@pytest.mark.parametrize("method", ["read", "status", "has", "files", "exists", "create"])
def test_a_bucket_that_is_not_there(s3_environment, method):
    store = RemoteStore("s3://no-such-bucket/prefix")
    arguments = ["x"] if method in ("read", "status", "has") else []
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/prefix.*: there is no such bucket"):
        getattr(store, method)(*arguments)


def test_a_server_that_never_follows_ranges_is_refused(store, fault_proxy):
    fault_proxy.add(Answer(200, body=CONTENT))
    with pytest.raises(StorageError, match="sent other bytes than it was asked for"):
        store.fetch("x", 5, 10)
    assert fault_proxy.requests == {"GET": 3}


def test_a_file_that_ends_too_early(store):
    with pytest.raises(StorageError, match="has 200000 bytes, but bytes 199999 to 200001 of it are needed"):
        store.fetch("x", 199_999, 200_001)
    with pytest.raises(StorageError, match="has 200000 bytes"):
        store.fetch("x", 300_000, 300_001)


def test_a_slow_answer_is_asked_for_twice(fault_proxy, s3_place):
    store = RemoteStore(s3_place, RemoteOptions(hedge_seconds=0.05))
    write_file(store, "x", [CONTENT])
    for _ in range(20):
        store.fetch("x", 0, 100_000)
    fault_proxy.clear()
    release = threading.Event()
    fault_proxy.add(Hold(release), method="GET", count=1)
    assert store.fetch("x", 0, 100_000) == CONTENT[:100_000]
    assert fault_proxy.requests == {"GET": 2}
    release.set()


def test_each_operation_is_one_request(store, fault_proxy):
    write_file(store, "empty", [])
    fault_proxy.clear()
    for ask in (
        lambda: store.fetch("x", 3, 9),
        lambda: store.head("x", 100),
        lambda: store.read("x"),
        lambda: store.read("x", 5, 10),
        lambda: store.view("x"),
        lambda: store.status("x"),
        lambda: store.has("x"),
        lambda: store.has("y"),
        lambda: store.stamp("x"),
        store.files,
        store.exists,
    ):
        fault_proxy.clear()
        ask()
        assert sum(fault_proxy.requests.values()) == 1
    assert (store.read("empty"), store.head("empty", 9), store.view("empty").size) == (b"", (b"", 0), 0)


def test_many_threads_fetch_at_once(store, fault_proxy):
    fault_proxy.add(Answer(503, "SlowDown"), method="GET", skip=10, count=10)
    fault_proxy.latency_seconds = 0.02
    bounds = [(start, start + 2000) for start in range(0, 198_000, 2000)]
    with ThreadPoolExecutor(8) as threads:
        fetched = list(threads.map(lambda bound: bytes(store.fetch("x", *bound)), bounds))
    assert b"".join(fetched) == CONTENT[:198_000]
    assert fault_proxy.most_in_flight > 1


def test_a_large_file_is_read_in_ranges_and_only_what_failed_again(store, fault_proxy, monkeypatch):
    monkeypatch.setattr("headrace.store.objects.READ_BYTES", 1_000_000)
    large = CONTENT * 12
    write_file(store, "large", [large])
    fault_proxy.clear()
    fault_proxy.add(Truncate(100_000), method="GET", skip=1, count=1)
    assert store.view("large").tobytes() == large
    assert fault_proxy.requests == {"GET": 4}


def test_a_flipped_byte_comes_through_the_proxy(store, fault_proxy):
    """What finds it are the checks of whoever knows what the bytes should be."""
    fault_proxy.add(Flip(5), method="GET")
    fetched = bytes(store.fetch("x", 100, 200))
    assert [at for at in range(100) if fetched[at] != CONTENT[100 + at]] == [5]


def test_bandwidth_is_limited_and_bytes_are_counted(s3_server, s3_place, monkeypatch):
    with FaultProxy(s3_server.port, bytes_per_second=2e6) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = RemoteStore(s3_place)
        write_file(store, "x", [CONTENT])
        began = time.monotonic()
        for _ in range(5):
            store.fetch("x", 0, len(CONTENT))
        assert time.monotonic() - began >= 0.2
        assert proxy.sent_bytes["GET"] >= 4 * len(CONTENT)


STALLED = """
import sys
from headrace.store.address import open_store
open_store(sys.argv[1]).fetch("x", 0, 1)
"""


def test_an_interrupt_ends_a_read_at_once(store, fault_proxy):
    fault_proxy.add(Stall(), method="GET")
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", STALLED, store.name]
    reader = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not fault_proxy.requests["GET"]:
            assert reader.poll() is None
            time.sleep(0.02)
        reader.send_signal(signal.SIGINT)
        _, said = reader.communicate(timeout=90)
    finally:
        reader.kill()
        reader.wait()
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert fault_proxy.requests == {"GET": 1}


def in_fork(run: Callable[[], bool]) -> bool:
    """What a forked process finds."""
    child = os.fork()
    if not child:
        signal.alarm(60)  # a hang ends the child
        try:
            os._exit(7 if run() else 8)
        finally:
            os._exit(9)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (7, 8)
    return code == 7


def test_a_forked_process_reads(store):
    """It must not use the connections that it has inherited: the answers of two processes would get mixed."""
    assert store.fetch("x", 0, 1) == CONTENT[:1]

    def reads() -> bool:
        return all(store.fetch("x", 9 * i, 9 * i + 5) == CONTENT[9 * i : 9 * i + 5] for i in range(20))

    assert in_fork(reads)
    assert store.fetch("x", 5, 9) == CONTENT[5:9]
    assert in_fork(reads)


def test_a_forked_process_refuses_at_once_what_the_library_would_do(store):
    assert store.files() == ["x"]

    def refuses() -> bool:
        try:
            store.files()
        except StorageError as error:
            return "spawn" in str(error) and "worker_kind" in str(error)
        return False

    assert in_fork(refuses)
    assert store.files() == ["x"]
