import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import DirectoryInUseError, StorageError
from headrace.store.files import atomic_file, read_head, remove_leftovers, write_atomic
from headrace.store.local import LocalStore
from headrace.store.locks import directory_lock
from headrace.store.maps import expect_random_reads, map_bytes, read_bytes
from headrace.store.store import write_file


@pytest.fixture
def child(child_environment):
    """Run Python source in a child process; `wait_for` waits for a line, and leaves the child running."""
    started = []

    def run(source, *arguments, wait_for=None):
        process = subprocess.Popen(
            [sys.executable, "-c", source, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment,
        )
        started.append(process)
        if wait_for:
            line = process.stdout.readline().strip()
            assert line == wait_for, line + process.stderr.read()
            return process
        out, problems = process.communicate(timeout=90)
        assert process.returncode == 0, problems
        return out

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_file_appears_whole_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "a"
    write_atomic(path, [b"one", memoryview(b"two")])
    assert path.read_bytes() == b"onetwo"
    with atomic_file(path) as pending:
        pending.file.write(b"new")
        pending.file.flush()
        assert path.read_bytes() == b"onetwo"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


def test_a_file_may_get_its_name_at_the_end(tmp_path):
    with atomic_file(tmp_path / "a") as pending:
        pending.name = "a-123"
    assert names(tmp_path) == ["a-123"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_a_failure_leaves_no_trace(tmp_path, error):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail():
        with atomic_file(path) as pending:
            pending.file.write(b"new")
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == ["a"]
    assert path.read_bytes() == b"old"


def test_threads_may_write_the_same_name_at_once(tmp_path):
    path, together = tmp_path / "a", threading.Barrier(4, timeout=90)

    def write(letter):
        with atomic_file(path) as pending:
            together.wait()
            pending.file.write(letter * 100_000)
            together.wait()

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c", b"d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = path.read_bytes()
    assert len(content) == 100_000
    assert len(set(content)) == 1
    assert names(tmp_path) == ["a"]


def test_a_killed_writer_leaves_the_old_file_and_a_leftover(tmp_path, child):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    source = """
import sys, time
from pathlib import Path
from headrace.store.files import atomic_file
with atomic_file(Path(sys.argv[1])) as pending:
    pending.file.write(b"new" * 100_000)
    pending.file.flush()
    print("half", flush=True)
    time.sleep(600)
"""
    kill(child(source, path, wait_for="half"))
    assert path.read_bytes() == b"old"
    left = [name for name in names(tmp_path) if name.startswith(".tmp-")]
    assert len(left) == 1
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["a"]


FILL = """
import resource, signal, sys
from pathlib import Path
from headrace.errors import StorageError
from headrace.store.files import write_atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
path = Path(sys.argv[1]) / "a"
try:
    write_atomic(path, (bytes(1_000_000) for _ in range(int(sys.argv[3]))))
except StorageError as error:
    print(error)
"""


def test_a_full_disk_is_a_storage_error_and_leaves_the_old_file(tmp_path, child):
    (tmp_path / "a").write_bytes(b"old")
    message = child(FILL, tmp_path, 2_500_000, 5)
    assert str(tmp_path / "a") in message
    assert os.strerror(errno.EFBIG) in message
    assert "free some space" in message
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.skipif(sys.platform != "linux", reason="needs a place that nobody can write to")
def test_a_place_that_cannot_be_written_to_is_a_storage_error():
    with pytest.raises(
        StorageError, match=r"/proc/a: cannot be written: .*; choose a place that you can write to"
    ):
        write_atomic(Path("/proc/a"), [b"x"])
    with pytest.raises(StorageError, match="cannot be written"):
        LocalStore("/proc").remove("version")
    with pytest.raises(StorageError, match="cannot be locked"):
        LocalStore("/proc").lock("a test").__enter__()


@pytest.fixture
def read_only_disk(small_disk):
    (small_disk / "a").write_bytes(b"old")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    return small_disk


@pytest.mark.skipif(sys.platform != "linux", reason="mounts tmpfs")
def test_a_read_only_disk(read_only_disk):
    place = LocalStore(read_only_disk)
    for use in (lambda: write_file(place, "b", [b"x"]), lambda: place.remove("a"), place.folder("c").create):
        with pytest.raises(StorageError, match=os.strerror(errno.EROFS)):
            use()


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting tmpfs is not possible here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts tmpfs")
def test_a_really_full_disk(small_disk, child):
    (small_disk / "a").write_bytes(b"old")
    assert os.strerror(errno.ENOSPC) in child(FILL, small_disk, 0, 5)
    assert names(small_disk) == ["a"]
    assert (small_disk / "a").read_bytes() == b"old"
    assert child(FILL, small_disk, 0, 1) == ""
    assert (small_disk / "a").stat().st_size == 1_000_000


HOLD = """
import sys, time
from pathlib import Path
from headrace.store.local import LocalStore
from headrace.store.locks import directory_lock
with directory_lock(Path(sys.argv[1]), "a test"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_is_held_by_one_process_and_names_it(tmp_path, child):
    holder = child(HOLD, tmp_path, wait_for="held")
    with pytest.raises(DirectoryInUseError, match=rf"in use by a test, process {holder.pid}") as caught:
        directory_lock(tmp_path, "mine").__enter__()
    assert isinstance(caught.value, BlockingIOError)
    kill(holder)
    with directory_lock(tmp_path, "mine"):  # the dead holder's file is no obstacle
        assert (tmp_path / ".lock").read_text().rstrip() == f"mine, process {os.getpid()}"
    assert names(tmp_path) == []


def test_a_lock_is_held_against_the_same_process_too(tmp_path):
    with directory_lock(tmp_path, "first"), pytest.raises(DirectoryInUseError, match="first, process"):
        directory_lock(tmp_path, "second").__enter__()
    with directory_lock(tmp_path, "third"):
        pass


def test_no_two_processes_hold_a_lock_at_once(tmp_path, child):
    source = """
import os, sys
from pathlib import Path
from headrace.errors import DirectoryInUseError
from headrace.store.local import LocalStore
from headrace.store.locks import directory_lock
directory, done = Path(sys.argv[1]), 0
while done < 40:
    try:
        with directory_lock(directory, "a test"):
            os.mkdir(directory / "only")  # fails if another holder is inside
            os.rmdir(directory / "only")
            done += 1
    except DirectoryInUseError:
        pass
print("done", flush=True)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", source, tmp_path], stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    for process in processes:
        out, problems = process.communicate(timeout=90)
        assert (out, problems) == (b"done\n", b"")
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_locked_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="cannot be locked: No such file"):
        directory_lock(tmp_path / "absent", "mine").__enter__()


@pytest.mark.parametrize("read", [map_bytes, read_bytes])
@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 40])
def test_content_is_whole_and_read_only_for_good(tmp_path, read, content):
    path = tmp_path / "a"
    path.write_bytes(content)
    array = read(path)
    assert array.dtype == np.uint8
    assert array.tobytes() == content
    for view in (array, array[:1], array[1:].view(np.int8)):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_a_map_is_of_the_file_and_outlives_its_name(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"before")
    array = map_bytes(path)
    with open(path, "r+b") as file:
        file.write(b"behind")
    assert array.tobytes() == b"behind"
    part = array[2:4]
    del array
    path.unlink()
    assert part.tobytes() == b"hi"


def test_reading_what_is_not_a_file(tmp_path):
    for read in (map_bytes, read_bytes, lambda path: read_head(path, 5)):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "absent")
        with pytest.raises(StorageError, match="cannot be read: Is a directory"):
            read(tmp_path)


def test_read_head_never_asks_for_more_than_there_is(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_head(path, 3) == (b"123", 5)
    assert read_head(path, 2**62) == (b"12345", 5)


def test_maps_need_no_descriptors_and_are_given_back(tmp_path, child):
    (tmp_path / "a").write_bytes(bytes(10_000))
    source = """
import os, resource, sys
from pathlib import Path
from headrace.store.maps import map_bytes
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
path = Path(sys.argv[1])
def mapped():
    maps = Path("/proc/self/maps")
    return maps.read_text().count(str(path)) if maps.exists() else None
maps = [map_bytes(path) for _ in range(1500)]
views = [array[9_999:] for array in maps]
assert mapped() in (1500, None), mapped()
del maps
assert sum(int(view[0]) for view in views) == 0
assert mapped() in (1500, None), mapped()
del views
assert mapped() in (0, None), mapped()
print("fine")
"""
    assert child(source, tmp_path / "a") == "fine\n"


def test_a_map_that_does_not_fit_is_a_storage_error(tmp_path, child):
    path = Path(tmp_path / "a")
    with open(path, "wb") as file:
        file.truncate(2**33)
    source = """
import resource, sys
from pathlib import Path
from headrace.errors import StorageError
from headrace.store.maps import map_bytes
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
try:
    map_bytes(Path(sys.argv[1]))
except StorageError as error:
    print(error)
"""
    assert "cannot be memory-mapped: Cannot allocate memory" in child(source, path)


def test_a_map_can_be_told_to_expect_random_reads(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 1000)
    mapped = map_bytes(path)
    expect_random_reads(mapped[100:200_000].view(np.uint16)[3:])
    address = mapped.ctypes.data
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags:")
    entry = next(
        flags.splitlines()[0]
        for block, flags in zip(blocks, blocks[1:], strict=False)
        if f"{address:x}-" in block.split("\n", 2)[1] or f"{address:x}-" in block
    )
    assert " rr" in entry
    assert mapped[256 * 500] == 0
    expect_random_reads(np.arange(10))
