"""A report as one HTML page that needs nothing else: no network, no fonts, no scripts. Light, dark and on paper."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.measure.reporting import html_charts as charts
from headrace.measure.reporting.amounts import amount, heading, span
from headrace.measure.reporting.html_charts import BarPart, text
from headrace.measure.reporting.points import (
    BY_NAME,
    all_notes,
    best,
    best_median,
    failures,
    grouped,
    main_rate,
    measured,
    setting,
    stage_ms,
    swept,
)
from headrace.measure.reporting.report import Metric, Point, Report
from headrace.measure.reporting.verdict import GOAL, verdict, winners

_MOST_BARS = 30
_MOST_TRACES = 6
_LONGEST_PLACE = 40
"""So many characters fit below a chart, all places together."""
_COMPARED = ("utilisation", "wait_ms_p50", "wait_ms_p99", "mb_per_second", "cpu_cores")
_BIG = """utilisation wait_ms_p99 headroom first_batch_cold_seconds first_batch_warm_seconds wait_ms_p50
    peak_pss_mb""".split()
_NAME = r"[^\s/'\"<>:,;()]"
_PATH = re.compile(
    r"(?P<quote>['\"])/[^'\"\n]*/(?P<quoted>[^'\"/\n]*)(?P=quote)"
    rf"|(?:file://|(?<![\w.:/<]))/(?:{_NAME}+/)+(?P<last>{_NAME}*)"
)
"""From the root, in quotes or without spaces."""
_GLOSSARY = {
    "accelerator used": "Time of computing / time of the whole loop, as MLPerf Storage defines the utilisation of an "
    "accelerator; the first steps are left out. A simulated step counts with the time that it is meant to take.",
    "waiting": "The part of the loop's time in which it had asked for a batch and not got it. p50, p90, p99: so many "
    "percent of the waits were not longer.",
    "step": "One turn of the loop: the wait for its batch, and what is done with it.",
    "headroom": "How much less time steps would take with a loader that costs nothing: the same loop, measured again "
    "on one batch that is there already.",
    "first batch, cold and warm": "From before the loader is made until its first batch is there. Cold: its files were "
    "dropped from the page cache before. Warm: they were in memory.",
    "PSS and USS": "The highest memory of all processes together. USS is what belongs to one process alone; PSS also "
    "counts its part of what it shares with others.",
    "CPU": "How many cores were busy on average, of all processes; the main process is the one with the loop.",
    "padding and cut off": "The share of tokens that are padding, and the share of the data's tokens that is left out.",
    "median, lowest, highest": "Over the runs, each in a process of its own. The points took turns, so that a slow "
    "minute of the machine is shared by all.",
}


def html(report: Report) -> str:
    report = _public(report)
    sections = (
        _headline(report),
        _comparison(report),
        _loop(report),
        _making(report),
        _traces(report),
        _memory(report),
        _figures(report),
        _remarks(report),
        _circumstances(report),
        _section("What the figures mean", "", _definitions(_GLOSSARY)),
    )
    title = f"Headrace: {report.target}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{text(title)}</title>\n'
        f"<style>{charts.STYLE}</style>\n</head>\n<body>\n{charts.HATCH}\n<main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main>\n</body>\n</html>\n"
    )


def _public(report: Report) -> Report:
    """The same without the directories of this machine: reports are passed on."""

    def prose(said: str) -> str:
        if report.target.startswith("/"):
            said = said.replace(report.target, _last(report.target))
        return _PATH.sub(lambda found: found["quoted"] or found["last"] or "…", said)

    def value(found: Any) -> Any:
        if isinstance(found, Mapping):
            return {prose(str(key)): value(each) for key, each in found.items()}
        if isinstance(found, list | tuple):
            return [value(each) for each in found]
        if isinstance(found, str | Path):
            return _last(str(found)) if str(found).startswith("/") else prose(str(found))
        return found

    points = [
        dataclasses.replace(
            point,
            settings=value(point.settings),
            errors=[prose(error) for error in point.errors],
            runs=[{**run, "notes": [prose(n) for n in run.get("notes") or ()]} for run in point.runs],
        )
        for point in report.points
    ]
    return dataclasses.replace(
        report,
        target=value(report.target),
        settings=value(report.settings),
        step=prose(report.step),
        environment=value(report.environment),
        notes=[prose(note) for note in report.notes],
        points=points,
    )


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or "/"


def _section(title: str, lead: str, body: str) -> str:
    if not body:
        return ""
    said = f"<p>{text(lead)}</p>" if lead else ""
    return f"<section><h2>{text(title)}</h2>{said}{body}</section>"


def _definitions(pairs: Mapping[str, Any]) -> str:
    listed = "".join(f"<dt>{text(key)}</dt><dd>{text(value)}</dd>" for key, value in pairs.items())
    return f"<dl>{listed}</dl>"


def _headline(report: Report) -> str:
    runs = max((len(point.runs) for point in report.points), default=0)
    top, several = best(report), len(report.points) > 1
    facts = [f"{len(report.points)} points"] if several else []
    facts += [f"{runs} run{'' if runs == 1 else 's'}{' of each' if several else ''}", f"step: {report.step}"]
    facts += [str(report.environment["date"])] if report.environment.get("date") else []
    first, *more = verdict(report)
    drawn = [
        f'<header><p class="eyebrow">Headrace benchmark</p><h1>{text(report.target)}</h1>',
        f'<p class="facts">{text(" · ".join(facts))}</p>',
    ]
    if report.interrupted:
        drawn.append('<p class="alert"><b>Interrupted.</b> These are the figures until then.</p>')
    failed = [point for point in report.points if point.errors]
    if failed:
        said = f"{len(failed)} of {len(report.points)} points" if several else "The run"
        drawn.append(f'<p class="alert"><b>{said} failed.</b> The errors are below.</p>')
    if several and top is not None:
        drawn.append(f'<p class="which">Best point: <b>{text(top.name)}</b></p>')
    rest = f"<p>{text(' '.join(more))}</p>" if more else ""
    drawn.append(f'<p class="verdict">{text(first)}</p>{rest}</header>')
    return "".join(drawn) + (_big_figures(report, top) if top else "")


def _big_figures(report: Report, point: Point) -> str:
    rate = main_rate(report)
    names = [name for name in (rate.name if rate else "", *_BIG) if name in point.summary][:5]
    drawn = []
    for metric in [BY_NAME[name] for name in names]:
        values = point.summary[metric.name]
        number, space, unit = amount(values["median"], metric.unit).partition(" ")
        spread = span(metric, values, "–") if values["lowest"] < values["highest"] else ""
        drawn.append(
            f'<div><p class="number">{text(number)}<small>{space}{text(unit)}</small></p>'
            f'<p class="label">{text(heading(metric))}</p><p class="range">{text(spread)}</p></div>'
        )
    return f'<div class="big">{"".join(drawn)}</div>'


def _comparison(report: Report) -> str:
    """Of several points: each telling figure against what was swept."""
    points, rate = report.points, main_rate(report)
    known = {name for point in points for name in point.summary}
    if len(measured(report)) < 2 or rate is None:
        return ""
    metrics = [rate, *(BY_NAME[name] for name in _COMPARED if name in known)][:4]
    lead = " ".join(winners(report))
    lead += " Whiskers: lowest to highest run." if any(len(point.runs) > 1 for point in points) else ""
    axes = _axes(swept(points))
    lead += " A cross: not measured." if axes and len(measured(report)) < len(points) else ""
    if axes is None:
        barred, said = _most(report)
        drawn, keys = [_figure(heading(metric), _bars(metric, barred)) for metric in metrics], ""
        lead += said
    else:
        pictures = [_chart(metric, points, *axes) for metric in metrics]
        drawn = [_figure(picture.title, charts.lines(picture)) for picture in pictures]
        keys = charts.line_legend(list(pictures[0].lines)) if axes[1] else ""
    return _section("Points compared", lead, f'{keys}<div class="charts">{"".join(drawn)}</div>')


def _figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{text(caption)}</figcaption>{picture}</figure>"


def _axes(sweeps: Mapping[str, Sequence[Any]]) -> tuple[str, str | None] | None:
    """Which setting goes across and which has a line for each value; None if bars tell it better."""

    def fits(key: str) -> bool:
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in sweeps[key])
        return numbers and sum(len(str(value)) + 1 for value in sweeps[key]) <= _LONGEST_PLACE

    keys = list(sweeps)
    if len(keys) == 1:
        return (keys[0], None) if fits(keys[0]) else None
    if len(keys) == 2:
        for across, by in (keys, keys[::-1]):
            if fits(across) and len(sweeps[by]) <= charts.COLOURS:
                return across, by
    return None


def _chart(metric: Metric, points: Sequence[Point], across: str, by: str | None) -> charts.Chart:
    sweeps = swept(points)
    places = [str(value) for value in sorted(sweeps[across])]
    found: dict[str, dict[str, Any]] = {
        f"{by}={value}" if by else "": {} for value in (sweeps[by] if by else [""])
    }
    for point in points:
        line = f"{by}={setting(point, by)}" if by else ""
        found[line][str(setting(point, across))] = point.summary.get(metric.name)
    return charts.Chart(
        title=heading(metric),
        unit=metric.unit,
        axis=across,
        places=places,
        lines={line: [values.get(place) for place in places] for line, values in found.items()},
        goal=GOAL if metric.name == "utilisation" else None,
        goal_name=f"MLPerf Storage: {GOAL:.0%}",
    )


def _most(report: Report) -> tuple[list[Point], str]:
    """The points that get bars, and what to say if they are not all."""
    points, rate = measured(report), main_rate(report)
    if len(points) <= _MOST_BARS or rate is None:
        return points, ""
    ranked = sorted(points, key=lambda point: -(point.median(rate.name) or 0.0))[:_MOST_BARS]
    return ranked, f" Shown are the {_MOST_BARS} points with most {heading(rate)}; the tables have all."


def _bars(metric: Metric, points: Sequence[Point]) -> str:
    known = [(point.name, point.summary[metric.name]) for point in points if metric.name in point.summary]
    most = 1.0 if metric.unit == "%" else max((values["highest"] for _, values in known), default=0.0)
    rows = []
    for name, values in known:
        picture = charts.bar(f"{heading(metric)}, {name}", metric.unit, values, most)
        rows.append(charts.row(name, amount(values["median"], metric.unit), picture))
    return "".join(rows)


def _stacks(kinds: Mapping[str, str], rows: Sequence[tuple[str, str, Sequence[BarPart]]]) -> str:
    """A legend, and one bar of parts a row; all bars have one scale."""
    most = max((sum(part.value for part in parts) for _, _, parts in rows), default=0.0)
    drawn = [charts.row(name, value, charts.stack(name, "ms", parts, most)) for name, value, parts in rows]
    return f'{charts.legend(kinds)}<div class="rows">{"".join(drawn)}</div>' if rows else ""


def _loop(report: Report) -> str:
    """A turn of the loop on average: waiting, and the step."""
    points, said = _most(report)
    kinds, rows = {"waiting": "hatched", "step": "s0", "the rest": "s5"}, []
    for point in points:
        rate, share = point.median("batches_per_second"), point.median("wait_share")
        if rate and share is not None:
            each = 1e3 * point.ranks / rate
            used = point.median("utilisation")
            used = min(1 - share, 1 - share if used is None else used)
            shares = {"waiting": share, "step": used, "the rest": max(0.0, 1 - share - used)}
            parts = [BarPart(name, part * each, kinds[name]) for name, part in shares.items() if part > 0.005]
            rows.append((point.name, f"waits {amount(share, '%')} of {amount(each, 'ms')}", parts))
    lead = "One turn of the loop, on average: how long it waits for its batch, and how long it computes. The rest: "
    lead += f"what steps take beyond that, such as when making batches slows them.{said}"
    return _section("Where the time goes", lead, _stacks(kinds, rows))


def _making(report: Report) -> str:
    """What the loader itself counted: its stages and its queues."""
    points, said = _most(report)
    made = [(point, stages) for point in points if (stages := stage_ms(point))]
    names = dict.fromkeys(name for _, stages in made for name in stages)
    kinds = {name: f"s{number % charts.COLOURS}" for number, name in enumerate(names)}
    rows = []
    for point, stages in made:
        parts = [BarPart(stage, stages[stage], kind) for stage, kind in kinds.items() if stage in stages]
        value = f"{amount(sum(stages.values()), 'ms')} a batch{_queues(point)}"
        rows.append((point.name, value, parts))
    lead = "The work in one batch, by stage, all workers together: several do it side by side. "
    lead += f"A queue that is often empty when the loop asks is one that it waits for.{said}"
    return _section("What making a batch takes", lead, _stacks(kinds, rows))


def _queues(point: Point) -> str:
    stats = next(run["stats"] for run in point.runs if run.get("stats"))
    found = stats.get("queues", {}).items()
    return "".join(f"; queue {name!r} empty {amount(queue['empty_share'], '%')}" for name, queue in found)


def _traces(report: Report) -> str:
    found = ((point, run) for point in measured(report) for run in point.runs if run.get("series"))
    runs = list({id(point): (point, run) for point, run in found if run["series"].get("wait_ms")}.values())
    lead = "How long each step waited, in one run; of many steps, the longest of every few."
    if len(runs) > _MOST_TRACES:
        top = best(report)
        lead += f" {_MOST_TRACES} of {len(runs)} points, the best one first."
        runs = sorted(runs, key=lambda each: each[0] is not top)[:_MOST_TRACES]
    drawn = []
    for point, run in runs:
        steps = max(1, int(run.get("batches") or 1) // point.ranks)
        waits, p99 = run["series"]["wait_ms"], run.get("wait_ms_p99")
        drawn.append(_figure(point.name, charts.trace(f"wait of each step, {point.name}", waits, p99, steps)))
    return _section(
        "Waiting, step by step", lead, f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""
    )


def _memory(report: Report) -> str:
    points, said = _most(report)
    colours = {"peak_pss_mb": "s0 soft", "peak_uss_mb": "s2 soft"}
    kinds = {name: kind for name, kind in colours.items() if any(name in p.summary for p in points)}
    most = max([p.summary[name]["highest"] for p in points for name in kinds if name in p.summary] or [0])
    rows = []
    for point in points:
        known = {BY_NAME[name]: point.summary[name] for name in kinds if name in point.summary}
        value = " / ".join(amount(values["median"], "MB") for values in known.values())
        bars = [
            charts.bar(f"{metric.label}, {point.name}", "MB", values, most, kinds[metric.name], 11)
            for metric, values in known.items()
        ]
        rows += [charts.row(point.name, value, "".join(bars))] if known else []
    lead = f"The highest of all processes together, PSS above USS.{said}"
    keys = charts.legend({BY_NAME[name].label: kind for name, kind in kinds.items()})
    return _section("Memory", lead, f'{keys}<div class="rows">{"".join(rows)}</div>' if rows else "")


def _figures(report: Report) -> str:
    points = measured(report)
    if len(points) == 1:
        return _section("All figures", "", _point_table(points[0]))
    lead = "Medians; below them, the lowest and the highest run. The best of each column is bold."
    tables = [_group_table(group, metrics, points) for group, metrics in grouped(points).items()]
    return _section("All figures", lead, "".join(tables))


def _point_table(point: Point) -> str:
    """A row a figure."""
    parts = ("median", "lowest", "highest") if len(point.runs) > 1 else ("median",)
    rows = []
    for group, metrics in grouped([point]).items():
        wide = len(parts) + 1
        rows.append(f'<tr><th class="group" scope="rowgroup" colspan="{wide}">{text(group)}</th></tr>')
        for metric in metrics:
            values = point.summary[metric.name]
            cells = "".join(f"<td>{text(amount(values[part], metric.unit))}</td>" for part in parts)
            rows.append(f'<tr><th scope="row">{text(heading(metric))}</th>{cells}</tr>')
    return _table("", ["", *(parts if len(parts) > 1 else ("one run",))], rows)


def _group_table(group: str, metrics: Sequence[Metric], points: Sequence[Point]) -> str:
    """A row a point."""
    best_of = {metric.name: best_median(metric, points) for metric in metrics}
    rows = []
    for point in points:
        cells = []
        for metric in metrics:
            values = point.summary.get(metric.name)
            if values is None:
                cells.append("<td>–</td>")
                continue
            median = text(amount(values["median"], metric.unit))
            median = f"<b>{median}</b>" if values["median"] == best_of[metric.name] else median
            spread = f"<small>{text(span(metric, values, '–'))}</small>"
            spread = "" if values["lowest"] == values["highest"] else spread
            cells.append(f"<td>{median}{spread}</td>")
        rows.append(f'<tr><th scope="row">{text(point.name)}</th>{"".join(cells)}</tr>')
    return _table(group, ["point", *map(heading, metrics)], rows)


def _table(caption: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    named = f"<caption>{text(caption)}</caption>" if caption else ""
    top = "".join(f'<th scope="col">{text(head)}</th>' for head in heads)
    body = f"{named}<thead><tr>{top}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table>{body}</table></div>'


def _remarks(report: Report) -> str:
    failed = ""
    for error, names in failures(report).items():
        failed += f"<h3>{text('; '.join(names))}</h3><pre>{text(error)}</pre>"
    notes = "".join(f"<li>{text(note)}</li>" for note in all_notes(report))
    return _section("What failed", "", failed) + _section("Notes", "", f"<ul>{notes}</ul>" if notes else "")


def _circumstances(report: Report) -> str:
    settings = {"target": report.target, "step": report.step, **report.settings}
    environment = {}
    for key, value in report.environment.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {version}" for name, version in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        if value is not None:
            environment[key.replace("_gb", ", GB").replace("_", " ")] = value
    machine = _section("Machine", "", _definitions(environment) if environment else "")
    return _section("Settings", "", _definitions(settings)) + machine
