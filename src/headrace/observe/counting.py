"""What the stages of a loader spend, counted where it happens.

    begun = now()
    ...                             # gather a batch
    spent("gather", begun)          # counted for the loader that this thread works for, if it works for one

A thread says once which loader it works for (`working_for`); the code that it calls need not know. Each thread counts
for itself, so counting takes no lock; a reader adds the threads up. Worker processes record what they spend and send
it with their results (`Counters.take`), on the clock that all processes of a machine share.

Stages do not include each other's time: what is counted inside `counted_as` is left out of it.

    read 10 ms, of which collate 3 ms       ->  collate 3, read 7
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from headrace.fork_lock import fork_lock
from headrace.observe.stats import FetchStats, LoaderStats, QueueStats, StageStats

now = time.perf_counter_ns
"""Nanoseconds; on Linux and macOS the same clock in all processes."""


class StageSpan(NamedTuple):
    """A stage at work, once: on the clock of `now`."""

    stage: str
    begun: int
    ended: int
    spent: int
    """Less than from `begun` to `ended` if other stages ran inside."""
    lane: str
    """Who did it: a thread or a worker process."""


Spent = tuple[list[tuple[str, int, int]], list[tuple[Any, ...]], tuple[int, ...]]
"""What a worker process sends: stages with their counts and nanoseconds, the latest spans as plain tuples, and what it
has fetched, as the numbers of FetchStats."""
NOTHING_FETCHED = tuple(FetchStats())


class _Tally:
    """What one thread has counted: how often, and nanoseconds, by stage."""

    def __init__(self, thread: threading.Thread | None) -> None:
        self.thread, self.lane, self.total = thread, thread.name if thread else "", 0
        self.stages: dict[str, list[int]] = {}

    def entry(self, stage: str) -> list[int]:
        """The entry of a stage: how often, and nanoseconds."""
        entry = self.stages.get(stage)
        if entry is None:
            entry = self.stages[stage] = [0, 0]
        return entry

    def count(self, stage: str, spent: int) -> None:
        entry = self.entry(stage)
        entry[0] += 1
        entry[1] += spent


class Counters:
    """The counters of one loader, over all its iterations."""

    def __init__(self, spans: int | None = None) -> None:
        """`spans`: how many of the latest spans to keep, for `take` or a timeline."""
        self._own = threading.local()
        self.loop = _Tally(None)
        """The loop's own tally, in whichever thread it runs: there is one loop at a time."""
        self._tallies: list[_Tally] = [self.loop]
        self._queues: dict[str, list[int]] = {}
        self._adding = fork_lock()
        self.batches = self.rows = 0
        self.fetched = FetchStats()
        """What worker processes have fetched."""
        self.workers = 0
        """How many threads or processes make batches alongside the loop."""
        self.spans: deque[StageSpan] | None = None if spans is None else deque(maxlen=spans)

    def keep(self, spans: int | None) -> None:
        """From now on, keep this many of the latest spans, or none."""
        if (self.spans is not None) != (spans is not None):
            self.spans = None if spans is None else deque(maxlen=spans)

    def add(self, stage: str, begun: int, ended: int, inside: int = 0) -> None:
        """Count a stage of this thread, without the time `inside` that other stages have counted."""
        tally, spent = self._tally(), ended - begun - inside
        tally.total += spent
        tally.count(stage, spent)
        spans = self.spans
        if spans is not None:
            spans.append(StageSpan(stage, begun, ended, spent, tally.lane))

    def add_rest(self, stage: str, begun: int, counted: int) -> None:
        """Count what this thread has spent since `begun` and not yet counted; `counted` is its `counted()` then."""
        self.add(stage, begun, now(), inside=self._tally().total - counted)

    def counted(self) -> int:
        """All nanoseconds that this thread has counted."""
        return self._tally().total

    def _tally(self) -> _Tally:
        try:
            tally: _Tally = self._own.tally
        except AttributeError:
            tally = self._own.tally = _Tally(threading.current_thread())
            with self._adding:
                self._tallies.append(tally)
        return tally

    def see_queue(self, name: str, waiting: int, capacity: int) -> None:
        """Record how many batches were waiting when the loop asked for one. Called by the loop's thread only."""
        entry = self._queues.get(name)
        if entry is None:
            entry = self._queues[name] = [0, 0, 0, 0, 0]
        entry[0] += 1
        entry[1] += waiting
        entry[2] += not waiting
        # It may have held more before, with more threads.
        entry[3], entry[4] = max(entry[3], capacity, waiting), waiting

    def take(self) -> Spent:
        """All that was counted since the last call, to be sent to another process. Called by the thread that counts."""
        totals = []
        for stage, entry in self._tally().stages.items():
            if entry[0]:
                totals.append((stage, entry[0], entry[1]))
                entry[0] = entry[1] = 0
        spans = self.spans
        latest = [tuple(spans.popleft()) for _ in range(len(spans))] if spans else []
        fetched, self.fetched = tuple(self.fetched), FetchStats()
        return totals, latest, fetched

    def receive(self, sent: Spent, lane: str) -> None:
        """Add what a worker process has sent."""
        (totals, spans, fetched), tally, kept = sent, self._tally(), self.spans
        if any(fetched):
            self.fetched = self.fetched.plus(FetchStats(*fetched))
        for stage, count, spent in totals:
            entry = tally.entry(stage)
            entry[0] += count
            entry[1] += spent
        if kept is not None:
            kept.extend(
                StageSpan(stage, begun, ended, spent, lane) for stage, begun, ended, spent, _ in spans
            )

    def stats(self) -> LoaderStats:
        with self._adding:
            self._tallies = _without_dead(self._tallies)
            tallies = list(self._tallies)
        stages: dict[str, list[int]] = {}
        for tally in tallies:
            # A copy: its thread may add another stage meanwhile.
            for stage, (count, spent) in dict(tally.stages).items():
                entry = stages.setdefault(stage, [0, 0])
                entry[0], entry[1] = entry[0] + count, entry[1] + spent
        queues = {
            name: QueueStats(seen=seen, waiting=total, empty=empty, capacity=capacity, latest=latest)
            for name, (seen, total, empty, capacity, latest) in dict(self._queues).items()
        }
        return LoaderStats(
            batches=self.batches,
            rows=self.rows,
            workers=self.workers,
            stages={name: StageStats(count, spent / 1e9) for name, (count, spent) in stages.items() if count},
            queues=queues,
            fetched=self.fetched,
        )


def _without_dead(tallies: list[_Tally]) -> list[_Tally]:
    """Add up the tallies of threads that have ended, in one of them: each epoch may have threads of its own."""
    dead = [tally for tally in tallies if tally.thread is not None and not tally.thread.is_alive()]
    if len(dead) < 2:
        return tallies
    for tally in dead[1:]:
        for stage, (count, spent) in tally.stages.items():
            entry = dead[0].entry(stage)
            entry[0], entry[1] = entry[0] + count, entry[1] + spent
    return [tally for tally in tallies if tally not in dead[1:]]


class Counted:
    """A loader that counts what its stages spend, over all its iterations; a copy of it starts at zero."""

    _counted: Counters | None = None

    @property
    def counters(self) -> Counters:
        if self._counted is None:
            self._counted = Counters()
        return self._counted

    def stats(self) -> LoaderStats:
        """What each stage has spent so far, how long the loop waited, and how full the queues were."""
        return self.counters.stats()


class _Here(threading.local):
    counters: Counters | None = None


_here = _Here()


@contextmanager
def working_for(counters: Counters) -> Iterator[None]:
    """Inside, what this thread spends is counted in `counters`."""
    before, _here.counters = _here.counters, counters
    try:
        yield
    finally:
        _here.counters = before


def spent(stage: str, begun: int) -> None:
    """Count a stage of this thread that began at `begun` and ends now."""
    counters = _here.counters
    if counters is not None:
        counters.add(stage, begun, now())


class counted_as:  # noqa: N801 - read as a word: `with counted_as("read"):`
    """Count the time inside as this stage, without what other stages count inside; even if it fails."""

    __slots__ = ("_begun", "_counted", "_counters", "_stage")

    def __init__(self, stage: str) -> None:
        self._stage, self._counters = stage, _here.counters

    def __enter__(self) -> None:
        if self._counters is not None:
            self._counted, self._begun = self._counters.counted(), now()

    def __exit__(self, *_: object) -> None:
        if self._counters is not None:
            self._counters.add_rest(self._stage, self._begun, self._counted)


class Watch:
    """Times the loop of one iteration: it waits in `next`, and runs its step in between.

    with watch: batch = ...       # the loop's thread, working for the loader
    """

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._wait, self._step = counters.loop.entry("wait"), counters.loop.entry("step")
        self._lane = threading.current_thread().name
        self._handed = 0

    def __enter__(self) -> None:
        begun, handed = now(), self._handed
        if handed:
            self._step[0] += 1
            self._step[1] += begun - handed
            if (spans := self.counters.spans) is not None:
                spans.append(StageSpan("step", handed, begun, begun - handed, self._lane))
            self._handed = 0
        self._before, _here.counters = _here.counters, self.counters
        self._begun = begun

    def __exit__(self, kind: Any, *_: object) -> None:
        begun, ended = self._begun, now()
        _here.counters = self._before
        self._wait[0] += 1
        self._wait[1] += ended - begun
        if (spans := self.counters.spans) is not None:
            spans.append(StageSpan("wait", begun, ended, ended - begun, self._lane))
        if kind is None:
            self.counters.batches += 1
            self._handed = ended
