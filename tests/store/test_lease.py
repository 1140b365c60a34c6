"""One writer at a time, where no kernel keeps a lock: a lease that is renewed, taken over, or lost."""

import signal
import subprocess
import sys
import time

import msgspec
import pytest

from headrace.errors import DirectoryInUseError, StorageError
from headrace.store.client import RemoteOptions
from headrace.store.lease import Note
from headrace.store.locks import LOCK_NAME
from headrace.store.remote import RemoteStore
from headrace.store.store import write_file
from tests.fault_proxy import Answer, Reset

DEADLINE_SECONDS = 90
QUICK = RemoteOptions(renew_seconds=0.05, lease_seconds=1)


def until(condition):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def note_in(store: RemoteStore) -> Note:
    return msgspec.json.decode(store.read(LOCK_NAME), type=Note)


def leave_lease(store: RemoteStore) -> None:
    """As a holder on another machine does that was killed."""
    note = Note("a dead one", 4, "elsewhere", "another machine", 0.0, "its token")
    write_file(store, LOCK_NAME, [msgspec.json.encode(note)])


HOLD = """
import sys, time
from headrace.store.address import open_store
with open_store(sys.argv[1]).lock("a test"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_holder_of_this_machine_is_no_obstacle(s3_place):
    store = RemoteStore(s3_place)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, s3_place], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        message = (
            rf"{s3_place}: in use by a test, process {holder.pid} on .*; wait .* its lease ends in \d+ s"
        )
        with pytest.raises(DirectoryInUseError, match=message):
            store.lock("mine").__enter__()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with store.lock("mine"):
        assert note_in(store).holder == "mine"
        assert store.files() == []
    assert not store.exists()


def test_a_lease_of_another_machine_ends_by_the_servers_clock(s3_place):
    store = RemoteStore(s3_place, QUICK)
    leave_lease(store)
    with pytest.raises(DirectoryInUseError, match="in use by a dead one, process 4 on elsewhere"):
        RemoteStore(s3_place).lock("mine").__enter__()

    def is_mine():
        try:
            with store.lock("mine"):
                return note_in(store).holder == "mine"
        except DirectoryInUseError:
            return False

    assert until(is_mine)
    assert not store.exists()


def test_a_lease_is_renewed(s3_place):
    store = RemoteStore(s3_place, QUICK)
    with store.lock("mine"):
        until(lambda: note_in(store).renewed >= 3)
        write_file(store.folder("inner"), "x", [b"content"])
    assert store.folder("inner").has("x")


def test_a_lost_lease_stops_the_next_write(s3_place):
    store = RemoteStore(s3_place, QUICK)
    inner = store.folder("inner")

    def loses():
        try:
            write_file(inner, "x", [b"content"])
        except StorageError as error:
            return str(error)
        return None

    with store.lock("mine"):
        # Somebody has thought that it is over: in the end, the two agree on who has it.
        leave_lease(RemoteStore(s3_place))
        message = until(loses)
        assert "the lease of this writer was lost" in message
        assert "do the same again to continue" in message
        with pytest.raises(StorageError, match="was lost"):
            store.remove("x")
    assert note_in(store).holder == "a dead one"


def test_somebody_elses_file_is_not_touched(s3_place):
    store = RemoteStore(s3_place)
    write_file(store, LOCK_NAME, [b"theirs"])
    with pytest.raises(StorageError, match=rf"{s3_place}/\.lock: is not a lock of Headrace"):
        store.lock("mine").__enter__()
    assert store.read(LOCK_NAME) == b"theirs"


def test_a_server_that_ignores_conditions_is_refused(fault_proxy, s3_place):
    fault_proxy.add(Answer(200, body=b""), method="PUT", path=r"\.lock$", skip=1)
    with pytest.raises(StorageError, match="ignores conditions of writes"):
        RemoteStore(s3_place).lock("mine").__enter__()
    assert not RemoteStore(s3_place).exists()


def test_lost_answers_and_faults_do_not_lose_the_lease(fault_proxy, s3_place):
    fault_proxy.add(Reset(after_server=True), method="PUT", path=r"\.lock$", count=1)
    store = RemoteStore(s3_place, RemoteOptions(renew_seconds=0.05))
    with store.lock("mine"):
        until(lambda: note_in(store).renewed >= 1)
        fault_proxy.add(Reset(after_server=True), method="PUT", path=r"\.lock$", count=1)
        fault_proxy.add(Answer(503, "SlowDown"), method="PUT", path=r"\.lock$", count=2)
        renewed = note_in(store).renewed
        until(lambda: note_in(store).renewed >= renewed + 3)
        write_file(store, "x", [b"content"])


def test_processes_hold_it_one_after_the_other(s3_place):
    source = """
import sys, time
from headrace.errors import DirectoryInUseError
from headrace.store.address import open_store
from headrace.store.store import write_file
store, done = open_store(sys.argv[1]), 0
while done < 3:
    try:
        with store.lock("a test"):
            assert not store.has("only")
            write_file(store, "only", [b""])
            assert store.has("only")
            store.remove("only")
            done += 1
    except DirectoryInUseError:
        time.sleep(0.01)
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", source, s3_place], stderr=subprocess.PIPE) for _ in range(2)
    ]
    for process in processes:
        _, problems = process.communicate(timeout=DEADLINE_SECONDS)
        assert (process.returncode, problems) == (0, b"")
    assert not RemoteStore(s3_place).exists()
