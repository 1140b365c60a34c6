"""The progress of a build, on standard error: a bar on a terminal, or else a plain line every few seconds."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.terminal import counted

if TYPE_CHECKING:
    from headrace.ingest.report import Progress

_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def show_progress(*, quiet: bool) -> Iterator[Callable[["Progress"], None]]:
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield _PlainLines()


class _PlainLines:
    def __init__(self) -> None:
        self._stage, self._started, self._last = "", 0.0, 0.0

    def __call__(self, progress: "Progress") -> None:
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._started, self._last = progress.stage, now, now
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            click.echo(f"{progress.stage}: {describe(progress, now - self._started)}", err=True)


def describe(progress: "Progress", seconds: float) -> str:
    """Records, tokens, speed and time left in words."""
    rate = progress.input_bytes / max(seconds, 1e-9)
    left = (progress.total_bytes - progress.input_bytes) / rate if rate else float("inf")
    share = 100 * progress.input_bytes / max(progress.total_bytes, 1)
    remaining = f", {max(left, 0):.0f} s left" if left != float("inf") else ""
    return f"{min(share, 100):.0f} %, {counts(progress)}{rate / 1e6:.1f} MB/s{remaining}"


def counts(progress: "Progress") -> str:
    if not progress.records:
        return ""
    if progress.tokens is None:
        return f"{counted(progress.records, 'record')}, "
    return f"{counted(progress.records, 'document')}, {counted(progress.tokens, 'token')}, "


@contextlib.contextmanager
def _bar() -> Iterator[Callable[["Progress"], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[counts]}"),
        TimeRemainingColumn(),
    ]
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        lines: dict[str, tuple[Any, float]] = {}

        def show(progress: "Progress") -> None:
            if progress.stage not in lines and progress.total_tasks:
                line = bar.add_task(progress.stage, total=max(progress.total_bytes, 1), counts="")
                lines[progress.stage] = line, time.monotonic()
            if progress.stage in lines:
                line, started = lines[progress.stage]
                rate = progress.input_bytes / max(time.monotonic() - started, 1e-9) / 1e6
                bar.update(line, completed=progress.input_bytes, counts=f"{counts(progress)}{rate:.0f} MB/s")

        yield show
