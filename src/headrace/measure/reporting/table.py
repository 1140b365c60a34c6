"""A report as text: every figure of one point, or a row for each of several points, and a verdict in words.

  num_workers  batch_size  samples/s  lowest - highest   used  wait, p50
            2           8     1.15 k   1.13 k - 1.28 k  72.1%    1.23 ms
*           2          16     1.63 k   1.60 k - 1.72 k  51.0%    4.02 ms
"""

import textwrap
from collections.abc import Iterator, Sequence

from headrace.measure.reporting.amounts import amount, heading, plain, span
from headrace.measure.reporting.points import (
    BY_NAME,
    all_notes,
    best,
    failures,
    grouped,
    known_metrics,
    main_rate,
    measured,
    setting,
    swept,
)
from headrace.measure.reporting.report import Metric, Point, Report
from headrace.measure.reporting.verdict import verdict, winners

_TELLING = """utilisation network_mb_per_second wait_ms_p50 wait_ms_p99 headroom beginning_seconds
    server_queue_ms server_making_ms server_network_ms
    first_batch_warm_seconds cpu_cores peak_pss_mb wait_share mb_per_second network_cached_share
    first_batch_cold_seconds step_ms_p50 step_ms_p99 padding peak_uss_mb truncation""".split()
"""What a row shows beside its rate when there are several points, as far as there is room."""
_SHORT = {
    "utilisation": "used",
    "network_mb_per_second": "fetched",
    "first_batch_warm_seconds": "first, warm",
    "first_batch_cold_seconds": "first, cold",
    "peak_pss_mb": "PSS",
    "peak_uss_mb": "USS",
    "cpu_cores": "CPU",
}


def table(report: Report, width: int = 80) -> list[str]:
    """Lines of at most `width` characters."""
    lines = [
        *_head(report),
        *_figures(report, width),
        "",
        *_conclusion(report, width),
        *_failed(report, width),
        *_notes(report, width),
    ]
    return [_fit(line, width) for line in lines]


def _head(report: Report) -> list[str]:
    points = report.points
    lines = [f"target    {report.target}"]
    if report.settings:
        settings = ", ".join(f"{key}={value}" for key, value in report.settings.items())
        lines.append(f"settings  {settings}")
    if len(points) == 1 and (points[0].settings or points[0].ranks > 1):
        lines.append(f"point     {points[0].name}")
    lines.append(f"step      {report.step}")
    runs = max((len(point.runs) for point in points), default=0)
    of_each = " of each point" if len(points) > 1 else ""
    lines.append(f"runs      {runs}{of_each}")
    return lines


def _figures(report: Report, width: int) -> list[str]:
    points = report.points
    if len(points) > 1:
        return ["", *_rows(report, width)]
    if points and points[0].summary:
        return ["", *_one_point(points[0])]
    return []


def _conclusion(report: Report, width: int) -> list[str]:
    winning = winners(report)
    subject = "With it, the accelerator" if winning else "The accelerator"
    sentences = " ".join(verdict(report, subject))
    paragraphs = [*winning[:1], sentences, *winning[1:]]
    if report.interrupted:
        paragraphs.append("Interrupted: these are the figures up to that point.")
    return [line for paragraph in paragraphs for line in _wrapped(paragraph, width)]


def _failed(report: Report, width: int) -> list[str]:
    lines = []
    for error, names in failures(report).items():
        lines += ["", *_wrapped(f"failed: {'; '.join(names)}", width, "  ")]
        lines += [f"  {line}" for line in _wrapped(error, width - 2, "  ")]
    return lines


def _notes(report: Report, width: int) -> list[str]:
    lines = []
    for note in all_notes(report):
        lines += _wrapped(f"note: {note}", width, "  ")
    return ["", *lines] if lines else []


# One point


def _one_point(point: Point) -> list[str]:
    several = len(point.runs) > 1
    title = f"{'median':>12}   lowest - highest of {len(point.runs)} runs" if several else ""
    lines = []
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


# Several points


def _rows(report: Report, width: int) -> list[str]:
    """One row for each point: its settings, its rate, and whatever else there is room for."""
    lines = _settings_columns(report, width // 2)
    for column in _figure_columns(report):
        wider = _beside(lines, column)
        if max(map(len, wider)) <= width:
            lines = wider
    for number, point in enumerate(report.points, 1):
        if not point.summary:
            said = "failed" if point.errors else "not measured"
            lines[number] = f"{lines[number].rstrip()}  {said}"
    return [_fit(line.rstrip(), width) for line in lines]


def _settings_columns(report: Report, width: int) -> list[str]:
    """A header and a line for each point with the settings that differ; the best point is marked."""
    marked = best(report) if len(measured(report)) > 1 else None
    marks = ["* " if point is marked else "  " for point in report.points]
    first, *others = _settings_cells(report.points)
    lines = _beside(["  ", *marks], first, gap="")
    for column in others:
        lines = _beside(lines, column)
    if max(map(len, lines)) > width:
        lines = [_fit(line, width).ljust(width) for line in lines]
    return lines


def _settings_cells(points: Sequence[Point]) -> Iterator[list[str]]:
    keys = list(swept(points))
    for key in keys:
        yield [key, *(plain(str(setting(point, key))) for point in points)]
    if not keys:
        yield ["point", *(plain(point.name) for point in points)]


def _figure_columns(report: Report) -> Iterator[list[str]]:
    rate, points = main_rate(report), report.points
    if rate is None:
        return
    yield _medians(rate, points)
    if any(len(point.runs) > 1 for point in points):
        yield _spans(rate, points)
    known = known_metrics(points)
    for name in _TELLING:
        if name in known:
            yield _medians(BY_NAME[name], points)


def _medians(metric: Metric, points: Sequence[Point]) -> list[str]:
    cells = [_SHORT.get(metric.name, heading(metric))]
    for point in points:
        median = point.median(metric.name)
        cells.append("" if median is None else amount(median, metric.unit))
    return cells


def _spans(metric: Metric, points: Sequence[Point]) -> list[str]:
    cells = ["lowest - highest"]
    for point in points:
        values = point.summary.get(metric.name)
        cells.append(span(metric, values) if values else "")
    return cells


def _beside(lines: Sequence[str], column: Sequence[str], gap: str = "  ") -> list[str]:
    room = max(map(len, column))
    return [f"{line}{gap}{cell:>{room}}" for line, cell in zip(lines, column, strict=True)]


# Lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    lines = []
    for part in text.splitlines():
        lines += textwrap.wrap(plain(part), width, subsequent_indent=indent)
    return lines


def _fit(line: str, width: int) -> str:
    line = plain(line.replace("\n", "\\n").replace("\t", " "))
    return line if len(line) <= width else line[: max(0, width - 3)] + "..."
