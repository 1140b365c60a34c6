"""What a loop could leave behind: threads, open files, child processes, shared memory with a name.

Only what this process itself has is looked at, and only what is new: other tests may run beside this one, and what an
earlier one left may go while this one runs.
"""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

Thing = tuple[str, int, str]


def things_here() -> set[Thing]:
    found: set[Thing] = set()
    for thread in threading.enumerate():
        if thread.name.startswith("headrace-"):
            found.add(("thread", thread.ident or 0, thread.name))
    for child in psutil.Process().children(recursive=True):
        found.add(("process", child.pid, "also if dead and nobody asked for its exit code"))
    for number, target in open_files().items():
        found.add(("file", number, target))
    for path in named_memory(os.getpid()):
        found.add(("shared memory", 0, path))
    return found


def open_files() -> dict[int, str]:
    files = {}
    for number in os.listdir("/proc/self/fd"):
        # The listing's own is gone by now.
        with contextlib.suppress(OSError):
            files[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return files


def named_memory(pid: int) -> set[str]:
    """Shared memory that others could find by its name, and that a process which is killed would leave."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    before = things_here()
    yield
    if things_here() - before:
        gc.collect()
    assert things_here() - before == set()
