"""The sections on what a batch costs: how long the loop waits for it, who makes it, and how much memory that takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.measure.reporting import html_charts as charts
from headrace.measure.reporting.amounts import amount
from headrace.measure.reporting.html_charts import BarPart
from headrace.measure.reporting.html_elements import bar_rows, figure, figures, points_with_bars, section
from headrace.measure.reporting.points import BY_NAME, best, known_metrics, measured, stage_ms
from headrace.measure.reporting.report import Point, Report

_MOST_TRACES = 6
_SMALLEST_SHARE = 0.005
"""Smaller parts of a turn are not drawn."""
_TURN_COLOURS = {"waiting": "hatched", "step": "s0", "the rest": "s5"}
_MEMORY_COLOURS = {"peak_pss_mb": "s0 soft", "peak_uss_mb": "s2 soft"}
_MEMORY_BAR_HEIGHT = 11

_Row = tuple[str, str, Sequence[BarPart]]
"""The name of a bar, the value beside it, and its parts."""


def _stacks(colours: Mapping[str, str], rows: Sequence[_Row]) -> str:
    """A legend, and a bar of parts for each row; all bars have the same scale."""
    most = max((sum(part.value for part in parts) for _, _, parts in rows), default=0.0)
    drawn = [charts.row(name, value, charts.stack(name, "ms", parts, most)) for name, value, parts in rows]
    return bar_rows(charts.legend(colours), drawn)


def loop(report: Report) -> str:
    """An average turn of the loop: waiting, and the step."""
    points, hint = points_with_bars(report)
    rows = [row for point in points if (row := _turn(point)) is not None]
    lead = (
        "An average turn of the loop: how long it waits for its batch, and how long it computes. The rest is "
    )
    lead += f"the time that steps take beyond that, for example because making batches slows them down.{hint}"
    return section("Where the time goes", lead, _stacks(_TURN_COLOURS, rows))


def _turn(point: Point) -> _Row | None:
    rate, waiting = point.median("batches_per_second"), point.median("wait_share")
    if not rate or waiting is None:
        return None
    turn_ms = 1e3 * point.ranks / rate
    not_waiting = 1 - waiting
    used = point.median("utilisation")
    computing = not_waiting if used is None else min(not_waiting, used)
    shares = {"waiting": waiting, "step": computing, "the rest": max(0.0, not_waiting - computing)}
    parts = [
        BarPart(name, share * turn_ms, _TURN_COLOURS[name])
        for name, share in shares.items()
        if share > _SMALLEST_SHARE
    ]
    return point.name, f"waits {amount(waiting, '%')} of {amount(turn_ms, 'ms')}", parts


def making(report: Report) -> str:
    """What the loader itself counted: its stages and its queues."""
    points, hint = points_with_bars(report)
    made = [(point, stages) for point in points if (stages := stage_ms(point))]
    names = dict.fromkeys(name for _, stages in made for name in stages)
    colours = {name: f"s{number % charts.COLOURS}" for number, name in enumerate(names)}
    rows = []
    for point, stages in made:
        parts = [BarPart(name, stages[name], colour) for name, colour in colours.items() if name in stages]
        value = f"{amount(sum(stages.values()), 'ms')} per batch{_queues(point)}"
        rows.append((point.name, value, parts))
    lead = "The work for one batch, by stage, summed over all workers, which run in parallel. "
    lead += f"If a queue is often empty when the loop asks for a batch, the loop waits for it.{hint}"
    return section("What making a batch takes", lead, _stacks(colours, rows))


def _queues(point: Point) -> str:
    stats = next(run["stats"] for run in point.runs if run.get("stats"))
    queues = stats.get("queues", {}).items()
    return "".join(
        f"; queue {name!r} empty {amount(queue['empty_share'], '%')} of the time" for name, queue in queues
    )


def traces(report: Report) -> str:
    """How long each step of a run waited."""
    runs = _last_recorded_runs(measured(report))
    lead = "How long each step of one run waited. A long run shows only the longest wait of every few steps."
    if len(runs) > _MOST_TRACES:
        top = best(report)
        lead += f" {_MOST_TRACES} of {len(runs)} points are shown, the best one first."
        runs = sorted(runs, key=lambda each: each[0] is not top)[:_MOST_TRACES]
    drawn = [figure(point.name, _trace(point, run)) for point, run in runs]
    return section("Waiting, step by step", lead, figures(drawn))


def _last_recorded_runs(points: Sequence[Point]) -> list[tuple[Point, Mapping[str, Any]]]:
    """Each point with the last of its runs that recorded the waits of single steps."""
    found: list[tuple[Point, Mapping[str, Any]]] = []
    for point in points:
        recorded = [run for run in point.runs if (run.get("series") or {}).get("wait_ms")]
        if recorded:
            found.append((point, recorded[-1]))
    return found


def _trace(point: Point, run: Mapping[str, Any]) -> str:
    steps = max(1, int(run.get("batches") or 1) // point.ranks)
    return charts.trace(
        f"wait of each step, {point.name}", run["series"]["wait_ms"], run.get("wait_ms_p99"), steps
    )


def memory(report: Report) -> str:
    points, hint = points_with_bars(report)
    known = known_metrics(points)
    colours = {name: colour for name, colour in _MEMORY_COLOURS.items() if name in known}
    most = max((_highest(point, name) for point in points for name in colours), default=0.0)
    rows = [_memory_row(point, colours, most) for point in points]
    lead = f"The peak of all processes together, PSS above USS.{hint}"
    legend = charts.legend({BY_NAME[name].label: colour for name, colour in colours.items()})
    return section("Memory", lead, bar_rows(legend, rows))


def _highest(point: Point, metric: str) -> float:
    return point.summary[metric]["highest"] if metric in point.summary else 0.0


def _memory_row(point: Point, colours: Mapping[str, str], most: float) -> str:
    """A bar for each kind of memory; empty if the point's memory is not known."""
    medians, bars = [], []
    for name, colour in colours.items():
        if name in point.summary:
            values, title = point.summary[name], f"{BY_NAME[name].label}, {point.name}"
            medians.append(amount(values["median"], "MB"))
            bars.append(charts.bar(title, "MB", values, most, colour, _MEMORY_BAR_HEIGHT))
    return charts.row(point.name, " / ".join(medians), "".join(bars)) if bars else ""
