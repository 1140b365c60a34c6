"""A report in sentences: does the accelerator wait, what for, and which point is best?"""

from collections.abc import Mapping, Sequence

from headrace.measure.reporting.amounts import amount, shown
from headrace.measure.reporting.points import best, main_rate, measured, stage_ms
from headrace.measure.reporting.report import Metric, Point, Report
from headrace.observe.stats import SERVER_QUEUE, is_waiting

GOAL = 0.9
"""The accelerator utilisation that MLPerf Storage asks for."""
_UNEXPLAINED_SHARE = 0.05
"""If more of the time than this is neither computing nor waiting, the verdict mentions it."""
_HEADROOM_SHARE = 0.01
"""Less headroom than this is not worth a number."""
_BUSIER_BY = 0.01
"""How much more another point must use the accelerator to be named."""
_MOST_RIVALS = 3


def verdict(report: Report, subject: str = "The accelerator") -> list[str]:
    """Sentences about the best point: does the accelerator wait, what for, and what would a better loader change?"""
    point = best(report)
    if point is None:
        return ["Nothing was measured."]
    waited = point.median("wait_share")
    if waited is None:
        return ["No batch was counted: only the start was measured."]
    used = point.median("utilisation")
    if used is None:
        return _without_step(point, main_rate(report))
    sentences = [_waiting(subject, waited, stage_ms(point)), _goal(used)]
    unexplained = 1 - used - waited
    if unexplained > _UNEXPLAINED_SHARE:
        said = "steps take longer than their computation, for example because making batches slows them down"
        sentences.append(f"The other {amount(unexplained, '%')} is neither: {said}.")
    headroom = point.median("headroom")
    if headroom is not None:
        sentences.append(_headroom(headroom))
    return sentences


def _without_step(point: Point, rate: Metric | None) -> list[str]:
    most = shown(rate, point.median(rate.name) or 0.0) if rate else "this"
    return [
        f"No step was given, so the loop only loads: {most} is the maximum.",
        "Whether an accelerator would wait depends on how long its step takes: run the benchmark with a step.",
    ]


def _waiting(subject: str, share: float, stages: Mapping[str, float]) -> str:
    if not is_waiting(share):
        return f"{subject} hardly waits for data: {amount(share, '%')} of the time."
    said = f"{subject} waits for data {amount(share, '%')} of the time"
    # To wait for a server is no work.
    work = {name: seconds for name, seconds in stages.items() if name != SERVER_QUEUE}
    whole = sum(work.values())
    if not whole:
        return f"{said}."
    busiest = next(iter(work))
    return f"{said}; {busiest!r} accounts for {work[busiest] / whole:.0%} of the work of making batches."


def _goal(used: float) -> str:
    # Rounded first: '90.0%, less than 90%' would be odd.
    reached = "reached" if round(used, 3) >= GOAL else "not reached"
    return f"It computes {amount(used, '%')} of the time; MLPerf Storage asks for {GOAL:.0%}: {reached}."


def _headroom(share: float) -> str:
    if share < _HEADROOM_SHARE:
        return "A loader that costs nothing would not make the steps noticeably faster."
    faster = f" ({amount(1 / (1 - share), '')} times as many per second)" if share < 0.999 else ""
    return f"With a loader that costs nothing, steps would take {amount(share, '%')} less time{faster}."


def winners(report: Report) -> list[str]:
    """Of several points: which one is best, and which ones cannot be told apart from it."""
    top, rate = best(report), main_rate(report)
    points = measured(report)
    if top is None or rate is None or len(points) < 2:
        return []
    lines = [_fastest(top, rate, points)]
    busiest = max(points, key=_utilisation)
    used = _utilisation(busiest)
    if used > _utilisation(top) + _BUSIER_BY:
        lines.append(f"The accelerator is used most with {busiest.name} ({amount(used, '%')}).")
    return lines


def _utilisation(point: Point) -> float:
    return point.median("utilisation") or 0.0


def _fastest(top: Point, rate: Metric, points: Sequence[Point]) -> str:
    median = top.summary[rate.name]["median"]
    said = f"Highest {rate.label}/s: {top.name} ({amount(median, rate.unit)})."
    rivals = _overlapping(top, rate, points)
    # A single run has no spread that others could overlap with.
    if not rivals or len(top.runs) < 2:
        return said
    listed = "; ".join(rivals[:_MOST_RIVALS])
    if len(rivals) > _MOST_RIVALS:
        listed += f"; and {len(rivals) - _MOST_RIVALS} more"
    return f"{said} Its runs overlap with those of {listed}."


def _overlapping(top: Point, rate: Metric, points: Sequence[Point]) -> list[str]:
    """The names of the points with a run that is as fast as the slowest run of the best point."""
    slowest = top.summary[rate.name]["lowest"]
    names = []
    for point in points:
        values = point.summary.get(rate.name)
        if point is not top and values and values["highest"] >= slowest:
            names.append(point.name)
    return names
