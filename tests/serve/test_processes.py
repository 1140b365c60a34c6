"""RemoteLoaders and processes: forks, ends of programs, and what is left when a Loader is gone."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.serve.worker import Served
from tests.serve import served
from tests.serve.servers import ThreadServer, thread_server

ROOT = Path(__file__).parents[2]
BEGINNING = """
import os, sys, threading, time
import headrace

loader = headrace.RemoteLoader(sys.argv[1])
iterator = iter(loader)
next(iterator)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    with thread_server(Served(loader=served.records()), tmp_path_factory.mktemp("processes")) as server:
        yield server


def run(server: ThreadServer, scheme: str, code: str) -> list[str]:
    """What a program prints that ends well, without a word on its standard error."""
    address = server.unix if scheme == "unix" else server.grpc
    command = [sys.executable, "-c", BEGINNING + code, address]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.splitlines()


@pytest.mark.parametrize("scheme", ["unix", "grpc"])
def test_a_program_may_end_at_any_time(server: ThreadServer, scheme: str) -> None:
    assert run(server, scheme, "print('the end')") == ["the end"]


FORK = """
child = os.fork()
if not child:
    for attempt in (lambda: next(iterator), lambda: sum(1 for _ in headrace.RemoteLoader(sys.argv[1]))):
        try:
            print(attempt())
        except headrace.HeadraceError as error:
            print(error)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(sum(1 for _ in iterator))
"""


def test_forks(server: ThreadServer) -> None:
    """In a forked process, an iteration of its parent says so; a new one works, but not with Arrow Flight."""
    begun, count, rest = run(server, "unix", FORK)
    assert "this iteration was started in another process" in begun
    assert (int(count), int(rest)) == (served.ROWS // 8, served.ROWS // 8 - 1)
    begun, refused, rest = run(server, "grpc", FORK)
    assert "this iteration was started in another process" in begun
    assert "cannot be used in a process that was forked" in refused
    assert int(rest) == served.ROWS // 8 - 1


CLOSED = """
import gc
from headrace.serve.fleet import Fleet

def fleets():
    gc.collect()
    return sum(isinstance(each, Fleet) for each in gc.get_objects())

def descriptors():
    return len(os.listdir("/proc/self/fd"))

before = None
for _ in range(6):
    loader.rows(range(8))
    loader.close()
    before = before or (fleets(), descriptors())
assert (fleets(), descriptors()) <= before, (fleets(), descriptors(), before)
print("nothing is left")
"""


@pytest.mark.parametrize("scheme", ["unix", "grpc"])
def test_nothing_is_left_of_closed_connections(server: ThreadServer, scheme: str) -> None:
    assert run(server, scheme, CLOSED)[-1] == "nothing is left"


TAKING_PART = """
both = headrace.RemoteLoader(sys.argv[1], local="tests.serve.served:records", local_workers=1)
print(sum(1 for _ in both))
"""


def test_a_program_whose_machine_takes_part_ends_without_a_word(server: ThreadServer) -> None:
    assert run(server, "unix", TAKING_PART) == [str(served.ROWS // 8)]


GONE = """
del iterator
before = threading.active_count(), len(os.listdir("/proc/self/fd"))
for _ in range(4):
    another = headrace.RemoteLoader(sys.argv[1])
    next(iter(another))
    del another
deadline = time.monotonic() + 120
while (threading.active_count(), len(os.listdir("/proc/self/fd"))) > before:
    assert time.monotonic() < deadline
    time.sleep(0.02)
print("nothing is left")
"""


def test_nothing_is_left_of_a_loader(server: ThreadServer) -> None:
    assert run(server, "unix", GONE) == ["nothing is left"]
