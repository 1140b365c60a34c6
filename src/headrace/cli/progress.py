"""The progress of long work, on standard error: a bar on a terminal, or else a plain line every few seconds."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.terminal import counted

if TYPE_CHECKING:
    from headrace.dataset.copy_files import CopyProgress
    from headrace.ingest.report import Progress

_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How far a stage of the work is."""

    stage: str
    bytes: int
    total_bytes: int
    counts: str
    """What else was counted, in words; may be empty."""


def amount_of_build(progress: "Progress") -> Amount:
    return Amount(
        stage=progress.stage,
        bytes=progress.input_bytes,
        total_bytes=progress.total_bytes,
        counts=_records(progress),
    )


def amount_of_copy(progress: "CopyProgress") -> Amount:
    return Amount(
        stage=progress.stage,
        bytes=progress.bytes,
        total_bytes=progress.total_bytes,
        counts=f"{progress.files:,} of {counted(progress.total_files, 'file')}",
    )


def _records(progress: "Progress") -> str:
    if not progress.records:
        return ""
    if progress.tokens is None:
        return counted(progress.records, "record")
    return f"{counted(progress.records, 'document')}, {counted(progress.tokens, 'token')}"


@contextlib.contextmanager
def show_progress(*, quiet: bool) -> Iterator[Callable[[Amount], None]]:
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

    def __call__(self, amount: Amount) -> None:
        now = time.monotonic()
        if amount.stage != self._stage:
            self._stage, self._started, self._last = amount.stage, now, now
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            click.echo(f"{amount.stage}: {describe(amount, now - self._started)}", err=True)


def describe(amount: Amount, seconds: float) -> str:
    """Counts, speed and time left in words."""
    rate = amount.bytes / max(seconds, 1e-9)
    left = (amount.total_bytes - amount.bytes) / rate if rate else float("inf")
    share = 100 * amount.bytes / max(amount.total_bytes, 1)
    remaining = f", {max(left, 0):.0f} s left" if left != float("inf") else ""
    return f"{min(share, 100):.0f} %, {_with_rate(amount, rate, 1)}{remaining}"


def _with_rate(amount: Amount, rate: float, digits: int) -> str:
    speed = f"{rate / 1e6:.{digits}f} MB/s"
    return f"{amount.counts}, {speed}" if amount.counts else speed


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[Amount], None]]:
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

        def show(amount: Amount) -> None:
            if amount.stage not in lines and amount.total_bytes:
                line = bar.add_task(amount.stage, total=amount.total_bytes, counts="")
                lines[amount.stage] = line, time.monotonic()
            if amount.stage in lines:
                line, started = lines[amount.stage]
                rate = amount.bytes / max(time.monotonic() - started, 1e-9)
                bar.update(
                    line,
                    total=amount.total_bytes,
                    completed=amount.bytes,
                    counts=_with_rate(amount, rate, 0),
                )

        yield show
