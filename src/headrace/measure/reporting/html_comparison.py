"""The section that compares several points: each telling figure against the settings that were swept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.measure.reporting import html_charts as charts
from headrace.measure.reporting.amounts import amount, heading
from headrace.measure.reporting.html_elements import figure, figures, points_with_bars, section
from headrace.measure.reporting.points import BY_NAME, known_metrics, main_rate, measured, setting, swept
from headrace.measure.reporting.report import Metric, Point, Report
from headrace.measure.reporting.verdict import GOAL, winners

_COMPARED = ("utilisation", "wait_ms_p50", "wait_ms_p99", "mb_per_second", "cpu_cores")
_MOST_CHARTS = 4
_LONGEST_PLACES = 40
"""All labels below a chart together have room for this many characters."""


@dataclass(frozen=True)
class _Axes:
    across: str
    """The setting on the horizontal axis."""
    by: str | None
    """The setting that has a line for each of its values, if a second one was swept."""

    def line_of(self, point: Point) -> str:
        """The name of the point's line."""
        return "" if self.by is None else f"{self.by}={setting(point, self.by)}"


def comparison(report: Report) -> str:
    """Empty unless at least two points were measured."""
    rate = main_rate(report)
    if len(measured(report)) < 2 or rate is None:
        return ""
    known = known_metrics(report.points)
    others = [BY_NAME[name] for name in _COMPARED if name in known]
    metrics = [rate, *others][:_MOST_CHARTS]
    axes = _axes(swept(report.points))
    if axes is not None:
        charts_of_lines = _line_charts(metrics, report.points, axes)
        return section("Points compared", _lead(report, with_crosses=True), charts_of_lines)
    points, hint = points_with_bars(report)
    drawn = [figure(heading(metric), _bars(metric, points)) for metric in metrics]
    return section("Points compared", _lead(report, with_crosses=False) + hint, figures(drawn))


def _lead(report: Report, *, with_crosses: bool) -> str:
    """Which points win, and how to read the charts."""
    sentences = winners(report)
    if any(len(point.runs) > 1 for point in report.points):
        sentences.append("Whiskers extend from the lowest to the highest run.")
    if with_crosses and len(measured(report)) < len(report.points):
        sentences.append("A cross marks a point that was not measured.")
    return " ".join(sentences)


def _axes(sweeps: Mapping[str, Sequence[Any]]) -> _Axes | None:
    """None if bars show the points better than lines."""
    keys = list(sweeps)
    if len(keys) == 1:
        return _Axes(keys[0], None) if _fits_across(sweeps[keys[0]]) else None
    if len(keys) == 2:
        for across, by in (keys, keys[::-1]):
            if _fits_across(sweeps[across]) and len(sweeps[by]) <= charts.COLOURS:
                return _Axes(across, by)
    return None


def _fits_across(values: Sequence[Any]) -> bool:
    """Whether the values are numbers, and short enough to stand below a chart."""
    return all(map(_is_number, values)) and sum(len(str(value)) + 1 for value in values) <= _LONGEST_PLACES


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line_charts(metrics: Sequence[Metric], points: Sequence[Point], axes: _Axes) -> str:
    pictures = [_line_chart(metric, points, axes) for metric in metrics]
    drawn = [figure(picture.title, charts.lines(picture)) for picture in pictures]
    legend = charts.line_legend(list(pictures[0].lines)) if axes.by else ""
    return legend + figures(drawn)


def _line_chart(metric: Metric, points: Sequence[Point], axes: _Axes) -> charts.Chart:
    found: dict[str, dict[str, Any]] = {}
    for point in points:
        line = found.setdefault(axes.line_of(point), {})
        line[str(setting(point, axes.across))] = point.summary.get(metric.name)
    places = [str(value) for value in sorted(swept(points)[axes.across])]
    return charts.Chart(
        title=heading(metric),
        unit=metric.unit,
        axis=axes.across,
        places=places,
        lines={name: [line.get(place) for place in places] for name, line in found.items()},
        goal=GOAL if metric.name == "utilisation" else None,
        goal_name=f"MLPerf Storage: {GOAL:.0%}",
    )


def _bars(metric: Metric, points: Sequence[Point]) -> str:
    known = [point for point in points if metric.name in point.summary]
    most = 1.0
    if metric.unit != "%":
        most = max((point.summary[metric.name]["highest"] for point in known), default=0.0)
    rows = []
    for point in known:
        values = point.summary[metric.name]
        picture = charts.bar(f"{heading(metric)}, {point.name}", metric.unit, values, most)
        rows.append(charts.row(point.name, amount(values["median"], metric.unit), picture))
    return "".join(rows)
