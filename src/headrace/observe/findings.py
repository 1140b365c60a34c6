"""What a rule is, and what it finds.

A rule is a module of `rules/`. It decides by which facts it fires and what it then reports; its `RULE` says what is
true if it does not fire, and what evidence it needs. `advice.py` checks some rules when an iteration begins; `headrace
doctor` checks all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.observe import host
from headrace.observe.data_in_memory import DataPiece
from headrace.observe.facts import Facts, RunFacts, Sent
from headrace.observe.serving import ServingTimes

LARGE_BYTES = 100_000_000
"""Below this size, a copy for each worker is not worth mentioning."""
FITS_SHARE = 0.25
"""Data up to this share of the available memory can well be held in it."""


class Level(StrEnum):
    NOTE = "note"
    WARNING = "warning"
    ALARM = "alarm"


@dataclass(frozen=True)
class Finding:
    name: str
    level: Level
    found: str
    """What is wrong, with its numbers, and what it costs."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}. {self.remedy}."


@dataclass(frozen=True)
class NotLooked:
    reason: str


Outcome = Sequence[Finding] | NotLooked
Outcomes = Mapping[str, Outcome]
"""By the name of the rule: what was found, which is empty if all is well, or why it was not checked."""


class Evidence(StrEnum):
    """What a rule needs to look at."""

    STATIC = "a look at the loader"
    RUN = "a run of the loop"
    STORAGE = "reads from the storage"


@dataclass(frozen=True)
class Rule:
    name: str
    fine: str
    """What is true if nothing is found."""
    look: Callable[[Facts], Outcome | None]
    """Returns None if the rule does not apply to this loader."""
    seen: Evidence = Evidence.STATIC
    needs_accelerator: bool = False
    """Not worth mentioning at run time where there is none."""
    said_by_others: bool = False
    """PyTorch itself warns about it when a loop begins."""


def outcome_of(finding: Finding | None) -> list[Finding]:
    return [] if finding is None else [finding]


def level_of_copies(copies: int, held: Sequence[DataPiece]) -> Level:
    whole = copies * sum(each.bytes for each in held)
    return Level.ALARM if whole > host.available_bytes() else Level.WARNING


def listed(held: Sequence[DataPiece]) -> str:
    return ", ".join(f"{each.name}: {each.bytes / 1e6:,.0f} MB" for each in held[:4])


def look_at_sent_data(
    facts: Facts, judge: Callable[[Sequence[DataPiece], int, Sent], Finding | None]
) -> Outcome | None:
    """For rules about what becomes of data in memory when it is sent to worker processes."""
    data = facts.data
    if data is None:
        return None
    if data.sent is None:
        return NotLooked("there are no worker processes")
    return outcome_of(judge(data.held, data.processes, data.sent))


def look_at_serving(
    facts: Facts, judge: Callable[[RunFacts, ServingTimes, float], Finding | None]
) -> Outcome | None:
    """For rules about why a loop waits whose batches are made by servers."""
    run = facts.run
    if facts.servers is None or run is None:
        return None
    if not isinstance(run, RunFacts):
        return NotLooked(run)
    if not run.has_step or run.wait_share is None:
        return NotLooked("a loop without a step only waits; give --compute-ms or --step")
    if run.serving is None:
        return NotLooked("no batch has come from a server")
    return outcome_of(judge(run, run.serving, run.wait_share))


def each_of(count: int, thing: str) -> str:
    """(1, 'worker') -> '1 worker'; (4, 'worker') -> 'each of 4 workers'."""
    return f"1 {thing}" if count == 1 else f"each of {count} {thing}s"


def in_gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
