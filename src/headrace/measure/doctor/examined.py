"""What `headrace doctor` does in the child process: make the target's loader and look at it, before it is run.

A run's target is `module:function`; here it is the function of this module, which makes the loader of the real target,
writes down what it sees, and hands the loader on to be measured. So one child does both, and if the target
hangs or dies, that shows as it does in any run.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.measure.doctor.rules.copies import blocking_copies
from headrace.measure.doctor.rules.loaders import Facts, examine, facts_of
from headrace.measure.running.targets import Target, import_function
from headrace.observe.findings import Finding, Level, NotLooked, Outcome, Outcomes

NAME = f"{__name__}:make_examined"


def make_examined(target: Mapping[str, Any], step: str | None, report: str, run: bool) -> Any:
    """The loader of the real target; without `run`, something that is over at once."""
    # What a loader would say while it runs, doctor says.
    logging.getLogger("headrace.advice").disabled = True
    loader = Target(**target).make()
    outcomes = examine(loader)
    if step is not None:
        outcomes["blocking-copies"] = _unless_it_fails(lambda: blocking_copies(import_function(step)))
    written = {"outcomes": outcomes_to_json(outcomes), "facts": dataclasses.asdict(facts_of(loader))}
    Path(report).write_text(json.dumps(written))
    return loader if run else [0]


def _unless_it_fails(look: Callable[[], Outcome]) -> Outcome:
    try:
        return look()
    except Exception as error:
        return NotLooked(f"{type(error).__name__}: {error}")


def read_report(path: Path) -> tuple[dict[str, Outcome], Facts]:
    written = json.loads(path.read_text())
    facts = written["facts"]
    return outcomes_from_json(written["outcomes"]), Facts(**{**facts, "files": tuple(facts["files"])})


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
