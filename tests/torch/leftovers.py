"""What a DataLoader could leave behind, and waiting for what comes by itself."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from headrace.workers.stacks import current_frames

PATIENCE_SECONDS = 90
"""Longer than anything takes, on a machine that does other things too; less than the limit of a test."""


def wait_until(condition: Callable[[], Any], why: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.001)


def is_alive(pid: int) -> bool:
    """Not if it has ended and nobody has asked how."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("DataLoader")}


def open_files() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            # The one that this listing was made with.
            continue
    return found


def shared_memory() -> set[str]:
    """Shared memory with a name. Semaphores of multiprocessing belong to other tests that run beside this one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def mapped_segments() -> int:
    """How many segments of workers this process has in its memory."""
    with open("/proc/self/maps") as maps:
        return sum("headrace" in line for line in maps)


def anonymous_memory() -> int:
    """Bytes that are in no file: what is one's own of files changes when other processes that map them end."""
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))
    return 1024 * int(kilobytes)


def leftovers() -> set[str]:
    return {
        *(f"process {process.pid}" for process in psutil.Process().children(recursive=True)),
        *(f"thread {thread.name}, {thread.ident}" for thread in worker_threads()),
        *(f"open file {file}" for file in open_files()),
        *(f"shared memory {name}" for name in shared_memory()),
    }


def is_receiving(thread: threading.Thread) -> bool:
    """Whether it is where a DataLoader waits for its workers."""
    frame = current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "receive":
            return True
        frame = frame.f_back
    return False
