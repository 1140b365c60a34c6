"""Tuning a target: the search of `search.py` on real measurements, in child processes or in this one."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from headrace.errors import SettingsError, TargetError
from headrace.measure import clock
from headrace.measure.running.children import TargetRun, run_child
from headrace.measure.running.knobs import Knobs, knobs_of
from headrace.measure.running.network import network_figures
from headrace.measure.running.run import Plan, Run, measure
from headrace.measure.running.steps import Step
from headrace.measure.running.targets import Target
from headrace.measure.tuning.search import Search, Trial, Tuning
from headrace.measure.tuning.servers import served_trial
from headrace.public import public

BUDGET_SECONDS = 60.0
_SHARE_OF_A_TRIAL = 1 / 30
_SHARE_OF_A_BEGINNING = 1 / 10
"""What remote data may take to arrive; a cache makes it short from the second trial on."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.5, 3.0
_SHORTEST_TIMEOUT = 3.0

Tell = Callable[[Trial], None]
Runner = Callable[[Mapping[str, Any], Step], tuple[Run, Knobs | None]]


@public
def tune(
    make_loader: Callable[..., Any],
    *,
    step: Callable[[Any], Any] | None = None,
    compute_ms: float | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    keep: Iterable[str] = (),
    progress: Tell | None = None,
) -> Tuning:
    """Find the best workers, prefetch depth and batch size for `make_loader` and `step`, measured in this process.

    `make_loader(num_workers=..., batch_size=...)` receives the settings that it has parameters for; if it returns a
    DataLoader, the other settings are applied to a new one made from its parts. `step(batch)` is the training step;
    `compute_ms` simulates one. Settings in `keep` are not changed.
    """
    if not callable(make_loader):
        raise SettingsError(f"make_loader={make_loader!r}: must be a function that returns a loader")
    name = getattr(make_loader, "__qualname__", type(make_loader).__qualname__)
    target = Target(name=name, function=make_loader)

    def run_here(settings: Mapping[str, Any], chosen: Step) -> tuple[Run, Knobs | None]:
        found: list[Knobs] = []

        def make() -> Any:
            loader = target.make(**settings)
            found.append(knobs_of(target, loader))
            return loader

        run = measure(make, chosen, _plan(budget_seconds))
        return run, found[0]

    chosen = Step(compute_ms=compute_ms, function=step)
    return _tune(run_here, chosen, budget_seconds, keep, progress)


def tune_target(
    target: Target,
    *,
    step: Step,
    budget_seconds: float = BUDGET_SECONDS,
    keep: Iterable[str] = (),
    timeout_seconds: float = 60.0,
    progress: Tell | None = None,
) -> Tuning:
    """Like `tune`, but each trial runs in its own process."""

    deadline = clock.now() + budget_seconds

    def run_there(settings: Mapping[str, Any], chosen: Step) -> tuple[Run, Knobs | None]:
        # A setting that hangs must not use up the budget; the given settings have the full timeout.
        left = max(_SHORTEST_TIMEOUT, deadline - clock.now()) if settings else timeout_seconds
        task = TargetRun(
            target=target,
            step=chosen,
            plan=_plan(budget_seconds),
            settings=settings,
            timeout_seconds=min(timeout_seconds, left),
        )
        measured = run_child(task)
        if measured.interrupted:
            raise KeyboardInterrupt
        if measured.error is not None:
            raise TargetError(measured.error)
        knobs = measured.run.knobs
        return measured.run, None if knobs is None else Knobs(**knobs)

    return _tune(run_there, step, budget_seconds, keep, progress)


def _plan(budget_seconds: float) -> Plan:
    seconds = min(max(budget_seconds * _SHARE_OF_A_TRIAL, _SHORTEST_SECONDS), _LONGEST_SECONDS)
    return Plan(seconds=seconds, beginning_seconds=budget_seconds * _SHARE_OF_A_BEGINNING)


def _tune(
    runner: Runner, step: Step, budget_seconds: float, keep: Iterable[str], progress: Tell | None
) -> Tuning:
    trials = _Trials(runner, step)
    search = Search(trials.measure, budget_seconds, progress, clock.now)
    baseline = trials.measure({})
    if baseline.error is not None:
        raise TargetError(baseline.error)
    return search.run(baseline, _tunable(trials.knobs, frozenset(keep)))


class _Trials:
    """Measures one setting after another. The first trial, of what was given, finds the `knobs`."""

    def __init__(self, runner: Runner, step: Step) -> None:
        self._runner, self._step = runner, step
        self.knobs = Knobs()

    def measure(self, settings: Mapping[str, Any]) -> Trial:
        begun = clock.now()
        try:
            run, knobs = self._runner(settings, _scaled(self._step, settings, self.knobs))
        except (SettingsError, TargetError) as error:
            return Trial(settings=settings, rate=None, error=str(error), cost_seconds=clock.now() - begun)
        if not settings and knobs is not None:
            self.knobs = knobs if run.samples else knobs.without(["batch_size"])
        return Trial(
            settings=settings,
            rate=_rate(run),
            wait_share=run.wait_share,
            headroom=run.headroom,
            cpu_cores=run.cpu_cores,
            network=network_figures([run]),
            served=served_trial(run),
            is_warm=run.beginning is None or run.beginning["is_over"],
            cost_seconds=clock.now() - begun,
            error=None if run.seconds else "too few batches to measure",
        )


def _rate(run: Run) -> float | None:
    """Samples per second, or batches if their size is unknown, in which case it is not tuned."""
    return (run.samples or run.batches) / run.seconds if run.seconds else None


def _tunable(knobs: Knobs, kept: frozenset[str]) -> Knobs:
    """The knobs without those that the user keeps as they are."""
    named = knobs.now or {}
    unknown = kept - set(named)
    if unknown:
        raise SettingsError(
            f"keep={_quoted(sorted(unknown))}: the target has no such setting; it has "
            f"{_quoted(named) or 'none that can be tuned'}"
        )
    free = knobs.without(kept)
    if not any((free.count, free.kind, free.depth, free.batch, free.servers)):
        raise SettingsError(
            "nothing can be tuned: the function has no parameter 'num_workers', 'workers', 'prefetch_factor', "
            "'prefetch' or 'batch_size' that may change, and it does not return a PyTorch DataLoader"
        )
    return free


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _scaled(step: Step, settings: Mapping[str, Any], knobs: Knobs) -> Step:
    """A simulated step is meant for the given batch size: a batch twice as large takes twice as long."""
    now = (knobs.now or {}).get("batch_size")
    size = settings.get("batch_size", now)
    if not step.compute_ms or not now or not size:
        return step
    return replace(step, compute_ms=step.compute_ms * size / now)
