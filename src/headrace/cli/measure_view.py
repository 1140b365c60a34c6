"""What is shown while a benchmark runs: a line of text, or with `--live` the loop itself."""

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
    """Yields the function that `bench` reports to; it shows something only if stderr is a terminal."""
    if not sys.stderr.isatty():
        if live:
            click.echo("--live needs a terminal; nothing is shown until the end", err=True)
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    # Before it draws: it then puts something else in place of the standard streams.
    shown = _Shown(settings, live, fancy=unicode_works(sys.stderr))
    with Live(shown.text("starting"), console=console, refresh_per_second=4, transient=True) as view:

        def tell(point: "Point", turn: int, run: "Run", pid: int) -> None:
            view.update(shown.picture(point, turn, run, pid))

        yield tell


class _Shown:
    def __init__(self, settings: "BenchSettings", live: bool, fancy: bool) -> None:
        self._runs, self._live, self._fancy = settings.runs, live, fancy
        self._points = len(list(settings.points()))
        self._cpu: tuple[int, float, float, float] | None = None
        self._waits: list[float] = []
        self._seen_of: dict[int, tuple[float, float]] = {}
        """By process: the seconds that the loop has waited, and all its seconds."""

    def text(self, said: str) -> Any:
        from rich.text import Text

        return Text(said)

    def picture(self, point: "Point", turn: int, run: "Run", pid: int) -> Any:
        title = f"{point.name}: run {turn + 1} of {self._runs}"
        if self._points > 1:
            title += f", {self._points} points"
        return self._live_picture(title, run, pid) if self._live else self._line(title, run)

    def _line(self, title: str, run: "Run") -> Any:
        rate = run.batches_per_second
        speed = f", {rate:,.1f} batches/s, waits {run.wait_share or 0:.0%}" if rate else ""
        return self.text(f"{title}{speed}  (Ctrl-C: show what was measured)")

    def _live_picture(self, title: str, run: "Run", pid: int) -> Any:
        from headrace.measure.running.server_figures import servers_in
        from headrace.measure.watching.live import Picture, render
        from headrace.measure.watching.server_lines import server_rows

        total, main = self._cores(pid)
        stats = run.stats or {}
        queues = stats.get("queues", {})
        wait_share = run.wait_share or 0.0
        servers = servers_in(run)
        picture = Picture(
            title=title,
            batches_per_second=run.batches_per_second or 0.0,
            rows_per_second=run.samples / run.seconds if run.seconds and run.samples else None,
            wait_share=wait_share,
            stages=_stages(run, wait_share * run.seconds),
            queues={name: (queue["latest"], queue["capacity"]) for name, queue in queues.items()},
            servers=server_rows(servers, run.seconds, servers),
            cpu_total_cores=total,
            cpu_main_cores=main,
            history=self._history(pid, wait_share * run.seconds, run.seconds),
            verdict=stats.get("verdict", ""),
            batches=run.batches,
            elapsed_seconds=run.seconds,
        )
        return render(picture, width=shutil.get_terminal_size().columns, fancy=self._fancy)

    def _history(self, pid: int, waited: float, seconds: float) -> tuple[float, ...]:
        """The share of waiting between each two looks."""
        waited_before, seconds_before = self._seen_of.get(pid, (0.0, 0.0))
        self._seen_of[pid] = (waited, seconds)
        if seconds > seconds_before:
            share = (waited - waited_before) / (seconds - seconds_before)
            self._waits.append(min(1.0, max(0.0, share)))
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


def _stages(run: "Run", waited: float) -> dict[str, tuple[float, float]]:
    """Each stage's share of the loop's time, and its milliseconds per batch; the loop's own stages are the last."""
    counted = (run.stats or {}).get("stages", {})
    spent = {name: stage["seconds"] for name, stage in counted.items()}
    spent |= {"wait": waited, "step": run.seconds - waited}
    whole, batches = run.seconds or 1.0, max(1, run.batches)
    return {name: (seconds / whole, 1e3 * seconds / batches) for name, seconds in spent.items()}
