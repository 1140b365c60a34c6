"""The consumer, which is the same for every system: a loop with a step, one without, and one in which a worker dies.

Every loop reads rows that no loop before it has read, and reads to the end of what it has asked for: a dataset of Ray
that is left in the middle would go on, and take the processors of the next one.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from machine import cpu_seconds_of_each
from serve_rows import BATCH_SIZE, ROW_BYTES
from serve_system import System

STEP_SECONDS = 0.010
POLL_SECONDS = 0.02
GAP = 1000
"""So many batches lie between two loops. Headrace's servers make batches ahead of what a consumer takes and keep them:
a loop that went on where another ended would find them ready, and they would seem to cost nothing."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of batches."""

    few: int
    """Of a loop that shows how long the first one takes."""
    unmeasured: int
    """Before the clock starts. Ray makes some hundred batches before it hands out the first."""
    measured: int
    tail: int
    """After the clock has stopped: at the end of the data, workers run out of work."""
    killing: int
    killed_after: int
    patience_seconds: float
    """How long a batch may take after a worker has died, before the loop gives up."""

    @property
    def whole(self) -> int:
        return self.unmeasured + self.measured + self.tail


FULL = Sizes(
    few=16, unmeasured=300, measured=600, tail=100, killing=1000, killed_after=100, patience_seconds=30.0
)
QUICK = Sizes(few=4, unmeasured=5, measured=20, tail=5, killing=60, killed_after=15, patience_seconds=15.0)


@dataclass
class Received:
    """The numbers of the rows that came, in the order in which they came."""

    first: int
    """The number of the first batch that was asked for."""
    count: int
    rows: list[int] = field(default_factory=list)
    is_whole: bool = True
    """Whether every batch had the right shape."""

    def take(self, batch: Mapping[str, Any]) -> None:
        x = batch["x"]
        # Something of it is read, so that a batch which is made only when it is looked at is made.
        x[-1, -1]
        self.is_whole &= x.shape == (BATCH_SIZE, ROW_BYTES) and x.dtype == np.uint8
        self.rows.extend(batch["row"].tolist())

    @property
    def relative(self) -> list[int]:
        """The numbers as if the first batch had the number 0."""
        return [row - self.first * BATCH_SIZE for row in self.rows]

    @property
    def lost(self) -> int:
        return len(set(range(self.count * BATCH_SIZE)) - set(self.relative))

    @property
    def twice(self) -> int:
        return len(self.rows) - len(set(self.rows))

    @property
    def in_defined_order(self) -> bool:
        """That of the definition, in which numbers ascend by one; of what came."""
        return self.rows == sorted(self.rows)


class Consumer:
    """Reads one stretch of rows after the other."""

    def __init__(self, system: System, sizes: Sizes) -> None:
        self._system, self._sizes = system, sizes
        self._next = 0

    def first_batch_seconds(self) -> float:
        """From a new consumer to its first batch."""
        received = self._stretch(self._sizes.few)
        begun = time.perf_counter()
        batches = self._read(received)
        received.take(next(batches))
        passed = time.perf_counter() - begun
        for batch in batches:
            received.take(batch)
        return passed

    def loop(self, step_seconds: float) -> tuple[dict[str, float], Received]:
        """The figures of a loop whose step sleeps so long."""
        sizes, received = self._sizes, self._stretch(self._sizes.whole)
        batches = self._read(received)
        for _ in range(sizes.unmeasured):
            received.take(next(batches))
            _step(step_seconds)
        worked = 0.0
        all_before, own_cpu, begun = cpu_seconds_of_each(), time.process_time(), time.perf_counter()
        for _ in range(sizes.measured):
            received.take(next(batches))
            worked += _step(step_seconds)
        passed, own_passed = time.perf_counter() - begun, time.process_time() - own_cpu
        all_passed = _spent(all_before, cpu_seconds_of_each())
        for batch in batches:
            received.take(batch)
        figures = {
            "accelerator_share": worked / passed,
            "batches_per_second": sizes.measured / passed,
            "consumer_cpu_seconds_per_batch": own_passed / sizes.measured,
            "all_cpu_seconds_per_batch": all_passed / sizes.measured,
        }
        return figures, received

    def interrupted(self) -> dict[str, Any]:
        """What a loop with a step notices of a worker that is killed while it runs."""
        received = self._stretch(self._sizes.killing)
        reader = _Reader(self._read(received), received, self._sizes.killed_after)
        reader.start()
        reader.is_time_to_kill.wait()
        killed = self._system.kill_worker()
        killed_at = time.perf_counter()
        while reader.is_alive() and reader.silent_seconds() < self._sizes.patience_seconds:
            time.sleep(POLL_SECONDS)
        ended = not reader.is_alive() and reader.error is None
        after = [waited for at, waited in reader.waits if at > killed_at]
        before = [waited for at, waited in reader.waits[1:] if at <= killed_at]
        return {
            "killed": killed,
            "rows_lost": received.lost,
            "rows_twice": received.twice,
            "stalled_seconds": max(after, default=0.0),
            "longest_wait_before_seconds": max(before, default=0.0),
            "end_seconds": reader.end_seconds if ended else reader.silent_seconds(),
            "ended": ended,
            "raised": reader.error,
            "in_defined_order": received.in_defined_order,
        }

    def _stretch(self, count: int) -> Received:
        received = Received(self._next, count)
        self._next += count + GAP
        return received

    def _read(self, received: Received) -> Iterator[Mapping[str, Any]]:
        return self._system.batches(received.first, received.count)


class _Reader(threading.Thread):
    """A loop with a step, in a thread: a system whose worker has died may never give another batch."""

    def __init__(self, batches: Iterator[Mapping[str, Any]], received: Received, killed_after: int) -> None:
        super().__init__(daemon=True)
        self._batches, self._received, self._killed_after = batches, received, killed_after
        self.is_time_to_kill = threading.Event()
        self.waits: list[tuple[float, float]] = []
        """When a batch came, and how long the loop had waited for it."""
        self.end_seconds = 0.0
        self.error: str | None = None
        self._asked = time.perf_counter()

    def run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"[:200]
        finally:
            self.is_time_to_kill.set()

    def _loop(self) -> None:
        self._asked = time.perf_counter()
        for batch in self._batches:
            now = time.perf_counter()
            self.waits.append((now, now - self._asked))
            self._received.take(batch)
            if len(self.waits) == self._killed_after:
                self.is_time_to_kill.set()
            _step(STEP_SECONDS)
            self._asked = time.perf_counter()
        self.end_seconds = time.perf_counter() - self._asked

    def silent_seconds(self) -> float:
        """How long it has been waiting for a batch, or for the end."""
        return time.perf_counter() - self._asked


def _spent(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Processor time of all processes that still run. What a system has ended since is left out: it is counted by
    nobody until its parent asks for it."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def _step(seconds: float) -> float:
    """A step of the accelerator, and how long it took."""
    begun = time.perf_counter()
    if seconds:
        time.sleep(seconds)
    return time.perf_counter() - begun
