"""What `headrace doctor` does in the child process: it makes the target's loader and examines it, before it is run.

The target of a run is a `module:function`. Here it is a function of this module, which makes the loader of the real
target, writes down what it finds, and hands the loader on to be measured. So one child does both, and a target that
hangs or dies is reported as in any other run.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.load.loader import Loader
from headrace.load.target import import_function
from headrace.measure.doctor.loaders import facts_of
from headrace.measure.doctor.remote_cost import RemoteCost, remote_costs
from headrace.measure.running.targets import Target
from headrace.observe import host
from headrace.observe.facts import Facts, MixingFacts, RemoteFacts
from headrace.observe.findings import Finding, Level, NotLooked, Outcome, Outcomes
from headrace.observe.rules import examine

NAME = f"{__name__}:make_examined"
_KEPT = (
    *("accelerator", "padding", "packing", "files", "random_order"),
    *("worker_processes", "torch_threads", "servers"),
)


def make_examined(target: Mapping[str, Any], step: str | None, report: str, run: bool) -> Any:
    """The loader of the real target, or one that ends at once if it is not to be run."""
    # The doctor reports what a loader would log while it runs.
    logging.getLogger("headrace.advice").disabled = True
    loader = Target(**target).make()
    costs = _costs_of(loader)
    facts = dataclasses.replace(_with_threads(facts_of(loader)), mixing=_worst_mixing(costs))
    outcomes = look_at(dataclasses.replace(facts, step=None if step is None else import_function(step)))
    kept = {name: getattr(facts, name) for name in _KEPT}
    kept["remote"] = None if facts.remote is None else dataclasses.asdict(facts.remote)
    written = {
        "outcomes": outcomes_to_json(outcomes),
        "facts": kept,
        "costs": {name: cost.to_json() for name, cost in costs.items()},
    }
    Path(report).write_text(json.dumps(written))
    return loader if run else [0]


def _costs_of(loader: Any) -> Mapping[str, RemoteCost]:
    """What the order of remote data costs, by source; nothing for other loaders."""
    if not isinstance(loader, Loader) or not loader.rows.recipe.data:
        return {}
    return remote_costs(loader.rows.recipe, loader.settings.batch_size * loader.world.size)


def _worst_mixing(costs: Mapping[str, RemoteCost]) -> MixingFacts | None:
    if not costs:
        return None
    worst = max(costs.values(), key=lambda cost: cost.variance)
    return MixingFacts(worst.order, worst.variance, round(worst.batch_rows))


def _with_threads(facts: Facts) -> Facts:
    workers = facts.workers
    processes = 0 if workers is None or workers.threads else workers.count
    return dataclasses.replace(facts, worker_processes=processes, torch_threads=host.torch_threads())


def look_at(facts: Facts) -> dict[str, Outcome]:
    """What is found by the rules that need no measurement."""
    outcomes = examine(facts)
    sizes = outcomes.get("batch-size", ())
    if sizes and not isinstance(sizes, NotLooked) and not facts.accelerator:
        # It matters only on an accelerator, and there is none here.
        outcomes["batch-size"] = [dataclasses.replace(each, level=Level.NOTE) for each in sizes]
    return outcomes


def read_report(path: Path) -> tuple[dict[str, Outcome], Facts, dict[str, RemoteCost]]:
    """What was found, the facts that are needed to judge a measurement, and what remote data costs."""
    written = json.loads(path.read_text())
    facts = written["facts"]
    if facts["remote"] is not None:
        facts["remote"] = RemoteFacts(**facts["remote"])
    costs = {name: RemoteCost.from_json(cost) for name, cost in written["costs"].items()}
    return outcomes_from_json(written["outcomes"]), Facts(**facts), costs


def outcomes_to_json(outcomes: Outcomes) -> dict[str, Any]:
    return {name: _outcome_to_json(outcome) for name, outcome in outcomes.items()}


def _outcome_to_json(outcome: Outcome) -> str | list[dict[str, Any]]:
    if isinstance(outcome, NotLooked):
        return outcome.reason
    return [dataclasses.asdict(finding) for finding in outcome]


def outcomes_from_json(written: Mapping[str, Any]) -> dict[str, Outcome]:
    return {name: _outcome_from_json(outcome) for name, outcome in written.items()}


def _outcome_from_json(written: str | list[dict[str, Any]]) -> Outcome:
    if isinstance(written, str):
        return NotLooked(written)
    return [Finding(**{**finding, "level": Level(finding["level"])}) for finding in written]
