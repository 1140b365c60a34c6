"""Waiting for what has to happen, however long a busy machine takes; and a clock that a test holds.

No test waits for a time and hopes. A deadline is so far away that only a failure gets there.
"""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest

from headrace.workers import prefetch, process
from headrace.workers.stacks import current_frames

PATIENCE_SECONDS = 90
NEVER_SECONDS = 600
"""As a setting of what is tested: later than any test may take. What comes of it has not come by the timeout."""


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.005)


def wait_for_file(path: Path) -> None:
    wait_until(path.exists, f"{path.name} is there")


def has_ended(pid: int) -> bool:
    """Also if nobody has asked for its exit code yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids: Iterable[int]) -> None:
    left = list(pids)
    wait_until(lambda: all(map(has_ended, left)), f"processes {left} have ended")


def loading_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("headrace-")}


_WAITING = {("wait", threading.__file__), (prefetch.wait.__name__, prefetch.__file__)}
"""Functions in which a thread waits for another."""


def wait_until_nothing_moves(threads: Iterable[threading.Thread]) -> None:
    """Until each has done all that it can do by itself: it has ended, or waits for a condition or an event."""
    listed = list(threads)

    def nothing_moves() -> bool:
        frames = current_frames()
        now = [frames[thread.ident].f_code for thread in listed if thread.ident in frames]
        return all((code.co_name, code.co_filename) in _WAITING for code in now)

    wait_until(nothing_moves, "the threads have nothing left to do")


class HeldClock:
    """The clock by which a crew's deadlines are reckoned: it stands still until the test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._events: list[tuple[Path, float]] = []
        self._seconds = 0.0
        self._leaps: list[tuple[Path, float]] = []
        monkeypatch.setattr(process, "clock", self)

    def __call__(self) -> float:
        self._seconds += sum(seconds for path, seconds in self._leaps if path.exists())
        return self._seconds + sum(seconds for path, seconds in self._events if path.exists())

    def advance(self, seconds: float) -> None:
        self._seconds += seconds

    def advance_when_there_is(self, path: Path, seconds: float) -> None:
        """So much later once a worker has left that file, to say how far it is."""
        self._events.append((path, seconds))

    def leap_once_there_is(self, path: Path, seconds: float) -> None:
        """So much later at every look, from when a worker has left that file on: what it said before may still be on
        its way by then, and makes no difference."""
        self._leaps.append((path, seconds))
