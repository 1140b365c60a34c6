"""The pictures of a report, as SVG without a fixed width: horizontal positions are percentages, so text keeps its size.

    lines   a figure against a setting, one line for each value of another; whiskers from lowest to highest
    bar     one bar with whiskers
    stack   one bar of parts
    trace   how long each step of a run waited

Text is escaped here. Colours are the page's (`--c0` to `--c5`); marks also differ in shape, dashes or hatching.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from headrace.measure.reporting.amounts import amount, plain

Spread = Mapping[str, float]
COLOURS = 6
_SHAPES = (
    "M-4.5 0A4.5 4.5 0 1 0 4.5 0A4.5 4.5 0 1 0-4.5 0Z",
    "M-4-4H4V4H-4Z",
    "M0-5.5L5 4H-5Z",
    "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
    "M0 5.5L5-4H-5Z",
    "M-5-2V2H-2V5H2V2H5V-2H2V-5H-2V-2Z",
)
_DASHES = ("none", "7 4", "2 3", "10 3 2 3", "5 2", "1 4")
_TOP, _BASE, _HEIGHT = 24.0, 178.0, 218.0
GUTTER = 54
"""Charts begin this many pixels from the left, which leaves room for the values of the grid."""
_FROM, _TO = 9.0, 92.0
"""Where the first and the last place of an axis are, in percent."""
_DODGE = 6.0
"""Lines are shifted by this many pixels, so that their whiskers can be told apart."""
_MOST_LABELS = 7
_MOST_PLACES = 10
_TRACE_BASE, _TRACE_HEIGHT = 120.0, 146.0
_TRACE_UNITS = 1000.0


def text(value: object) -> str:
    return escape(plain(str(value)))


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a chart of lines shows: values by line, one for each place; None where nothing was measured."""

    title: str
    unit: str
    axis: str
    places: Sequence[str]
    lines: Mapping[str, Sequence[Spread | None]]
    goal: float | None = None
    goal_name: str = ""

    @property
    def highest(self) -> float:
        """The highest value of any run."""
        known = [spread for line in self.lines.values() for spread in line if spread is not None]
        return max((spread["highest"] for spread in known), default=0.0)


@dataclass(frozen=True)
class _Scale:
    """Where values stand above a base line, which is 0; the last tick is at the top of the chart."""

    ticks: Sequence[float]
    base: float

    def y(self, value: float) -> float:
        return self.base - (self.base - _TOP) * max(0.0, value) / self.ticks[-1]


def nice_ticks(highest: float, count: int = 4) -> list[float]:
    """From 0 to at least the highest, in steps of 1, 2, 2.5 or 5: 1153 -> 0, 500, 1000, 1500."""
    if not (highest > 0 and math.isfinite(highest)):
        return [0.0, 1.0]
    raw = highest / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((f * power for f in (1, 2, 2.5, 5, 10) if f * power >= raw * (1 - 1e-9)), 10 * power)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def _tick(value: float, unit: str) -> str:
    """No more digits than it needs: '1.50 k' -> '1.5 k'."""
    if not value:
        return "0"
    if unit == "%":
        return f"{100 * value:g}%"
    number, space, suffix = amount(value, unit).partition(" ")
    if number.startswith("<"):
        return f"{value:.1g}{space}{suffix}"
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return number + space + suffix


def _place(number: int, count: int) -> float:
    return (_FROM + _TO) / 2 if count == 1 else _FROM + (_TO - _FROM) * number / (count - 1)


def _said(spread: Spread, unit: str) -> str:
    said = amount(spread["median"], unit)
    if spread["lowest"] == spread["highest"]:
        return said
    return f"{said} ({amount(spread['lowest'], unit)} to {amount(spread['highest'], unit)})"


def _picture(title: str, description: str, height: float, inside: str, kind: str) -> str:
    return (
        f'<svg class="{kind}" role="img" width="100%" height="{height:g}"><title>{text(title)}</title>'
        f"<desc>{text(description)}</desc>{inside}</svg>"
    )


def lines(chart: Chart) -> str:
    scale = _Scale(_chart_ticks(chart), _BASE)
    drawn = [_grid(scale, chart.unit), _axis(chart)]
    if chart.goal is not None:
        drawn.append(_goal(chart, chart.goal, scale))
    drawn += [_Line(chart, number, scale).drawn() for number in range(len(chart.lines))]
    description = ". ".join(_described(chart, name) for name in chart.lines)
    return _picture(f"{chart.title} against {chart.axis}", description, _HEIGHT, "".join(drawn), "chart")


def _chart_ticks(chart: Chart) -> list[float]:
    if chart.unit == "%" and chart.highest <= 1:
        return [0.0, 0.25, 0.5, 0.75, 1.0]
    return nice_ticks(chart.highest)


def _described(chart: Chart, name: str) -> str:
    """The values of one line in words."""
    said = []
    for place, spread in zip(chart.places, chart.lines[name], strict=True):
        value = _said(spread, chart.unit) if spread else "not measured"
        said.append(f"{place}: {value}")
    values = "; ".join(said)
    return f"{name}: {values}" if name else values


def _grid(scale: _Scale, unit: str) -> str:
    drawn = []
    for tick in scale.ticks:
        at, kind = scale.y(tick), "grid" if tick else "base"
        drawn.append(f'<line class="{kind}" x1="-{GUTTER}" x2="100%" y1="{at:.1f}" y2="{at:.1f}"/>')
        drawn.append(f'<text class="tick" x="-{GUTTER}" y="{at - 4:.1f}">{text(_tick(tick, unit))}</text>')
    return "".join(drawn)


def _goal(chart: Chart, goal: float, scale: _Scale) -> str:
    """A dashed line, with its name on the side where no values are."""
    at = scale.y(goal)
    beside = at - 5 if chart.highest < goal else at + 14
    return (
        f'<line class="goal" x1="-{GUTTER}" x2="100%" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="note" x="100%" y="{beside:.1f}" text-anchor="end">{text(chart.goal_name)}</text>'
    )


def _axis(chart: Chart) -> str:
    """The places below the chart, or only some of them if there are many; a cross where nothing was measured."""
    count = len(chart.places)
    every = math.ceil(count / _MOST_PLACES)
    drawn = []
    for number, place in enumerate(chart.places):
        x = _place(number, count)
        if number % every == 0:
            drawn.append(
                f'<text class="tick" x="{x:.2f}%" y="{_BASE + 17}" text-anchor="middle">{text(place)}</text>'
            )
        missing = [name for name, values in chart.lines.items() if values[number] is None]
        if missing:
            drawn.append(_cross(x, f"{chart.axis}={place}", missing))
    middle = (_FROM + _TO) / 2
    drawn.append(
        f'<text class="note" x="{middle}%" y="{_BASE + 35}" text-anchor="middle">{text(chart.axis)}</text>'
    )
    return "".join(drawn)


def _cross(x: float, place: str, missing: Sequence[str]) -> str:
    """`missing` are the names of the lines without a value; the only line of a chart has none."""
    said = f"{place}: not measured"
    if any(missing):
        said += f" ({', '.join(missing)})"
    return (
        f'<svg x="{x:.2f}%" y="{_BASE}"><path class="missing" d="M-4-4L4 4M-4 4L4-4"/>'
        f"<title>{text(said)}</title></svg>"
    )


class _Line:
    """One line of a chart: its stretches, whiskers and marks; its values in figures if it is the only line."""

    def __init__(self, chart: Chart, number: int, scale: _Scale) -> None:
        self._chart, self._number, self._scale = chart, number, scale
        self._name, self._values = list(chart.lines.items())[number]
        self._has_labels = len(chart.lines) == 1 and len(self._values) <= _MOST_LABELS

    def drawn(self) -> str:
        shift = _DODGE * (self._number - (len(self._chart.lines) - 1) / 2)
        marks = [self._mark(at, value) for at, value in enumerate(self._values) if value is not None]
        inside = "".join([*self._stretches(), *marks])
        return f'<svg class="s{self._number % COLOURS}" x="{shift:g}">{inside}</svg>'

    def _x(self, at: int) -> str:
        return f"{_place(at, len(self._values)):.2f}%"

    def _stretches(self) -> Iterator[str]:
        """From each value to the next; a line has a gap where nothing was measured."""
        dash = _DASHES[self._number % COLOURS]
        for at, (before, after) in enumerate(pairwise(self._values)):
            if before is not None and after is not None:
                y1, y2 = self._scale.y(before["median"]), self._scale.y(after["median"])
                yield (
                    f'<line class="stretch" x1="{self._x(at)}" x2="{self._x(at + 1)}" '
                    f'y1="{y1:.1f}" y2="{y2:.1f}" stroke-dasharray="{dash}"/>'
                )

    def _mark(self, at: int, value: Spread) -> str:
        low, high, middle = (self._scale.y(value[each]) for each in ("lowest", "highest", "median"))
        place = f"{self._chart.axis}={self._chart.places[at]}"
        name = f"{self._name}, {place}" if self._name else place
        drawn = f"<title>{text(name)}: {text(_said(value, self._chart.unit))}</title>"
        # A whisker that its mark would cover is left out.
        if max(low - middle, middle - high) > 5:
            drawn += f'<path class="whisker" d="M0 {low:.1f}V{high:.1f}M-4 {low:.1f}H4M-4 {high:.1f}H4"/>'
        shape = _SHAPES[self._number % COLOURS]
        drawn += f'<path class="mark" transform="translate(0 {middle:.1f})" d="{shape}"/>'
        if self._has_labels:
            label = text(amount(value["median"], self._chart.unit))
            drawn += f'<text class="value" y="{high - 9:.1f}" text-anchor="middle">{label}</text>'
        return f'<svg x="{self._x(at)}">{drawn}</svg>'


def _legend_mark(number: int) -> str:
    """How line `number` looks, for the legend."""
    return (
        f'<svg class="key s{number % COLOURS}" width="34" height="14" aria-hidden="true">'
        f'<line class="stretch" x1="1" x2="33" y1="7" y2="7" stroke-dasharray="{_DASHES[number % COLOURS]}"/>'
        f'<path class="mark" transform="translate(17 7)" d="{_SHAPES[number % COLOURS]}"/></svg>'
    )


def bar(
    title: str, unit: str, spread: Spread, most: float, kind: str = "s0 soft", height: float = 14.0
) -> str:
    """One bar; a value of `most` fills the whole width."""
    scale = 100.0 / most if most > 0 else 0.0
    low, high, middle = (max(0.0, spread[each]) * scale for each in ("lowest", "highest", "median"))
    half = height / 2
    drawn = f'<rect class="fill {kind}" width="{max(middle, 0.3):.2f}%" height="{height:g}"/>'
    if high - low > 0.5:
        ends = "".join(
            f'<line class="over" x1="{x:.2f}%" x2="{x:.2f}%" y1="{half - 4:g}" y2="{half + 4:g}"/>'
            for x in (low, high)
        )
        drawn += f'<line class="over" x1="{low:.2f}%" x2="{high:.2f}%" y1="{half:g}" y2="{half:g}"/>{ends}'
    return _picture(title, _said(spread, unit), height, drawn, "bar")


@dataclass(frozen=True)
class BarPart:
    name: str
    value: float
    kind: str
    """The class that colours it."""


def stack(title: str, unit: str, parts: Sequence[BarPart], most: float) -> str:
    """One bar of parts, each with its name where there is room for it."""
    scale, height = 100.0 / most if most > 0 else 0.0, 24.0
    drawn, begun = [], 0.0
    for part in parts:
        wide = max(0.5, part.value * scale)
        said = f"{part.name}: {amount(part.value, unit)}"
        label = f'<text x="6" y="16">{text(part.name)}</text>' if wide > 2 * len(part.name) + 5 else ""
        drawn.append(
            f'<svg class="clip" x="{begun:.2f}%" width="{wide:.2f}%" height="{height:g}"><title>{text(said)}</title>'
            f'<rect class="fill {part.kind}" width="100%" height="{height:g}"/>{label}'
            f'<line class="edge" x1="100%" x2="100%" y1="0" y2="{height:g}"/></svg>'
        )
        begun += wide
    said = "; ".join(f"{part.name}: {amount(part.value, unit)}" for part in parts)
    return _picture(title, said, height, "".join(drawn), "bar stack")


def trace(title: str, values: Sequence[float], p99: float | None, steps: int) -> str:
    """How long the steps of a run waited, in milliseconds, one after the other; p99 is a dashed line."""
    scale = _Scale(nice_ticks(max([*values, p99 or 0.0]), 3), _TRACE_BASE)
    drawn = [_grid(scale, "ms"), _waits(values, scale)]
    said = f"{steps:,} steps; waits of {amount(min(values), 'ms')} to {amount(max(values), 'ms')}"
    if p99 is not None:
        drawn.append(_p99(p99, scale))
        said += f"; p99 {amount(p99, 'ms')}"
    below = _TRACE_BASE + 17
    last = f"step {steps:,}" if steps > 1 else ""
    drawn.append(f'<text class="tick" x="0" y="{below:g}">step 1</text>')
    drawn.append(f'<text class="tick" x="100%" y="{below:g}" text-anchor="end">{last}</text>')
    return _picture(title, said, _TRACE_HEIGHT, "".join(drawn), "chart")


def _waits(values: Sequence[float], scale: _Scale) -> str:
    across = _TRACE_UNITS / max(1, len(values) - 1)
    places = [f"{number * across:.1f},{scale.y(value):.1f}" for number, value in enumerate(values)]
    if len(places) == 1:
        places.append(f"{_TRACE_UNITS:g},{scale.y(values[0]):.1f}")
    return (
        f'<svg class="s0" width="100%" height="{_TRACE_HEIGHT:g}" '
        f'viewBox="0 0 {_TRACE_UNITS:g} {_TRACE_HEIGHT:g}" '
        f'preserveAspectRatio="none"><polyline class="trace" points="{" ".join(places)}"/></svg>'
    )


def _p99(value: float, scale: _Scale) -> str:
    at, said = scale.y(value), text(amount(value, "ms"))
    return (
        f'<line class="goal" x1="0" x2="100%" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="value" x="100%" y="{at - 5:.1f}" text-anchor="end">p99 {said}</text>'
    )


def row(name: str, value: str, picture: str) -> str:
    """A bar with its name and its value above it."""
    return f'<div class="row"><span>{text(name)}</span><span class="at">{text(value)}</span>{picture}</div>'


def legend(kinds: Mapping[str, str]) -> str:
    """Names by the classes that colour them."""
    keys = "".join(
        f'<li><svg class="key" width="14" height="14" aria-hidden="true"><rect class="fill {kind}" width="14" '
        f'height="14"/></svg> {text(name)}</li>'
        for name, kind in kinds.items()
    )
    return f'<ul class="legend">{keys}</ul>'


def line_legend(names: Sequence[str]) -> str:
    keys = "".join(f"<li>{_legend_mark(number)} {text(name)}</li>" for number, name in enumerate(names))
    return f'<ul class="legend">{keys}</ul>'
