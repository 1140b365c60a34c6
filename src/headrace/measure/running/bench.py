"""A benchmark: every point of the sweeps, in several rounds, with each run in a process of its own.

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
from headrace.measure.running.children import Measured, TargetRun, check, run_child, run_ranks
from headrace.measure.running.children import Tell as TellRun
from headrace.measure.running.environment import describe_environment
from headrace.measure.running.page_cache import UNPROVED, drop_files
from headrace.measure.running.run import Plan, Run
from headrace.measure.running.steps import Step
from headrace.measure.running.targets import Target
from headrace.store.address import is_address

_MOST_POINTS = 200
_ONE_BATCH = Plan(batches=1, warmup=1, beginning_seconds=0)
_NO_COLD_START = (
    "first batch, cold: not measured: remote data is not in the page cache; the first batch comes from the network, or "
    "from Headrace's cache if a run before has put it there (--cache off: from the network in every run)"
)

_SECRET = ("token",)
"""Settings that no report shows."""
_COLD_SERVERS = "first batch, cold: not measured: the data is read by the servers"


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure and how often."""

    runs: int = 3
    sweeps: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The values to try, by setting. `ranks` is the number of processes that run at once, and `dataset_size` the share
    of the dataset that is used."""
    timeout_seconds: float = 60.0
    files: tuple[Path, ...] = ()
    """The files that a function's loader reads; they are dropped from the page cache before a cold start."""
    cold: bool = True
    trace: str | None = None

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise SettingsError(f"runs={self.runs}: must be at least 1")
        if not 0 < self.timeout_seconds < float("inf"):
            raise SettingsError(f"timeout={self.timeout_seconds}: must be a finite number above 0")
        for name, values in self.sweeps.items():
            if not values:
                raise SettingsError(f"sweep {name!r}: no values were given; write '{name}=1,2,4'")
        count = len(list(self.points()))
        if count > _MOST_POINTS:
            raise SettingsError(
                f"the sweeps combine to {count} points, but at most {_MOST_POINTS} are allowed; sweep fewer values"
            )

    def to_json(self) -> dict[str, Any]:
        own = {"runs": self.runs, "timeout_seconds": self.timeout_seconds, "cold": self.cold}
        return {**own, "sweeps": {name: list(values) for name, values in self.sweeps.items()}}

    def points(self) -> Iterable[dict[str, Any]]:
        for values in itertools.product(*self.sweeps.values()):
            yield dict(zip(self.sweeps, values, strict=True))


Tell = Callable[[Point, int, Run, int], None]
"""Called during a run with its point, its round, what was measured so far, and the process id."""


def bench(
    target: Target, step: Step, plan: Plan, settings: BenchSettings, tell: Tell | None = None
) -> Report:
    """Measure every point. After Ctrl-C, the report holds what was measured so far, and `interrupted` is set.

    TargetError at once if the target or its step cannot be imported: then no point can be measured.
    """
    report = Report(
        target=target.name,
        settings={name: value for name, value in target.settings.items() if name not in _SECRET},
        step=step.described,
        environment=describe_environment(),
        plan={**dataclasses.asdict(plan), **settings.to_json()},
        points=[_point(values) for values in settings.points()],
    )
    if step.compute_ms and "batch_size" in settings.sweeps:
        report.note(f"the simulated step takes {step.compute_ms:g} ms, however large the batch is")
    benchmark = _Benchmark(target, step, plan, settings, tell, report)
    try:
        report.interrupted = benchmark.measure_all()
    except KeyboardInterrupt:
        # Between two runs, or a second time while the first Ctrl-C was being handled.
        report.interrupted = True
    return report


def _point(values: Mapping[str, Any]) -> Point:
    settings = {name: value for name, value in values.items() if name != "ranks"}
    ranks = values.get("ranks", 1)
    if type(ranks) is not int or ranks < 1:
        raise SettingsError(f"ranks={ranks!r}: must be a whole number of processes, at least 1")
    return Point(settings, ranks)


@dataclass(frozen=True)
class _Benchmark:
    """What to measure, and the report that is filled in. The methods return whether they were interrupted."""

    target: Target
    step: Step
    plan: Plan
    settings: BenchSettings
    tell: Tell | None
    report: Report

    def measure_all(self) -> bool:
        files = self.settings.files or tuple(self.target.files())
        is_remote = self.target.is_served or is_address(self.target.name)
        if is_remote and self.settings.cold:
            self.report.note(_COLD_SERVERS if self.target.is_served else _NO_COLD_START)
        for turn in range(self.settings.runs):
            for point in self._points_of_round(turn):
                task = self._task(point, turn)
                is_cold = turn == 0 and self.settings.cold and not is_remote
                if is_cold and self._start_cold(task, point, files):
                    return True
                if not point.errors and self._measure(task, point, turn):
                    return True
        return False

    def _points_of_round(self, turn: int) -> list[Point]:
        """All of them; each round begins with another one."""
        points = self.report.points
        shift = turn % len(points)
        return points[shift:] + points[:shift]

    def _task(self, point: Point, turn: int) -> TargetRun:
        is_very_first = turn == 0 and point is self.report.points[0]
        return TargetRun(
            target=self.target,
            step=self.step,
            plan=self.plan,
            settings=point.settings,
            timeout_seconds=self.settings.timeout_seconds,
            trace=self.settings.trace if is_very_first else None,
        )

    def _start_cold(self, task: TargetRun, point: Point, files: Sequence[Path]) -> bool:
        """Time only the first batch, with a cold cache; the runs that count find the files in memory."""
        problem = drop_files(files)
        if problem is not None and not problem.startswith(UNPROVED):
            self.report.note(f"first batch, cold: not measured: {problem}")
            return False
        if problem is not None:
            self.report.note(f"first batch, cold: {problem}")
        first = replace(task, plan=_ONE_BATCH, step=Step(), trace=None)
        ranks = _run(first, point.ranks)
        point.errors += _errors(ranks)
        seconds = [rank.run.first_batch_seconds for rank in ranks]
        known = [each for each in seconds if each is not None]
        if len(known) == len(ranks):
            point.cold_seconds = max(known)
        return _was_interrupted(ranks)

    def _measure(self, task: TargetRun, point: Point, turn: int) -> bool:
        def told(run: Run, pid: int) -> None:
            if self.tell is not None:
                self.tell(point, turn, run, pid)

        ranks = _run(task, point.ranks, told)
        if any(rank.run.first_batch_seconds is not None for rank in ranks):
            point.runs.append(figures(ranks))
        point.errors += _errors(ranks)
        if any(rank.memory.pss is None and rank.memory.rss is not None for rank in ranks):
            self.report.note(
                "memory: this OS does not report PSS; RSS counts a page that processes share once for each of them"
            )
        environment = self.report.environment
        environment["accelerators"] = environment["accelerators"] or ranks[0].run.accelerators
        return _was_interrupted(ranks)


def _run(task: TargetRun, ranks: int, tell: TellRun | None = None) -> list[Measured]:
    measured = run_ranks(task, ranks, tell) if ranks > 1 else [run_child(task, tell)]
    for each in measured:
        if not each.imported:
            check(each)
    return measured


def _errors(ranks: Sequence[Measured]) -> list[str]:
    return [rank.error for rank in ranks if rank.error is not None]


def _was_interrupted(ranks: Sequence[Measured]) -> bool:
    return any(rank.interrupted for rank in ranks)
