"""What `headrace doctor` does in the child process: make the target's loader and look at it, before it is run.

A run's target is `module:function`; here it is the function of this module, which makes the loader of the real target,
writes down what it sees, and hands the loader on to be measured. So one child does both, and if the target
hangs or dies, that shows as it does in any run.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.measure.doctor.loaders import facts_of
from headrace.measure.running.targets import Target, import_function
from headrace.observe.facts import Facts
from headrace.observe.findings import Finding, Level, NotLooked, Outcome, Outcomes
from headrace.observe.rules import examine

NAME = f"{__name__}:make_examined"
_KEPT = ("accelerator", "padding", "packing", "files", "random_order")


def make_examined(target: Mapping[str, Any], step: str | None, report: str, run: bool) -> Any:
    """The loader of the real target; without `run`, something that is over at once."""
    # What a loader would say while it runs, doctor says.
    logging.getLogger("headrace.advice").disabled = True
    loader = Target(**target).make()
    facts = facts_of(loader)
    outcomes = look_at(dataclasses.replace(facts, step=None if step is None else import_function(step)))
    kept = {name: getattr(facts, name) for name in _KEPT}
    Path(report).write_text(json.dumps({"outcomes": outcomes_to_json(outcomes), "facts": kept}))
    return loader if run else [0]


def look_at(facts: Facts) -> dict[str, Outcome]:
    """What the rules find that need no measurement."""
    outcomes = examine(facts)
    sizes = outcomes.get("batch-size", ())
    if sizes and not isinstance(sizes, NotLooked) and not facts.accelerator:
        # It matters on an accelerator, which is not here.
        outcomes["batch-size"] = [dataclasses.replace(each, level=Level.NOTE) for each in sizes]
    return outcomes


def read_report(path: Path) -> tuple[dict[str, Outcome], Facts]:
    """What was found, and what must be known to judge a measurement."""
    written = json.loads(path.read_text())
    return outcomes_from_json(written["outcomes"]), Facts(**written["facts"])


def outcomes_to_json(outcomes: Outcomes) -> dict[str, Any]:
    return {
        name: outcome.reason
        if isinstance(outcome, NotLooked)
        else [dataclasses.asdict(finding) for finding in outcome]
        for name, outcome in outcomes.items()
    }


def outcomes_from_json(written: Mapping[str, Any]) -> dict[str, Outcome]:
    return {
        name: NotLooked(each)
        if isinstance(each, str)
        else [Finding(**{**finding, "level": Level(finding["level"])}) for finding in each]
        for name, each in written.items()
    }
