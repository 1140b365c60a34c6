"""A timeline of a loader: who did what when, for https://ui.perfetto.dev and chrome://tracing.

    loop (MainThread)       wait --------- step ----- wait - step -----
                               transport -
    worker 0                read -------- transport  read ---------
                                 collate

The file is JSON in Chrome's trace event format. A lane is a thread or a worker process; a stage that ran inside another
one is drawn below it. Times are microseconds since recording began, on a clock that all processes of a machine share.
"""

import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headrace.errors import SettingsError, StorageError
from headrace.measure.watching.watched import Watched, counts_itself
from headrace.observe.counting import Counters, StageSpan, now
from headrace.observe.stats import LOOP
from headrace.store.address import local_path
from headrace.store.files import write_atomic

MAX_SPANS = 200_000
_QUEUE_NANOSECONDS = 1_000_000
"""Queues are looked at no more often than this."""
_CHUNK_EVENTS = 1000

QueueDepths = tuple[int, dict[str, int]]
"""When the queues were looked at, and how many batches waited in each."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def trace(loader: Any, path: str | os.PathLike[str], *, max_spans: int = MAX_SPANS) -> Iterator[Watched]:
    """Record what the loader does, and write a timeline to `path` at the end, even if the loop fails.

    Iterate over the object that this returns, or over `loader` itself if it is one of Headrace's. The latest
    `max_spans` pieces of work are kept, about 150 bytes each in memory and in the file.
    """
    watched = Watched(loader)
    recording = Recording(watched, path, max_spans=max_spans)
    try:
        yield watched
    except BaseException:
        # The user must see this error, not one about a full disk.
        with _logged(recording.path):
            recording.finish()
        raise
    recording.finish()


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception:
        _log.exception("%s: the timeline could not be written", path)


class Recording:
    """Records from when it is created until `finish()`."""

    def __init__(self, loader: Any, path: str | os.PathLike[str], *, max_spans: int = MAX_SPANS) -> None:
        if type(max_spans) is not int or max_spans < 1:
            raise SettingsError(f"max_spans={max_spans!r}: must be an integer of at least 1")
        self.path = local_path(path)
        _check_place(self.path)
        self.loader: Any = loader if counts_itself(loader) else Watched(loader)
        """What to iterate over."""
        self._counters: Counters = self.loader.counters
        if self._counters.spans is not None and self._counters.spans.maxlen:
            raise SettingsError(f"{path}: this loader is already being recorded; finish that recording first")
        self._process, self._finished = os.getpid(), False
        self._begun = now()
        self._spans = self._counters.spans = _Spans(self._counters, max_spans)

    def finish(self) -> None:
        """Stop recording and write the file. Does nothing the second time, or in a fork of the process."""
        if self._finished or os.getpid() != self._process:
            return
        self._finished = True
        # Not None, since a thread may be about to append; whatever it appends here is dropped.
        self._counters.spans = deque(maxlen=0)
        spans = self._spans
        if len(spans) == spans.maxlen:
            _log.warning(
                "%s: the beginning is missing: only the last %d pieces of work were kept; max_spans sets that number",
                self.path,
                len(spans),
            )
        write_atomic(self.path, _chunks(trace_events(list(spans), list(spans.depths), self._begun)))


class _Spans(deque[StageSpan]):
    """The latest spans, and how full the queues were whenever the loop received a batch."""

    def __init__(self, counters: Counters, most: int) -> None:
        super().__init__(maxlen=most)
        self._counters, self._next = counters, 0
        self.depths: deque[QueueDepths] = deque(maxlen=most)

    def append(self, span: StageSpan) -> None:
        super().append(span)
        if span.stage == "wait" and span.ended >= self._next:
            self._next = span.ended + _QUEUE_NANOSECONDS
            queues = self._counters.stats().queues
            if queues:
                self.depths.append((span.ended, {name: queue.latest for name, queue in queues.items()}))


def _check_place(path: Path) -> None:
    """Check this now rather than after hours of training."""
    if path.is_dir():
        raise SettingsError(f"{path}: this is a directory; give the name of a file, such as trace.json")
    if not path.parent.is_dir():
        raise SettingsError(
            f"{path}: the directory {path.parent} does not exist; create it, or choose another"
        )
    if not os.access(path.parent, os.W_OK):
        raise StorageError(
            f"{path}: no permission to write to {path.parent}; choose a directory that you can write to"
        )


def trace_events(
    spans: Iterable[StageSpan], depths: Iterable[QueueDepths] = (), begun: int = 0
) -> Iterator[dict[str, Any]]:
    """The events of a timeline; spans that began before `begun` are left out."""
    process = os.getpid()
    yield _named("process_name", process, 0, "headrace")
    recorded = [span for span in spans if span.begun >= begun]
    for number, (name, track) in enumerate(_named_tracks(recorded), 1):
        yield _named("thread_name", process, number, name)
        order = {"name": "thread_sort_index", "ph": "M", "pid": process, "tid": number}
        yield {**order, "args": {"sort_index": number}}
        for span in track:
            yield _complete(span, begun, process, number)
    for when, waiting in depths:
        if when >= begun:
            yield from _depth_events(when - begun, waiting, process)


def _named_tracks(spans: Iterable[StageSpan]) -> Iterator[tuple[str, list[StageSpan]]]:
    """The tracks of all lanes, those of the loop first; the second track of a lane is called '<lane> 2'."""
    lanes: dict[str, list[StageSpan]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    for lane in sorted(lanes, key=lambda lane: (not _is_loop(lanes[lane]), lane)):
        name = f"loop ({lane})" if _is_loop(lanes[lane]) else lane
        for number, track in enumerate(_tracks(lanes[lane]), 1):
            yield (name if number == 1 else f"{name} {number}"), track


def _depth_events(nanoseconds: int, waiting: dict[str, int], process: int) -> Iterator[dict[str, Any]]:
    for queue, count in waiting.items():
        event = {"name": f"queue: {queue}", "cat": "queue", "ph": "C", "ts": nanoseconds / 1e3}
        yield {**event, "pid": process, "tid": 0, "args": {"batches": count}}


def _named(kind: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": lane, "args": {"name": name}}


def _complete(span: StageSpan, begun: int, process: int, lane: int) -> dict[str, Any]:
    return {
        "name": span.stage,
        "cat": "loop" if span.stage in LOOP else "making",
        "ph": "X",
        "ts": (span.begun - begun) / 1e3,
        "dur": (span.ended - span.begun) / 1e3,
        "pid": process,
        "tid": lane,
        # Without the stages inside.
        "args": {"own_ms": span.spent / 1e6},
    }


def _is_loop(spans: list[StageSpan]) -> bool:
    return any(span.stage in LOOP for span in spans)


def _tracks(spans: list[StageSpan]) -> list[list[StageSpan]]:
    """In viewers, the spans of a track must follow one another or be nested. Two iterations at once may have threads or
    workers of the same name, so spans that overlap go to another track.

    [0, 4] [1, 2] [3, 6]  ->  [0, 4] [1, 2]  and  [3, 6]
    """
    tracks: list[list[StageSpan]] = []
    open_ends: list[list[int]] = []
    for span in sorted(spans, key=lambda span: (span.begun, -span.ended)):
        for track, ends in zip(tracks, open_ends, strict=True):
            while ends and ends[-1] <= span.begun:
                ends.pop()
            if not ends or span.ended <= ends[-1]:
                track.append(span)
                ends.append(span.ended)
                break
        else:
            tracks.append([span])
            open_ends.append([span.ended])
    return tracks


def _chunks(events: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    yield b'{"displayTimeUnit": "ms", "traceEvents": [\n'
    written, lines = 0, []
    for event in events:
        lines.append(json.dumps(event))
        if len(lines) == _CHUNK_EVENTS:
            yield (",\n" * (written > 0) + ",\n".join(lines)).encode()
            written, lines = written + len(lines), []
    yield (",\n" * (written > 0 and bool(lines)) + ",\n".join(lines)).encode()
    yield b"\n]}\n"
