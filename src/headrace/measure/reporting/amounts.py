"""Figures as people read them: three digits, a unit, and no character that would act on a terminal."""

import math
import re
from collections.abc import Mapping

from headrace.measure.reporting.report import Metric

_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "ms": ((1e3, " s"), (0, " ms")),
    "MB": ((1e6, " TB"), (1e3, " GB"), (0, " MB")),
    "MB/s": ((1e6, " TB/s"), (1e3, " GB/s"), (0, " MB/s")),
    "/s": ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"), (0, "")),
}
_NO_SCALE = ((0, ""),)
_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def plain(text: str) -> str:
    """Control characters and characters that are not valid text are replaced by their escape codes."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def amount(value: float, unit: str) -> str:
    """In three digits, unless it is a count: 1153.5 '/s' -> '1.15 k', 0.0124 's' -> '12.4 ms', 0.721 '%' -> '72.1%'."""
    if not math.isfinite(value):
        return "unknown"
    if unit == "count":
        return f"{value:,.0f}"
    if unit == "%":
        return "<0.1%" if 0 < value < 0.0005 else f"{100 * value:.1f}%"
    if unit == "s":
        value, unit = value * 1e3, "ms"
    value = float(f"{value:.3g}")
    # The last entry of a scale begins at 0, so there is always one.
    scale = _SCALES.get(unit, _NO_SCALE)
    least, suffix = next((least, suffix) for least, suffix in scale if abs(value) >= least)
    return _three_digits(value / (least or 1)) + suffix


def _three_digits(value: float) -> str:
    if not value:
        return "0"
    if 0 < value < 0.001:
        return "<0.001"
    digits_before_point = math.floor(math.log10(abs(value))) + 1
    return f"{value:,.{max(0, 3 - digits_before_point)}f}"


def heading(metric: Metric) -> str:
    return f"{metric.label}/s" if metric.unit == "/s" else metric.label


def shown(metric: Metric, value: float) -> str:
    """The value together with what it counts: '1.15 k samples/s'."""
    counted = f" {metric.label}/s" if metric.unit == "/s" else ""
    return amount(value, metric.unit) + counted


def span(metric: Metric, values: Mapping[str, float], dash: str = "-") -> str:
    """From the lowest to the highest: '510 - 543'."""
    low = amount(values["lowest"], metric.unit)
    high = amount(values["highest"], metric.unit)
    return low if low == high else f"{low} {dash} {high}"
