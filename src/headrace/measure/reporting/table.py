"""A report as text: every figure of one point, or a row for each of several, and a verdict in words.

  num_workers  batch_size  samples/s  lowest - highest   used  wait, p50
            2           8     1.15 k   1.13 k - 1.28 k  72.1%    1.23 ms
*           2          16     1.63 k   1.60 k - 1.72 k  51.0%    4.02 ms
"""

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.measure.reporting.report import METRICS, Metric, Point, Report
from headrace.observe.stats import LOOP, WAITING_SHARE

GOAL = 0.9
"""The accelerator utilisation that MLPerf Storage asks for."""
BY_NAME = {metric.name: metric for metric in METRICS}
RATES = ("tokens_per_second", "samples_per_second", "batches_per_second")
_UNEXPLAINED_SHARE = 0.05
"""Of the time that is neither computing nor waiting: more is worth a word."""
_GROUPS = {
    "start": ("first_batch",),
    "waiting": ("wait_",),
    "throughput": (*RATES, "mb_per_second"),
    "the step": ("step_", "utilisation", "headroom"),
    "processor and memory": ("cpu_", "main_cpu", "peak_"),
}
_TELLING = """utilisation wait_ms_p50 wait_ms_p99 headroom first_batch_warm_seconds cpu_cores peak_pss_mb wait_share
    mb_per_second first_batch_cold_seconds step_ms_p50 step_ms_p99 padding peak_uss_mb truncation""".split()
"""What a row of several points shows beside its rate, as far as there is room."""
_SHORT = {
    "utilisation": "used",
    "first_batch_warm_seconds": "first, warm",
    "first_batch_cold_seconds": "first, cold",
    "peak_pss_mb": "PSS",
    "peak_uss_mb": "USS",
    "cpu_cores": "CPU",
}
_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "ms": ((1e3, " s"), (0, " ms")),
    "MB": ((1e6, " TB"), (1e3, " GB"), (0, " MB")),
    "MB/s": ((1e6, " TB/s"), (1e3, " GB/s"), (0, " MB/s")),
    "/s": ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"), (0, "")),
}
_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def plain(text: str) -> str:
    """What would act on a terminal, or is no character, is shown as its code."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def amount(value: float, unit: str) -> str:
    """In three digits: 1153.5 '/s' -> '1.15 k', 0.0124 's' -> '12.4 ms', 0.721 '%' -> '72.1%'."""
    if not math.isfinite(value):
        return "unknown"
    if unit == "%":
        return "<0.1%" if 0 < value < 0.0005 else f"{100 * value:.1f}%"
    if unit == "s":
        value, unit = value * 1e3, "ms"
    value = float(f"{value:.3g}")
    for least, suffix in _SCALES.get(unit, ((0, ""),)):
        if abs(value) >= least:
            return _three_digits(value / (least or 1)) + suffix
    raise AssertionError(f"a scale without an end: {unit}")


def _three_digits(value: float) -> str:
    if not value:
        return "0"
    if 0 < value < 0.001:
        return "<0.001"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def heading(metric: Metric) -> str:
    return f"{metric.label}/s" if metric.unit == "/s" else metric.label


def shown(metric: Metric, value: float) -> str:
    """With what it counts: '1.15 k samples/s'."""
    return amount(value, metric.unit) + (f" {metric.label}/s" if metric.unit == "/s" else "")


def span(metric: Metric, values: Mapping[str, float], dash: str = "-") -> str:
    """From the lowest to the highest: '510 - 543'."""
    low, high = amount(values["lowest"], metric.unit), amount(values["highest"], metric.unit)
    return low if low == high else f"{low} {dash} {high}"


def grouped(points: Iterable[Point]) -> dict[str, list[Metric]]:
    """The figures that any of the points has, by what they are about."""
    known = {name for point in points for name in point.summary}
    found: dict[str, list[Metric]] = {group: [] for group in (*_GROUPS, "data")}
    for metric in METRICS:
        if metric.name in known:
            groups = (group for group, starts in _GROUPS.items() if metric.name.startswith(starts))
            found[next(groups, "data")].append(metric)
    return {group: metrics for group, metrics in found.items() if metrics}


def measured(report: Report) -> list[Point]:
    """The points that have figures."""
    return [point for point in report.points if point.summary]


def swept(points: Sequence[Point]) -> dict[str, list[Any]]:
    """The settings that differ, with their values."""
    values: dict[str, dict[str, Any]] = {}
    for point in points:
        for key, value in {**point.settings, "ranks": point.ranks}.items():
            values.setdefault(key, {}).setdefault(str(value), value)
    return {key: list(found.values()) for key, found in values.items() if len(found) > 1}


def setting(point: Point, key: str) -> Any:
    return point.ranks if key == "ranks" else point.settings.get(key, "")


def main_rate(report: Report) -> Metric | None:
    """What throughput is counted in: tokens if all points have them, else samples."""
    points = measured(report)
    found = (name for name in RATES if points and all(name in point.summary for point in points))
    name = next(found, None) or next((r for r in RATES if any(r in p.summary for p in points)), None)
    return BY_NAME[name] if name else None


def best_median(metric: Metric, points: Sequence[Point]) -> float | None:
    """None if all are the same, or none is better."""
    medians = {median for point in points if (median := point.median(metric.name)) is not None}
    if len(medians) < 2 or metric.higher_is_better is None:
        return None
    return max(medians) if metric.higher_is_better else min(medians)


def best(report: Report) -> Point | None:
    """The point of the highest throughput; None if nothing was measured."""
    rate, points = main_rate(report), measured(report)
    if rate is None:
        return points[0] if points else None
    return max(points, key=lambda point: point.median(rate.name) or 0.0)


def stage_ms(point: Point) -> dict[str, float]:
    """What making a batch took, by stage, all workers together; the longest first. Empty if nobody counted."""
    stats = [run["stats"] for run in point.runs if run.get("stats")]
    batches = sum(each["batches"] for each in stats)
    seconds: dict[str, float] = {}
    for each in stats:
        for name, stage in each["stages"].items():
            if name not in LOOP:
                seconds[name] = seconds.get(name, 0.0) + stage["seconds"]
    found = {name: 1e3 * spent / batches for name, spent in seconds.items() if batches and spent}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def verdict(report: Report, subject: str = "The accelerator") -> list[str]:
    """Of the best point, in sentences: does the accelerator wait, for what, and what would a better loader change?"""
    point, rate = best(report), main_rate(report)
    if point is None:
        return ["Nothing was measured."]
    used, waited = point.median("utilisation"), point.median("wait_share")
    if waited is None:
        return ["No batch was counted: only the start was measured."]
    if used is None:
        most = shown(rate, point.median(rate.name) or 0.0) if rate else "this"
        return [
            f"No step was given, so the loop only loads: {most} is the most that it gives.",
            "Whether an accelerator would wait depends on how long its step takes: measure with one.",
        ]
    sentences = [_waiting(subject, waited, stage_ms(point)), _goal(used)]
    rest = 1 - used - waited
    if rest > _UNEXPLAINED_SHARE:
        said = "steps take longer than the computing, as when making batches slows them"
        sentences.append(f"The other {amount(rest, '%')} is neither: {said}.")
    headroom = point.median("headroom")
    if headroom is not None:
        sentences.append(_headroom(headroom))
    return sentences


def _waiting(subject: str, share: float, stages: Mapping[str, float]) -> str:
    if share < WAITING_SHARE:
        return f"{subject} hardly waits for data: {amount(share, '%')} of the time."
    said = f"{subject} waits for data {amount(share, '%')} of the time"
    if not stages or not sum(stages.values()):
        return f"{said}."
    busiest = next(iter(stages))
    part = stages[busiest] / sum(stages.values())
    return f"{said}; {busiest!r} is {part:.0%} of the work of making batches."


def _goal(used: float) -> str:
    # Rounded first: '90.0%, less than 90%' would be odd.
    if round(used, 3) >= GOAL:
        return f"It computes {amount(used, '%')} of the time; MLPerf Storage asks for {GOAL:.0%}: reached."
    return f"It computes {amount(used, '%')} of the time; MLPerf Storage asks for {GOAL:.0%}: not reached."


def _headroom(share: float) -> str:
    if share < 0.01:
        return "A loader that costs nothing would not make the steps faster to speak of."
    faster = f" ({amount(1 / (1 - share), '')} times as many a second)" if share < 0.999 else ""
    return f"With a loader that costs nothing, steps would take {amount(share, '%')} less time{faster}."


def winners(report: Report) -> list[str]:
    """Of several points: which is best, and which cannot be told from it."""
    point, rate = best(report), main_rate(report)
    points = measured(report)
    if point is None or rate is None or len(points) < 2:
        return []
    own = point.summary[rate.name]
    said = f"Most {rate.label}/s: {point.name} ({amount(own['median'], rate.unit)})."
    rivals = [each for each in points if each is not point and rate.name in each.summary]
    close = [each.name for each in rivals if each.summary[rate.name]["highest"] >= own["lowest"]]
    if close and len(point.runs) > 1:
        listed = "; ".join(close[:3]) + (f"; and {len(close) - 3} more" if len(close) > 3 else "")
        said += f" Its runs overlap with those of {listed}."
    lines = [said]
    busy = max(points, key=lambda each: each.median("utilisation") or 0.0)
    used = busy.median("utilisation")
    if busy is not point and used is not None and used > (point.median("utilisation") or 0.0) + 0.01:
        lines.append(f"The accelerator is used most with {busy.name} ({amount(used, '%')}).")
    return lines


def failures(report: Report) -> dict[str, list[str]]:
    """The errors, each with the points that it ended."""
    found: dict[str, dict[str, None]] = {}
    for point in report.points:
        for error in point.errors:
            found.setdefault(error, {})[point.name] = None
    return {error: list(names) for error, names in found.items()}


def all_notes(report: Report) -> list[str]:
    """Of the report and of its runs; those of single points begin with their names."""
    notes = dict.fromkeys(report.notes)
    points = measured(report)
    by_note: dict[str, dict[str, None]] = {}
    for point in points:
        for run in point.runs:
            for note in run.get("notes") or ():
                by_note.setdefault(note, {})[point.name] = None
    for note, names in by_note.items():
        everywhere = len(names) == len(points)
        notes |= dict.fromkeys([note] if everywhere else [f"{name}: {note}" for name in names])
    return list(notes)


def table(report: Report, width: int = 80) -> list[str]:
    """Lines of at most so many characters."""
    lines = _head(report)
    points = report.points
    if len(points) == 1 and points[0].summary:
        lines += ["", *_one_point(points[0])]
    elif len(points) > 1:
        lines += ["", *_rows(report, width)]
    lines.append("")
    first, *others = [*winners(report), ""]
    said = verdict(report, "With it, the accelerator" if first else "The accelerator")
    for text in (first, " ".join(said), *others):
        lines += _wrapped(text, width)
    if report.interrupted:
        lines += _wrapped("Interrupted: these are the figures until then.", width)
    for error, names in failures(report).items():
        lines += ["", *_wrapped(f"failed: {'; '.join(names)}", width, "  ")]
        lines += [f"  {line}" for line in _wrapped(error, width - 2, "  ")]
    notes = all_notes(report)
    if notes:
        lines.append("")
    for note in notes:
        lines += _wrapped(f"note: {note}", width, "  ")
    return [_fit(line, width) for line in lines]


def _head(report: Report) -> list[str]:
    runs = max((len(point.runs) for point in report.points), default=0)
    settings = ", ".join(f"{key}={value}" for key, value in report.settings.items())
    of_each = " of each point" if len(report.points) > 1 else ""
    point = report.points[0] if len(report.points) == 1 else None
    return [
        f"target    {report.target}",
        *([f"settings  {settings}"] if settings else []),
        *([f"point     {point.name}"] if point and (point.settings or point.ranks > 1) else []),
        f"step      {report.step}",
        f"runs      {runs}{of_each}",
    ]


def _one_point(point: Point) -> list[str]:
    lines = []
    several = len(point.runs) > 1
    title = f"{'median':>12}   lowest - highest of {len(point.runs)} runs" if several else ""
    for group, metrics in grouped([point]).items():
        lines.append(f"{group:<24}{title}".rstrip())
        title = ""
        for metric in metrics:
            values = point.summary[metric.name]
            line = f"  {heading(metric):<22}{amount(values['median'], metric.unit):>12}"
            if several:
                line += f"   {span(metric, values)}"
            lines.append(line)
    return lines


def _rows(report: Report, width: int) -> list[str]:
    """One a point: its settings, its rate, and what else there is room for."""
    points, top = report.points, best(report)
    keys = list(swept(points)) or ["point"]
    columns = [
        [key, *(plain(point.name if key == "point" else str(setting(point, key))) for point in points)]
        for key in keys
    ]
    lines = ["* " if point is top and len(measured(report)) > 1 else "  " for point in points]
    lines = _beside(["  ", *lines], columns, gap="")
    if max(map(len, lines)) > width // 2:
        lines = [_fit(line, width // 2).ljust(width // 2) for line in lines]
    for column in _figure_columns(report):
        more = _beside(lines, [column], gap="  ")
        if max(map(len, more)) <= width:
            lines = more
    for number, point in enumerate(points, 1):
        if not point.summary:
            said = "failed" if point.errors else "not measured"
            lines[number] = f"{lines[number].rstrip()}  {said}"
    return [_fit(line.rstrip(), width) for line in lines]


def _figure_columns(report: Report) -> Iterable[list[str]]:
    rate, points = main_rate(report), report.points
    if rate is None:
        return
    known = {name for point in points for name in point.summary}
    yield _column(rate, points)
    if any(len(point.runs) > 1 for point in points):
        ranges = [
            span(rate, point.summary[rate.name]) if rate.name in point.summary else "" for point in points
        ]
        yield ["lowest - highest", *ranges]
    for name in _TELLING:
        if name in known:
            yield _column(BY_NAME[name], points)


def _column(metric: Metric, points: Sequence[Point]) -> list[str]:
    medians = [point.median(metric.name) for point in points]
    return [
        _SHORT.get(metric.name, heading(metric)),
        *("" if m is None else amount(m, metric.unit) for m in medians),
    ]


def _beside(lines: Sequence[str], columns: Sequence[Sequence[str]], gap: str) -> list[str]:
    found = list(lines)
    for column in columns:
        room = max(map(len, column))
        found = [f"{line}{gap}{cell:>{room}}" for line, cell in zip(found, column, strict=True)]
        gap = "  "
    return found


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return [
        line
        for part in text.splitlines() or [""]
        for line in textwrap.wrap(plain(part), width, subsequent_indent=indent)
    ]


def _fit(line: str, width: int) -> str:
    line = plain(line.replace("\n", "\\n").replace("\t", " "))
    return line if len(line) <= width else line[: max(0, width - 3)] + "..."
