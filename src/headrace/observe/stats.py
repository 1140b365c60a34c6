"""What a loader has done so far: how long the loop waited, which stage was busy, how full the queues were.

Waiting is the time in which the loop has asked for a batch and does not have it yet, whatever the reason: workers that
start, batches that are made late, or batches that the loop's own thread makes. All views and commands mean this, and
use the functions here: the share is that of the loop's time, which is its waiting and its steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LOOP = ("start", "wait", "step")
"""What the loop itself does, one stage after the other; all other stages make batches."""
SERVER_QUEUE = "server queue"
"""The stage in which a request waits until a server has time for it: no work, however long it takes."""
WAITING_SHARE = 0.10
"""Less waiting is not worth mentioning: MLPerf Storage asks for an accelerator that is busy 90 % of the time."""


def waiting_share(waited_seconds: float, step_seconds: float) -> float:
    """The share of its time in which a loop waited; 0 before its first batch."""
    whole = waited_seconds + step_seconds
    return waited_seconds / whole if whole > 0 else 0.0


def _counted(count: int, thing: str, things: str) -> str:
    return f"{count:,} {thing if count == 1 else things}"


def is_waiting(share: float) -> bool:
    """Whether a loop waits so much that it is worth mentioning."""
    return share >= WAITING_SHARE


def headroom_share(waited_share: float, loop_seconds: float, step_seconds: float) -> float:
    """How much less time a step of the loop would take with a loader that costs nothing.

    `step_seconds` is the time of a step without any loader, measured after the loop, when the machine may be busier
    than before. So the headroom is at least what is known to be the loader's: the waiting.
    """
    saved = 1 - step_seconds / loop_seconds if loop_seconds > 0 else 0.0
    return max(saved, waited_share)


@dataclass(frozen=True)
class StageStats:
    count: int
    seconds: float
    """Of all threads and processes together."""

    def since(self, earlier: "StageStats") -> "StageStats":
        return StageStats(self.count - earlier.count, self.seconds - earlier.seconds)

    def to_json(self) -> dict[str, Any]:
        return {"count": self.count, "seconds": self.seconds}


@dataclass(frozen=True)
class QueueStats:
    """How many batches were waiting when the loop asked for one."""

    seen: int
    waiting: int
    """The sum over all times that the queue was looked at."""
    empty: int
    capacity: int
    """The most that it could hold at any of these times; it changes with the number of threads."""
    latest: int

    @property
    def mean(self) -> float:
        return self.waiting / self.seen if self.seen else 0.0

    @property
    def empty_share(self) -> float:
        return self.empty / self.seen if self.seen else 0.0

    def since(self, earlier: "QueueStats") -> "QueueStats":
        return QueueStats(
            seen=self.seen - earlier.seen,
            waiting=self.waiting - earlier.waiting,
            empty=self.empty - earlier.empty,
            capacity=self.capacity,
            latest=self.latest,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "mean": self.mean,
            "empty_share": self.empty_share,
            "capacity": self.capacity,
            "latest": self.latest,
        }


class FetchStats(NamedTuple):
    """What was read from object stores, and what the cache has spared. A tuple: workers send one with every batch."""

    requests: int = 0
    bytes: int = 0
    cached_bytes: int = 0
    repeated: int = 0
    """How many requests brought wrong bytes and were made again."""

    def plus(self, other: "FetchStats") -> "FetchStats":
        return FetchStats(*(a + b for a, b in zip(self, other, strict=True)))

    def since(self, earlier: "FetchStats") -> "FetchStats":
        return FetchStats(*(a - b for a, b in zip(self, earlier, strict=True)))

    @property
    def cached_share(self) -> float:
        """The share of the bytes that came from the cache."""
        whole = self.bytes + self.cached_bytes
        return self.cached_bytes / whole if whole else 0.0

    def __str__(self) -> str:
        text = f"{self.requests:,} requests, {self.bytes / 1e6:,.1f} MB fetched, {self.cached_share:.0%} from the cache"
        return f"{text}, {self.repeated:,} repeated because of wrong bytes" if self.repeated else text


class ServerStats(NamedTuple):
    """What a server has done for this loader."""

    state: str = "down"
    answers: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """From the request to the answer, added up over all answers."""
    late: int = 0
    """Answers that were late, so that another server was asked as well."""
    faults: int = 0
    """How often it was lost, was silent, or failed."""
    owes: int = 0
    """How many answers it owes now."""
    slots: int = 0
    """How many batches it makes at the same time."""

    def since(self, earlier: "ServerStats") -> "ServerStats":
        if self.answers < earlier.answers:
            # It was left and met again, and is counted from there.
            return self
        return self._replace(
            answers=self.answers - earlier.answers,
            bytes=self.bytes - earlier.bytes,
            seconds=self.seconds - earlier.seconds,
            late=self.late - earlier.late,
            faults=self.faults - earlier.faults,
        )

    @property
    def latency(self) -> float:
        """How long an answer takes on average, in seconds."""
        return self.seconds / self.answers if self.answers else 0.0

    def __str__(self) -> str:
        return (
            f"{self.state}, {_counted(self.answers, 'batch', 'batches')}, {self.bytes / 1e6:,.1f} MB, "
            f"{1e3 * self.latency:,.1f} ms each, {self.late:,} late, {_counted(self.faults, 'fault', 'faults')}"
        )


@dataclass(frozen=True)
class LoaderStats:
    """What happened since the loader was made; `stats.since(earlier)` is what happened in between."""

    batches: int = 0
    rows: int = 0
    """Rows handed out, if the loader knows them."""
    workers: int = 0
    """Threads or processes that make batches alongside the loop."""
    stages: Mapping[str, StageStats] = field(default_factory=dict)
    queues: Mapping[str, QueueStats] = field(default_factory=dict)
    fetched: FetchStats = field(default_factory=FetchStats)
    """What came over the network; all zero for local data."""
    servers: Mapping[str, ServerStats] = field(default_factory=dict)
    """The servers that make batches for this loader."""

    def seconds(self, stage: str) -> float:
        found = self.stages.get(stage)
        return found.seconds if found else 0.0

    @property
    def wait_share(self) -> float:
        """The share of the loop's time in which it waited for workers to start or for a batch; 0 before the first."""
        return waiting_share(self.seconds("start") + self.seconds("wait"), self.seconds("step"))

    @property
    def loop_seconds(self) -> float:
        return sum(self.seconds(stage) for stage in LOOP)

    @property
    def busiest(self) -> str | None:
        """The stage that took the most time of those that make batches."""
        making = {
            name: stage.seconds
            for name, stage in self.stages.items()
            if name not in LOOP and name != SERVER_QUEUE
        }
        return max(making, key=making.__getitem__) if making else None

    @property
    def _explains_waiting(self) -> bool:
        """Whether some stage was at work for most of the time in which the loop waited. While worker processes start,
        for example, no stage is."""
        making = sum(stage.seconds for name, stage in self.stages.items() if name not in LOOP)
        return making >= self.seconds("wait") / 2

    @property
    def verdict(self) -> str:
        """One sentence on whether the loop waits, and for what."""
        if not self.batches:
            return "no batch was handed out"
        share = f"{self.wait_share:.0%} of its time"
        if not is_waiting(self.wait_share):
            return f"the loop waits {share}, which is little: batches are usually ready"
        if self.seconds("start") > self.seconds("wait"):
            return f"the loop waits {share}, mostly for workers to start"
        if self.busiest is None:
            return f"the loop waits {share}"
        if not self._explains_waiting:
            return f"the loop waits {share}, mostly while no batch was being made, as when workers start"
        return f"the loop waits {share}; the busiest stage is {self.busiest!r}"

    def since(self, earlier: "LoaderStats") -> "LoaderStats":
        stages = earlier.stages
        queues = earlier.queues
        return LoaderStats(
            batches=self.batches - earlier.batches,
            rows=self.rows - earlier.rows,
            workers=self.workers,
            stages={name: now.since(stages.get(name, _NO_STAGE)) for name, now in self.stages.items()},
            queues={name: now.since(queues.get(name, _NO_QUEUE)) for name, now in self.queues.items()},
            fetched=self.fetched.since(earlier.fetched),
            servers={
                name: now.since(earlier.servers.get(name, ServerStats()))
                for name, now in self.servers.items()
            },
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "rows": self.rows,
            "workers": self.workers,
            "wait_share": self.wait_share,
            "busiest": self.busiest,
            "verdict": self.verdict,
            "stages": {name: stage.to_json() for name, stage in self.stages.items()},
            "queues": {name: queue.to_json() for name, queue in self.queues.items()},
            "fetched": self.fetched._asdict(),
            "servers": {name: server._asdict() for name, server in self.servers.items()},
        }

    def __str__(self) -> str:
        whole = self.loop_seconds
        workers = _counted(self.workers, "worker", "workers") if self.workers else "no workers"
        if self.servers:
            workers = _counted(len(self.servers), "server", "servers")
        batches = "1 batch" if self.batches == 1 else f"{self.batches:,} batches"
        lines = [f"{batches}, {workers}: {self.verdict}"]
        room = max([10, *map(len, self.stages)])
        for name, stage in sorted(self.stages.items(), key=lambda item: -item[1].seconds):
            each = 1e3 * stage.seconds / self.batches if self.batches else 0.0
            share = f"{stage.seconds / whole:5.0%} of the loop's time" if whole else ""
            lines.append(
                f"  {name:<{room}} {stage.seconds:9.3f} s  {each:9.3f} ms per batch  {share}".rstrip()
            )
        for name, queue in self.queues.items():
            lines.append(
                f"  queue {name!r}: {queue.mean:.1f} of {queue.capacity} waiting, empty {queue.empty_share:.0%}"
            )
        if self.fetched != FetchStats():
            lines.append(f"  network: {self.fetched}")
        lines += [f"  server {name}: {server}" for name, server in self.servers.items()]
        return "\n".join(lines)


_NO_STAGE = StageStats(0, 0.0)
_NO_QUEUE = QueueStats(0, 0, 0, 0, 0)
