"""What the sections of a page are made of. Text is escaped here."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.measure.reporting.amounts import heading
from headrace.measure.reporting.html_charts import text
from headrace.measure.reporting.points import main_rate, measured
from headrace.measure.reporting.report import Point, Report

_MOST_BARS = 30


def section(title: str, lead: str, body: str) -> str:
    """Empty if there is nothing to show."""
    if not body:
        return ""
    said = f"<p>{text(lead)}</p>" if lead else ""
    return f"<section><h2>{text(title)}</h2>{said}{body}</section>"


def definitions(pairs: Mapping[str, Any]) -> str:
    listed = "".join(f"<dt>{text(key)}</dt><dd>{text(value)}</dd>" for key, value in pairs.items())
    return f"<dl>{listed}</dl>"


def figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{text(caption)}</figcaption>{picture}</figure>"


def figures(drawn: Iterable[str]) -> str:
    joined = "".join(drawn)
    return f'<div class="charts">{joined}</div>' if joined else ""


def bar_rows(legend: str, drawn: Iterable[str]) -> str:
    """Rows of bars below their legend; empty if there are no rows."""
    joined = "".join(drawn)
    return f'{legend}<div class="rows">{joined}</div>' if joined else ""


def html_table(caption: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    named = f"<caption>{text(caption)}</caption>" if caption else ""
    top = "".join(f'<th scope="col">{text(head)}</th>' for head in heads)
    body = f"{named}<thead><tr>{top}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table>{body}</table></div>'


def points_with_bars(report: Report) -> tuple[list[Point], str]:
    """The points that get bars, and a sentence to add to the lead if some points are left out."""
    points, rate = measured(report), main_rate(report)
    if len(points) <= _MOST_BARS or rate is None:
        return points, ""
    fastest_first = sorted(points, key=lambda point: -(point.median(rate.name) or 0.0))
    hint = f" Only the {_MOST_BARS} points with the highest {heading(rate)} are shown; the tables list all of them."
    return fastest_first[:_MOST_BARS], hint
