"""Everything about a loader that is known to slow training down, with what to do about it.

    examination = examine_target(find_target("train:make_loader", {}), Step(compute_ms=50))
    for finding in examination.findings: print(finding.name, finding)

A child process makes the loader, examines it, and runs its loop for a few seconds. Then the storage is measured, while
nothing else reads from it. What is known without a run is reported even if the run fails.
"""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import TargetError
from headrace.measure.doctor import examined
from headrace.measure.doctor.reads import measure_reads
from headrace.measure.doctor.remote_cost import RemoteCost
from headrace.measure.running.children import TargetRun, check, run_child
from headrace.measure.running.run import Plan, Run
from headrace.measure.running.server_figures import in_flight, servers_in, serving_times_of
from headrace.measure.running.steps import Step
from headrace.measure.running.targets import Target
from headrace.observe.advice import check_variable, is_silenced
from headrace.observe.facts import Facts, Reads, RunFacts
from headrace.observe.findings import Evidence, Finding, Level, NotLooked, Outcome
from headrace.observe.rules import RULES
from headrace.observe.stats import FetchStats

_LEVELS = (Level.ALARM, Level.WARNING, Level.NOTE)
_OF_RUN = ("seconds", "batches", "samples", "padding", "wait_share", "utilisation", "cpu_cores", "stats")
_NOT_RUN = "the loop was not run"
_FAILED = "the run failed"
_INTERRUPTED = "the run was interrupted"


@dataclass(frozen=True)
class Examination:
    findings: Sequence[Finding] = ()
    """The worst first."""
    fine: Sequence[str] = ()
    """The names of what was checked and found fine."""
    not_looked: dict[str, str] = field(default_factory=dict)
    """The names of what was not checked, and why."""
    silenced: Sequence[str] = ()
    """The names of findings that the user has silenced."""
    run: Run | None = None
    reads: Reads | None = None
    costs: Mapping[str, RemoteCost] = field(default_factory=dict)
    """What the order of remote data costs, by source."""
    error: str | None = None
    """Why the run failed, if it did."""
    interrupted: bool = False

    @property
    def alarms(self) -> int:
        return sum(each.level is Level.ALARM for each in self.findings)

    def to_json(self) -> dict[str, Any]:
        run = None if self.run is None else dataclasses.asdict(self.run)
        return {
            "findings": [dataclasses.asdict(each) for each in self.findings],
            "fine": list(self.fine),
            "not_looked": self.not_looked,
            "silenced": list(self.silenced),
            "run": None if run is None else {name: run[name] for name in _OF_RUN},
            "reads": None if self.reads is None else dataclasses.asdict(self.reads),
            # The only source of a Loader has no name of its own.
            "costs": {name or "data": cost.to_json() for name, cost in self.costs.items()},
            "error": self.error,
            "interrupted": self.interrupted,
        }


def examine_target(
    target: Target,
    step: Step,
    *,
    seconds: float = 3.0,
    timeout_seconds: float = 60.0,
    run: bool = True,
) -> Examination:
    """TargetError if no loader can be made. If the loop then fails, hangs or gives no batch, the examination has what
    is known without it, and says so in `error`."""
    check_variable()
    seen = _look(target, step, seconds, timeout_seconds, run)
    facts, outcomes = seen.facts, seen.outcomes
    unknown = _INTERRUPTED if seen.interrupted else _FAILED if seen.error is not None else _NOT_RUN
    # The storage may be what the loop has failed at, and then a read could take forever.
    is_done = run and seen.error is None and not seen.interrupted
    reads = _measure_reads(facts) if is_done else unknown
    run_facts = unknown if seen.run is None else _run_facts(seen.run, step, facts)
    known = dataclasses.replace(facts, run=run_facts, reads=reads)
    for name, rule in RULES.items():
        if rule.seen is not Evidence.STATIC and (outcome := rule.look(known)) is not None:
            outcomes[name] = outcome
    examination = _summed_up(outcomes)
    measured_reads = reads if isinstance(reads, Reads) else None
    return dataclasses.replace(
        examination,
        run=seen.run,
        reads=measured_reads,
        costs=seen.costs,
        error=seen.error,
        interrupted=seen.interrupted,
    )


@dataclass(frozen=True)
class _Seen:
    """What the child process has reported."""

    outcomes: dict[str, Outcome]
    facts: Facts
    costs: Mapping[str, RemoteCost]
    run: Run | None
    """None if nothing was measured."""
    error: str | None
    interrupted: bool


def _look(target: Target, step: Step, seconds: float, timeout_seconds: float, run: bool) -> _Seen:
    with tempfile.TemporaryDirectory(prefix="headrace-doctor-") as folder:
        report = Path(folder, "report.json")
        settings = {"target": target.to_json(), "step": step.name, "report": str(report), "run": run}
        task = TargetRun(
            target=Target(name=examined.NAME, settings=settings),
            step=step if run else Step(),
            plan=Plan(seconds=seconds) if run else Plan(batches=1, warmup=1),
            timeout_seconds=timeout_seconds,
        )
        done = run_child(task)
        if done.interrupted and not report.exists():
            raise KeyboardInterrupt
        if not report.exists():
            check(done)
            raise TargetError(f"{target.name}: the process ended before its loader could be examined")
        outcomes, facts, costs = examined.read_report(report)
    is_measured = run and bool(done.run.batches)
    return _Seen(outcomes, facts, costs, done.run if is_measured else None, done.error, done.interrupted)


def _run_facts(run: Run, step: Step, facts: Facts) -> RunFacts:
    stats = run.stats or {}
    return RunFacts(
        wait_share=run.wait_share,
        busiest=stats.get("busiest"),
        cpu_cores=run.cpu_cores,
        machine_cpu_share=run.machine_cpu_share,
        padding=run.padding,
        has_step=step.is_real or bool(step.compute_ms),
        computes_here=step.is_real and not facts.accelerator,
        seconds=run.seconds,
        fetched=FetchStats(**stats.get("fetched", {})),
        servers=servers_in(run),
        serving=serving_times_of(run),
        in_flight=in_flight(run),
    )


def _measure_reads(facts: Facts) -> Reads | str:
    if facts.remote is not None or facts.servers is not None:
        return "the data is not on this machine"
    if not facts.random_order:
        return "the data is not read in random order"
    return measure_reads([Path(name) for name in facts.files])


def _summed_up(outcomes: dict[str, Outcome]) -> Examination:
    findings: list[Finding] = []
    fine: list[str] = []
    silenced: list[str] = []
    for name in RULES:
        outcome = outcomes.get(name)
        if outcome is None or isinstance(outcome, NotLooked):
            continue
        if not outcome:
            fine.append(name)
        for finding in outcome:
            if is_silenced(finding.name):
                silenced.append(finding.name)
            else:
                findings.append(finding)
    return Examination(
        findings=sorted(findings, key=lambda finding: _LEVELS.index(finding.level)),
        fine=fine,
        not_looked=_reasons(outcomes),
        silenced=silenced,
    )


def _reasons(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Why some rules were not checked, by their names."""
    return {name: outcome.reason for name, outcome in outcomes.items() if isinstance(outcome, NotLooked)}
