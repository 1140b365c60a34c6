"""Questions about the points of a report: which ones were measured, how they differ, and which is best."""

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.measure.reporting.report import METRICS, Metric, Point, Report
from headrace.observe.stats import LOOP

BY_NAME = {metric.name: metric for metric in METRICS}
RATES = ("tokens_per_second", "samples_per_second", "batches_per_second")
_GROUPS = {
    "start": ("first_batch",),
    "waiting": ("wait_",),
    "throughput": (*RATES, "mb_per_second"),
    "network": ("network_", "beginning_"),
    "servers": ("server_",),
    "the step": ("step_", "utilisation", "headroom"),
    "processor and memory": ("cpu_", "main_cpu", "peak_"),
}
"""How the names of a group's metrics begin."""
_OTHER_GROUP = "data"


def grouped(points: Iterable[Point]) -> dict[str, list[Metric]]:
    """The metrics that at least one of the points has, by topic."""
    known = known_metrics(points)
    found: dict[str, list[Metric]] = {group: [] for group in (*_GROUPS, _OTHER_GROUP)}
    for metric in METRICS:
        if metric.name in known:
            found[_group_of(metric)].append(metric)
    return {group: metrics for group, metrics in found.items() if metrics}


def _group_of(metric: Metric) -> str:
    for group, beginnings in _GROUPS.items():
        if metric.name.startswith(beginnings):
            return group
    return _OTHER_GROUP


def known_metrics(points: Iterable[Point]) -> set[str]:
    """The names of the metrics that at least one of the points has."""
    return {name for point in points for name in point.summary}


def measured(report: Report) -> list[Point]:
    """The points that have figures."""
    return [point for point in report.points if point.summary]


def swept(points: Sequence[Point]) -> dict[str, list[Any]]:
    """The settings that differ between the points, with their values."""
    values: dict[str, dict[str, Any]] = {}
    for point in points:
        for key, value in {**point.settings, "ranks": point.ranks}.items():
            values.setdefault(key, {}).setdefault(str(value), value)
    return {key: list(found.values()) for key, found in values.items() if len(found) > 1}


def setting(point: Point, key: str) -> Any:
    return point.ranks if key == "ranks" else point.settings.get(key, "")


def main_rate(report: Report) -> Metric | None:
    """What throughput is counted in: the first of RATES that all points have, or else the first that any has."""
    summaries = [point.summary for point in measured(report)]
    if not summaries:
        return None
    for has_rate in (all, any):
        for name in RATES:
            if has_rate(name in summary for summary in summaries):
                return BY_NAME[name]
    return None


def best_median(metric: Metric, points: Sequence[Point]) -> float | None:
    """None if all medians are the same, or if neither direction is better."""
    medians = {median for point in points if (median := point.median(metric.name)) is not None}
    if len(medians) < 2 or metric.higher_is_better is None:
        return None
    return max(medians) if metric.higher_is_better else min(medians)


def best(report: Report) -> Point | None:
    """The point with the highest throughput; None if nothing was measured."""
    rate, points = main_rate(report), measured(report)
    if rate is None:
        return points[0] if points else None
    rates = [(median, point) for point in points if (median := point.median(rate.name)) is not None]
    return max(rates, key=lambda each: each[0])[1]


def stage_ms(point: Point) -> dict[str, float]:
    """The milliseconds that each stage spends on a batch, summed over all workers, the longest first.

    Empty if the loader did not count its stages.
    """
    stats = [run["stats"] for run in point.runs if run.get("stats")]
    batches = sum(each["batches"] for each in stats)
    if not batches:
        return {}
    seconds: dict[str, float] = {}
    for each in stats:
        for name, stage in each["stages"].items():
            if name not in LOOP:
                seconds[name] = seconds.get(name, 0.0) + stage["seconds"]
    longest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: 1e3 * spent / batches for name, spent in longest_first if spent}


def failures(report: Report) -> dict[str, list[str]]:
    """Each error, with the names of the points that it ended."""
    found: dict[str, dict[str, None]] = {}
    for point in report.points:
        for error in point.errors:
            found.setdefault(error, {})[point.name] = None
    return {error: list(names) for error, names in found.items()}


def all_notes(report: Report) -> list[str]:
    """The notes of the report and of its runs. A note that only some points have begins with their names."""
    points = measured(report)
    notes = dict.fromkeys(report.notes)
    for note, names in _names_by_note(points).items():
        everywhere = len(names) == len(points)
        notes |= dict.fromkeys([note] if everywhere else [f"{name}: {note}" for name in names])
    return list(notes)


def _names_by_note(points: Sequence[Point]) -> dict[str, dict[str, None]]:
    found: dict[str, dict[str, None]] = {}
    for point in points:
        for run in point.runs:
            for note in run.get("notes") or ():
                found.setdefault(note, {})[point.name] = None
    return found
