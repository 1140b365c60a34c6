"""A report as one HTML page that needs nothing else: no network, no fonts, no scripts. Light, dark and on paper."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.measure.reporting import html_style
from headrace.measure.reporting.amounts import amount, heading, span
from headrace.measure.reporting.html_charts import text
from headrace.measure.reporting.html_comparison import comparison
from headrace.measure.reporting.html_costs import loop, making, memory, traces
from headrace.measure.reporting.html_elements import definitions, html_table, section
from headrace.measure.reporting.points import (
    BY_NAME,
    all_notes,
    best,
    best_median,
    failures,
    grouped,
    main_rate,
    measured,
)
from headrace.measure.reporting.report import Metric, Point, Report
from headrace.measure.reporting.verdict import verdict
from headrace.measure.reporting.without_directories import without_directories

_BIG = """utilisation wait_ms_p99 headroom first_batch_cold_seconds first_batch_warm_seconds wait_ms_p50
    peak_pss_mb""".split()
_MOST_BIG = 5
_GLOSSARY = {
    "accelerator used": "Compute time divided by the time of the whole loop, which is how MLPerf Storage defines "
    "the utilisation of an accelerator; the first steps are left out. A simulated step counts as the time that it is "
    "meant to take.",
    "waiting": "The share of the loop's time that it spent waiting for a batch. p50, p90, p99: this many "
    "percent of the waits were no longer.",
    "step": "One turn of the loop: the wait for a batch, and what is done with it.",
    "headroom": "How much less time steps would take with a loader that costs nothing: the same loop, measured again "
    "with a single batch that is already in memory.",
    "first batch, cold and warm": "From before the loader is made until its first batch arrives. Cold: its files were "
    "dropped from the page cache first. Warm: they were in memory.",
    "requests, fetched, from the cache": "What came over the network while batches were counted, and which share of "
    "the bytes came from Headrace's cache instead. Data of up to 128 units stays in memory, and is not fetched again.",
    "beginning": "Of remote data: the time from before the loader is made until the units that batches are drawn from "
    "have arrived, and what was fetched until then. Batches are counted only after that.",
    "PSS and USS": "The peak memory of all processes together. USS is the memory that belongs to one process "
    "alone; PSS also counts each process's part of the memory that it shares with others.",
    "CPU": "How many cores were busy on average, over all processes; the main process is the one "
    "that runs the loop.",
    "padding and cut off": "The share of tokens that are padding, and the share of the data's tokens that are "
    "left out.",
    "median, lowest, highest": "Over the runs, each in its own process. The points took turns, so that a slow "
    "minute on the machine affects all of them.",
}


def html(report: Report) -> str:
    report = without_directories(report)
    sections = (
        _headline(report),
        comparison(report),
        loop(report),
        making(report),
        traces(report),
        memory(report),
        _figures(report),
        _failed(report),
        _notes(report),
        section("Settings", "", definitions(_settings(report))),
        _machine(report),
        section("What the figures mean", "", definitions(_GLOSSARY)),
    )
    title = f"Headrace: {report.target}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{text(title)}</title>\n'
        f"<style>{html_style.STYLE}</style>\n</head>\n<body>\n{html_style.HATCH}\n<main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main>\n</body>\n</html>\n"
    )


# The headline


def _headline(report: Report) -> str:
    top = best(report)
    drawn = [
        f'<header><p class="eyebrow">Headrace benchmark</p><h1>{text(report.target)}</h1>',
        f'<p class="facts">{text(" · ".join(_facts(report)))}</p>',
        *_alerts(report),
    ]
    if top is not None and len(report.points) > 1:
        drawn.append(f'<p class="which">Best point: <b>{text(top.name)}</b></p>')
    first, *more = verdict(report)
    drawn.append(f'<p class="verdict">{text(first)}</p>')
    if more:
        drawn.append(f"<p>{text(' '.join(more))}</p>")
    drawn.append("</header>")
    if top is not None:
        drawn.append(_big_figures(report, top))
    return "".join(drawn)


def _facts(report: Report) -> list[str]:
    """How much was measured, with which step, and when."""
    points, facts = len(report.points), []
    runs = max((len(point.runs) for point in report.points), default=0)
    said = "1 run" if runs == 1 else f"{runs} runs"
    if points > 1:
        facts.append(f"{points} points")
        said += " of each"
    facts += [said, f"step: {report.step}"]
    if report.environment.get("date"):
        facts.append(str(report.environment["date"]))
    return facts


def _alerts(report: Report) -> list[str]:
    drawn = []
    if report.interrupted:
        drawn.append('<p class="alert"><b>Interrupted.</b> These are the figures up to that point.</p>')
    failed, points = sum(bool(point.errors) for point in report.points), len(report.points)
    if failed:
        said = f"{failed} of {points} points" if points > 1 else "The run"
        drawn.append(f'<p class="alert"><b>{said} failed.</b> The errors are below.</p>')
    return drawn


def _big_figures(report: Report, point: Point) -> str:
    rate, summary = main_rate(report), point.summary
    names = [rate.name, *_BIG] if rate else _BIG
    known = [name for name in names if name in summary]
    drawn = [_big_figure(BY_NAME[name], summary[name]) for name in known[:_MOST_BIG]]
    return f'<div class="big">{"".join(drawn)}</div>'


def _big_figure(metric: Metric, values: Mapping[str, float]) -> str:
    number, space, unit = amount(values["median"], metric.unit).partition(" ")
    spread = span(metric, values, "–") if values["lowest"] < values["highest"] else ""
    return (
        f'<div><p class="number">{text(number)}<small>{space}{text(unit)}</small></p>'
        f'<p class="label">{text(heading(metric))}</p><p class="range">{text(spread)}</p></div>'
    )


# All figures


def _figures(report: Report) -> str:
    points = measured(report)
    if len(points) == 1:
        return section("All figures", "", _point_table(points[0]))
    lead = "Medians; below them, the lowest and the highest run. The best value of each column is bold."
    tables = [_group_table(group, metrics, points) for group, metrics in grouped(points).items()]
    return section("All figures", lead, "".join(tables))


def _point_table(point: Point) -> str:
    """A table with a row for each figure of one point."""
    several = len(point.runs) > 1
    parts = ("median", "lowest", "highest") if several else ("median",)
    heads = ("", *parts) if several else ("", "one run")
    rows = []
    for group, metrics in grouped([point]).items():
        rows.append(f'<tr><th class="group" scope="rowgroup" colspan="{len(heads)}">{text(group)}</th></tr>')
        for metric in metrics:
            values = point.summary[metric.name]
            cells = "".join(f"<td>{text(amount(values[part], metric.unit))}</td>" for part in parts)
            rows.append(f'<tr><th scope="row">{text(heading(metric))}</th>{cells}</tr>')
    return html_table("", heads, rows)


def _group_table(group: str, metrics: Sequence[Metric], points: Sequence[Point]) -> str:
    """A table with a row for each point and a column for each figure of a group."""
    best_of = {metric.name: best_median(metric, points) for metric in metrics}
    rows = []
    for point in points:
        summary = point.summary
        cells = [_cell(metric, summary.get(metric.name), best_of[metric.name]) for metric in metrics]
        rows.append(f'<tr><th scope="row">{text(point.name)}</th>{"".join(cells)}</tr>')
    return html_table(group, ["point", *map(heading, metrics)], rows)


def _cell(metric: Metric, values: Mapping[str, float] | None, best_value: float | None) -> str:
    if values is None:
        return "<td>–</td>"
    median, spread = text(amount(values["median"], metric.unit)), ""
    if values["median"] == best_value:
        median = f"<b>{median}</b>"
    if values["lowest"] != values["highest"]:
        spread = f"<small>{text(span(metric, values, '–'))}</small>"
    return f"<td>{median}{spread}</td>"


# Below the figures


def _failed(report: Report) -> str:
    drawn = ""
    for error, names in failures(report).items():
        drawn += f"<h3>{text('; '.join(names))}</h3><pre>{text(error)}</pre>"
    return section("What failed", "", drawn)


def _notes(report: Report) -> str:
    items = "".join(f"<li>{text(note)}</li>" for note in all_notes(report))
    return section("Notes", "", f"<ul>{items}</ul>" if items else "")


def _settings(report: Report) -> dict[str, Any]:
    return {"target": report.target, "step": report.step, **report.settings}


def _machine(report: Report) -> str:
    known = {key: value for key, value in report.environment.items() if value is not None}
    listed = {key.replace("_gb", ", GB").replace("_", " "): _in_words(value) for key, value in known.items()}
    return section("Machine", "", definitions(listed) if listed else "")


def _in_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return value
