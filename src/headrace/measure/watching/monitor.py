"""A training loop watched while it runs.

    with headrace.monitor(loader) as watched:
        for batch in watched:
            step(batch)

On a terminal, a picture is drawn below the script's own output; elsewhere, a line is written now and then. Both go to
standard error, from a thread that reads what the loader counts anyway.
"""

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

from headrace.errors import SettingsError
from headrace.measure import clock
from headrace.measure.running.resources import CpuSeconds, cpu_seconds
from headrace.measure.watching.live import (
    LiveView,
    Picture,
    can_draw,
    count_of_batches,
    duration,
    one_line,
    picture_of,
    rate,
)
from headrace.measure.watching.prometheus import MetricsServer
from headrace.measure.watching.repeating import Repeating
from headrace.measure.watching.trace import trace as tracing
from headrace.measure.watching.watched import Watched, counts_itself
from headrace.observe.stats import LoaderStats

LIVE_SECONDS, LINES_SECONDS = 0.5, 10.0
_LEAST_SECONDS = 0.25
_WINDOW_SECONDS = 5.0
"""Rates cover this many seconds, or more if no batch came in that time."""
_CPU_SECONDS = 2.0
"""How often CPU time is read, which means looking at every process on the machine."""
_STALL_SECONDS = 5.0
_SAMPLES = 240
_HISTORY = 60


class View(StrEnum):
    AUTO = "auto"
    LIVE = "live"
    LINES = "lines"
    OFF = "off"


@contextlib.contextmanager
def monitor(
    loader: Any,
    *,
    every_seconds: float | None = None,
    view: str = "auto",
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
    trace: str | os.PathLike[str] | None = None,
) -> Iterator[Watched]:
    """Show how fast the loop goes, how much of it is waiting, and for what. Iterate over the object that this
    returns, or over `loader` itself if it is one of Headrace's.

    `every_seconds` defaults to half a second on a terminal and ten seconds elsewhere. `view`: "live" draws,
    "lines" writes lines, "off" does neither, and "auto" draws on a terminal and writes lines elsewhere.
    `metrics_port`: serve metrics for Prometheus on this port; 0 chooses a free port, see `watched.metrics_port`.
    `trace`: write a timeline to this file at the end.
    """
    chosen = _parse_view(view)
    if every_seconds is not None and not every_seconds >= _LEAST_SECONDS:
        raise SettingsError(f"every_seconds={every_seconds}: must be at least {_LEAST_SECONDS}")
    with contextlib.ExitStack() as stack:
        # Recording starts first, so that setting up the view or the metrics cannot make it miss the first batch.
        watched = stack.enter_context(tracing(loader, trace)) if trace is not None else Watched(loader)
        if metrics_port is not None:
            server = MetricsServer(watched.stats, port=metrics_port, host=metrics_host)
            watched.metrics_port = stack.enter_context(server).port
        if chosen is not View.OFF:
            stack.enter_context(_shown(watched, type(loader).__name__, chosen, every_seconds))
        yield watched


def _parse_view(view: str) -> View:
    try:
        chosen = View(view)
    except ValueError:
        raise SettingsError(f"view={view!r}: must be 'auto', 'live', 'lines' or 'off'") from None
    drawable = can_draw(sys.stderr)
    if chosen is View.LIVE and not drawable:
        raise SettingsError(
            "view='live': standard error is not a terminal; leave out view, or set view='lines'"
        )
    if chosen is View.AUTO:
        return View.LIVE if drawable else View.LINES
    return chosen


@contextlib.contextmanager
def _shown(watched: Watched, title: str, view: View, every_seconds: float | None) -> Iterator[None]:
    sampler = Sampler(watched.stats, title)
    try:
        if view is View.LIVE:
            with (
                LiveView(sys.stderr) as live,
                Repeating(lambda: live.show(sampler.look()), every_seconds or LIVE_SECONDS),
            ):
                yield
        else:
            with Repeating(lambda: _say(one_line(sampler.look())), every_seconds or LINES_SECONDS):
                yield
    finally:
        _say(sampler.summary())
        if not counts_itself(watched.loader) and not watched.stats().batches:
            _say(
                "headrace: this loader does not count its own batches; "
                "iterate over the object that headrace.monitor returns"
            )


def _say(line: str) -> None:
    # A closed or broken standard error must not stop training.
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class Sampler:
    """Reads a loader's stats repeatedly, and reports what happened recently."""

    def __init__(self, read: Callable[[], LoaderStats], title: str) -> None:
        self._read, self._title = read, title
        self._begun, self._first = clock.now(), read()
        self._samples = deque([(self._begun, self._first)], maxlen=_SAMPLES)
        self._history: deque[float] = deque(maxlen=_HISTORY)
        self._came = self._begun
        """When the number of batches was last seen to grow."""
        self._cpu_at, self._cpu = self._begun, cpu_seconds()
        self._cores: CpuSeconds | None = None

    def look(self) -> Picture:
        now, stats = clock.now(), self._read()
        latest = self._samples[-1][1]
        if stats.batches != latest.batches:
            self._came = now
            self._history.append(stats.since(latest).wait_share)
        for then, before in reversed(self._samples):
            if now - then >= _WINDOW_SECONDS and before.batches < stats.batches:
                break
        self._samples.append((now, stats))
        self._look_at_cpu(now)
        more: dict[str, Any] = {}
        if now - self._came > _STALL_SECONDS:
            more["verdict"] = f"no batch for {now - self._came:.0f} s"
        return picture_of(
            self._title,
            stats.since(before),
            now - then,
            total=stats.since(self._first),
            cpu_total_cores=self._cores.total if self._cores else None,
            cpu_main_cores=self._cores.main if self._cores else None,
            history=tuple(self._history),
            elapsed_seconds=now - self._begun,
            **more,
        )

    def _look_at_cpu(self, now: float) -> None:
        passed = now - self._cpu_at
        if passed >= _CPU_SECONDS:
            before, self._cpu, self._cpu_at = self._cpu, cpu_seconds(), now
            total, main = self._cpu.total - before.total, self._cpu.main - before.main
            self._cores = CpuSeconds(max(0.0, total) / passed, max(0.0, main) / passed)

    def summary(self) -> str:
        """What happened since the sampler was made, in one line."""
        seconds, stats = clock.now() - self._begun, self._read().since(self._first)
        speed = rate(stats.batches / max(seconds, 1e-9))
        return (
            f"headrace: {count_of_batches(stats.batches)} in {duration(seconds)}, {speed}/s: {stats.verdict}"
        )
