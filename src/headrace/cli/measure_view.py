"""What is shown while a benchmark runs: a bar, or the loop itself with `--live`."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.terminal import unicode_works

if TYPE_CHECKING:
    from headrace.measure.reporting.report import Point
    from headrace.measure.running.bench import BenchSettings, Tell
    from headrace.measure.running.run import Run


@contextlib.contextmanager
def watching(settings: "BenchSettings", live: bool) -> "Iterator[Tell | None]":
    """Gives the function that `bench` tells how it goes; on stderr, and only if that is a terminal."""
    if not sys.stderr.isatty():
        if live:
            click.echo("--live: needs a terminal; nothing is shown until the end", err=True)
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    shown = _Shown(settings, live)
    with Live(shown.text("starting"), console=console, refresh_per_second=4, transient=True) as view:

        def tell(point: "Point", turn: int, run: "Run", pid: int) -> None:
            view.update(shown.picture(point, turn, run, pid))

        yield tell


class _Shown:
    def __init__(self, settings: "BenchSettings", live: bool) -> None:
        self._runs, self._live = settings.runs, live
        self._points = len(list(settings.points()))
        self._cpu: tuple[int, float, float, float] | None = None
        self._waits: list[float] = []
        self._seen_of: dict[int, tuple[float, float]] = {}
        """By process: seconds that the loop has waited, and all of them."""

    def text(self, said: str) -> Any:
        from rich.text import Text

        return Text(said)

    def picture(self, point: "Point", turn: int, run: "Run", pid: int) -> Any:
        title = f"{point.name}: run {turn + 1} of {self._runs}"
        if self._points > 1:
            title += f", {self._points} points"
        rate = run.batches_per_second
        if not self._live:
            speed = f", {rate:,.1f} batches/s, waits {run.wait_share or 0:.0%}" if rate else ""
            return self.text(f"{title}{speed}  (Ctrl-C: show what was measured)")
        from headrace.measure.watching.live import Picture, render

        total, main = self._cores(pid)
        stats = run.stats or {}
        waited, whole = (run.wait_share or 0.0) * run.seconds, run.seconds or 1.0
        stages = {
            name: (stage["seconds"] / whole, 1e3 * stage["seconds"] / max(1, run.batches))
            for name, stage in stats.get("stages", {}).items()
        }
        loop = {"wait": waited, "step": run.seconds - waited}
        stages |= {name: (spent / whole, 1e3 * spent / max(1, run.batches)) for name, spent in loop.items()}
        picture = Picture(
            title=title,
            batches_per_second=rate or 0.0,
            rows_per_second=run.samples / run.seconds if run.seconds and run.samples else None,
            wait_share=run.wait_share or 0.0,
            stages=stages,
            queues={
                name: (queue["latest"], queue["capacity"]) for name, queue in stats.get("queues", {}).items()
            },
            cpu_total_cores=total,
            cpu_main_cores=main,
            history=self._history(pid, waited, run.seconds),
            verdict=stats.get("verdict", ""),
            batches=run.batches,
            elapsed_seconds=run.seconds,
        )
        return render(picture, width=shutil.get_terminal_size().columns, fancy=unicode_works())

    def _history(self, pid: int, waited: float, seconds: float) -> tuple[float, ...]:
        """The share of waiting since each look before."""
        before = self._seen_of.get(pid, (0.0, 0.0))
        self._seen_of[pid] = (waited, seconds)
        if seconds > before[1]:
            self._waits.append(min(1.0, max(0.0, (waited - before[0]) / (seconds - before[1]))))
        return tuple(self._waits)

    def _cores(self, pid: int) -> tuple[float, float]:
        """Cores in use since the last look."""
        from headrace.measure import clock
        from headrace.measure.running.resources import cpu_seconds

        now, used = clock.now(), cpu_seconds(pid)
        before, self._cpu = self._cpu, (pid, now, used.total, used.main)
        if before is None or before[0] != pid or now <= before[1]:
            return 0.0, 0.0
        elapsed = now - before[1]
        return max(0.0, used.total - before[2]) / elapsed, max(0.0, used.main - before[3]) / elapsed
