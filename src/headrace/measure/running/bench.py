"""A benchmark: every point of the sweeps, several rounds, each run in a process of its own.

    sweep num_workers=0,2  batch_size=16,64      ->  four points
    round 1: a b c d    round 2: b c d a    round 3: c d a b

Points take turns, so that a machine that slows down for a minute slows all of them. Before its first run, a point is
started once with its files dropped from the page cache, only to see how long the first batch takes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.errors import SettingsError
from headrace.measure.reporting.report import Point, Report, figures
from headrace.measure.running.children import Measured, TargetRun, run_child, run_ranks
from headrace.measure.running.environment import describe_environment
from headrace.measure.running.page_cache import UNPROVED, drop_files
from headrace.measure.running.run import Plan, Run
from headrace.measure.running.steps import Step
from headrace.measure.running.targets import Target

_MOST_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure and how often."""

    runs: int = 3
    sweeps: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values by setting; `ranks` is how many processes run at once, `dataset_size` the share that is used."""
    timeout_seconds: float = 60.0
    files: tuple[Path, ...] = ()
    """What the target reads, if it is a function: dropped from the page cache before a cold start."""
    cold: bool = True
    trace: str | None = None

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise SettingsError(f"runs={self.runs}: must be at least 1")
        if not 0 < self.timeout_seconds < float("inf"):
            raise SettingsError(f"timeout={self.timeout_seconds}: must be more than 0, and come to an end")
        for name, values in self.sweeps.items():
            if not values:
                raise SettingsError(f"sweep {name}: has no values; write {name}=1,2,4")
        count = len(list(self.points()))
        if count > _MOST_POINTS:
            raise SettingsError(
                f"the sweeps make {count} points: the most is {_MOST_POINTS}; sweep fewer values"
            )

    def to_json(self) -> dict[str, Any]:
        own = {"runs": self.runs, "timeout_seconds": self.timeout_seconds, "cold": self.cold}
        return {**own, "sweeps": {name: list(values) for name, values in self.sweeps.items()}}

    def points(self) -> Iterable[dict[str, Any]]:
        for values in itertools.product(*self.sweeps.values()):
            yield dict(zip(self.sweeps, values, strict=True))


Tell = Callable[[Point, int, Run, int], None]
"""Called while a run goes on: its point, its round, what was measured so far, and the process."""


def bench(
    target: Target, step: Step, plan: Plan, settings: BenchSettings, tell: Tell | None = None
) -> Report:
    """Ctrl-C ends it early: what was measured is in the report, which says so."""
    report = Report(
        target=target.name,
        settings=dict(target.settings),
        step=step.described,
        environment=describe_environment(),
        plan={**dataclasses.asdict(plan), **settings.to_json()},
        points=[_point(values) for values in settings.points()],
    )
    if step.compute_ms and "batch_size" in settings.sweeps:
        report.note(f"the simulated step takes {step.compute_ms:g} ms, however large the batch is")
    try:
        report.interrupted = _measure_all(report, target, step, plan, settings, tell)
    except KeyboardInterrupt:
        # Between two runs, or once more while the first was being heeded.
        report.interrupted = True
    return report


def _measure_all(
    report: Report, target: Target, step: Step, plan: Plan, settings: BenchSettings, tell: Tell | None
) -> bool:
    """Whether it was interrupted."""
    files = settings.files or tuple(target.files())
    for turn in range(settings.runs):
        shift = turn % len(report.points)
        for point in report.points[shift:] + report.points[:shift]:
            task = TargetRun(
                target=target,
                step=step,
                plan=plan,
                settings=point.settings,
                timeout_seconds=settings.timeout_seconds,
                trace=settings.trace if turn == 0 and point is report.points[0] else None,
            )
            if turn == 0 and settings.cold and _start_cold(task, point, files, report):
                return True
            if not point.errors and _measure(task, point, turn, report, tell):
                return True
    return False


def _start_cold(task: TargetRun, point: Point, files: Sequence[Path], report: Report) -> bool:
    """A process only for the first batch with a cold cache: the runs that count find the files in memory."""
    problem = drop_files(files)
    if problem is not None:
        report.note(f"first batch, cold: {problem}")
        if not problem.startswith(UNPROVED):
            return False
    first = replace(task, plan=Plan(batches=1, warmup=1), step=Step(), trace=None)
    ranks = run_ranks(first, point.ranks) if point.ranks > 1 else [run_child(first)]
    seconds = [each.run.first_batch_seconds for each in ranks]
    point.errors += [each.error for each in ranks if each.error is not None]
    known = [each for each in seconds if each is not None]
    if len(known) == len(ranks):
        point.cold_seconds = max(known)
    return any(each.interrupted for each in ranks)


def _point(values: Mapping[str, Any]) -> Point:
    settings = {name: value for name, value in values.items() if name != "ranks"}
    ranks = values.get("ranks", 1)
    if type(ranks) is not int or ranks < 1:
        raise SettingsError(f"ranks={ranks!r}: must be a number of processes")
    return Point(settings, ranks)


def _measure(task: TargetRun, point: Point, turn: int, report: Report, tell: Tell | None) -> bool:
    """Whether it was interrupted."""

    def told(run: Run, pid: int) -> None:
        if tell is not None:
            tell(point, turn, run, pid)

    ranks: list[Measured]
    if point.ranks > 1:
        ranks = run_ranks(task, point.ranks, told)
    else:
        ranks = [run_child(task, told)]
    if any(each.run.first_batch_seconds is not None for each in ranks):
        point.runs.append(figures(ranks))
    point.errors += [each.error for each in ranks if each.error is not None]
    if any(each.memory.pss is None and each.memory.rss is not None for each in ranks):
        report.note(
            "memory: this OS does not tell PSS; RSS counts pages that processes share for each of them"
        )
    report.environment["accelerators"] = report.environment["accelerators"] or ranks[0].run.accelerators
    return any(each.interrupted for each in ranks)
