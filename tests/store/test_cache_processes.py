"""Processes and threads that share a cache: turns, deaths, forks."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.store.cache import Cache, admission, files, locks, turns
from headrace.store.cache.admission import locked_size
from headrace.store.cache.locks import LockFile
from headrace.store.cache.upkeep import clear
from tests.store.cache_samples import GROUPS, UNIT_ON_DISK, has_unit, held_units, put_unit, unit_key

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

ROOT = Path(__file__).parents[2]
GROUP = GROUPS[0]
KEY = unit_key(0)


def kill_many(directory, kills, seed, environment):
    command = [sys.executable, "-m", "tests.store.cache_killing", directory, str(kills), str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kept")


def test_processes_that_are_killed_do_no_harm(tmp_path, child_environment):
    kill_many(tmp_path / "cache", 20, 1, child_environment)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_two_hundred_kills_do_no_harm(tmp_path, child_environment, seed):
    kill_many(tmp_path / "cache", 200, seed, child_environment)


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache", 100 * UNIT_ON_DISK)


def forked(work):
    """Run `work` in a forked child; the number of the child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_one_fetches_and_the_others_look_again(cache, monkeypatch):
    fetching, fetched = threading.Event(), threading.Event()
    waiting = threading.Semaphore(0)
    turns_taken = []

    def pauses_that_tell(seconds):
        for number, pause in enumerate(locks.pauses(seconds)):
            if number == 1:
                waiting.release()
            yield pause

    monkeypatch.setattr(turns, "pauses", pauses_that_tell)

    def fetch_first():
        with cache.fetching(GROUP, KEY) as ours:
            turns_taken.append(ours)
            fetching.set()
            fetched.wait()
            put_unit(cache, GROUP, 0)

    def fetch_later():
        fetching.wait()
        with cache.fetching(GROUP, KEY) as ours:
            turns_taken.append(ours)
            assert has_unit(cache, GROUP, 0)

    threads = [
        threading.Thread(target=fetch_first),
        *(threading.Thread(target=fetch_later) for _ in range(3)),
    ]
    for thread in threads:
        thread.start()
    fetching.wait()
    # Another thing is fetched meanwhile, whatever lock it meets at.
    for number in range(1, 600):
        with cache.fetching(GROUP, unit_key(number)) as ours:
            assert ours
    for _ in range(3):
        waiting.acquire()
    fetched.set()
    for thread in threads:
        thread.join()
    assert turns_taken == [True, False, False, False]


def test_a_dead_fetcher_is_not_waited_for(cache, pipe):
    def fetch_for_ever():
        with cache.fetching(GROUP, KEY):
            os.write(pipe[1], b".")
            signal.pause()

    child = forked(fetch_for_ever)
    os.read(pipe[0], 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with cache.fetching(GROUP, KEY) as ours:
        assert ours


def test_a_fetcher_that_never_ends_is_waited_for_only_so_long(cache, monkeypatch):
    monkeypatch.setattr(turns, "LONGEST_WAIT_SECONDS", 0.05)
    with cache.fetching(GROUP, KEY) as first, cache.fetching(GROUP, KEY) as second:
        assert (first, second) == (True, True)


def test_a_failed_fetch_lets_the_next_one_try(cache):
    with pytest.raises(ValueError, match="broken"), cache.fetching(GROUP, KEY):
        raise ValueError("broken")
    with cache.fetching(GROUP, KEY) as ours:
        assert ours


def test_a_child_that_is_forked_during_a_fetch_does_not_keep_the_lock(cache, pipe):
    with cache.fetching(GROUP, KEY):
        child = forked(lambda: os.read(pipe[0], 1))
    with cache.fetching(GROUP, KEY) as ours:
        assert ours
    os.write(pipe[1], b".")
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_of_a_killed_fetcher_does_not_keep_the_lock(cache, pipe):
    stay, go = os.pipe()

    def live_on():
        os.close(go)
        os.write(pipe[1], b".")
        os.read(stay, 1)

    def fetch_and_fork():
        with cache.fetching(GROUP, KEY):
            forked(live_on)
            signal.pause()

    child = forked(fetch_and_fork)
    os.read(pipe[0], 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # The child of the dead one still lives.
    free = []
    for path in cache.directory.locks.iterdir():
        with LockFile(path) as file:
            free.append(file.lock())
    os.close(go)
    os.close(stay)
    assert free == [True]


def test_a_file_that_is_being_written_is_counted_and_left_alone(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache", 2 * UNIT_ON_DISK)
    cache.for_dataset("data", [GROUP])
    written, go_on, admitted = threading.Event(), threading.Event(), []

    def write_slowly(descriptor, content):
        os.write(descriptor, content)
        written.set()
        go_on.wait()

    with monkeypatch.context() as slow:
        slow.setattr(files, "_write_fully", write_slowly)
        thread = threading.Thread(target=lambda: admitted.append(put_unit(cache, GROUP, 0)))
        thread.start()
        written.wait()
    clear(cache.directory)
    assert [put_unit(cache, GROUP, number) for number in (1, 2)] == [True, False]
    go_on.set()
    thread.join()
    assert admitted == [True]
    assert held_units(cache, GROUP) == [0, 1]


def test_a_forked_child_uses_the_cache_while_a_thread_of_the_parent_was_busy(cache, pipe):
    locked, go_on = threading.Event(), threading.Event()

    def be_busy():
        with locked_size(cache.directory, 60), cache.fetching(GROUP, KEY):
            locked.set()
            go_on.wait()

    def use():
        os.read(pipe[0], 1)
        assert put_unit(cache, GROUP, 1)
        assert held_units(cache, GROUP) == [1]

    thread = threading.Thread(target=be_busy)
    thread.start()
    locked.wait()
    child = forked(use)
    go_on.set()
    thread.join()
    os.write(pipe[1], b".")
    assert os.waitpid(child, 0)[1] == 0
    assert has_unit(cache, GROUP, 1)


def test_a_full_cache_makes_nobody_wait(tmp_path):
    cache = Cache(tmp_path / "cache", 10)
    assert not put_unit(cache, GROUP, 0)
    with cache.fetching(GROUP, KEY) as first, cache.fetching(GROUP, KEY) as second:
        assert (first, second) == (True, True)


def test_a_stopped_process_makes_nobody_wait_for_long(cache, monkeypatch):
    """While somebody else holds the size, others go on without caching."""
    monkeypatch.setattr(admission, "WAIT_SECONDS", 0.05)
    with LockFile(cache.directory.size) as file:
        assert file.lock()
        assert not put_unit(cache, GROUP, 0)
        assert not any(put_unit(cache, GROUP, number) for number in range(1, 3))
    assert any(put_unit(cache, GROUP, number) for number in range(10))


@pytest.mark.parametrize("by_clearing", [False, True])
def test_what_a_killed_writer_leaves_is_removed_and_not_counted(tmp_path, monkeypatch, by_clearing):
    def write_half_and_die(descriptor, content):
        os.write(descriptor, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    def be_killed():
        monkeypatch.setattr(files, "_write_fully", write_half_and_die)
        put_unit(cache, GROUP, 1)

    cache = Cache(tmp_path / "cache", 2 * UNIT_ON_DISK)
    cache.for_dataset("data", [GROUP])
    assert put_unit(cache, GROUP, 0)
    os.waitpid(forked(be_killed), 0)
    folder = cache.directory.data / GROUP
    (folder / ".tmp-mine").write_text("of somebody else")
    assert len([*folder.glob(".tmp-*")]) == 2
    if by_clearing:
        assert clear(cache.directory).freed_bytes == 0
        assert [path.name for path in folder.glob(".tmp-*")] == [".tmp-mine"]
    assert [put_unit(cache, GROUP, number) for number in (2, 3)] == [True, False]
    assert {path.name for path in folder.iterdir()} == {KEY, unit_key(2), ".tmp-mine"}
