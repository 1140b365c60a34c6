"""What a rule is, and what it finds.

A rule is a module of `rules/`: it says by which facts it fires and what it says then, and its `RULE` says what is so if
it does not, and where it can be seen. `advice.py` asks some rules when an iteration begins; `headrace doctor` asks all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.observe import host
from headrace.observe.data_in_memory import DataPiece
from headrace.observe.facts import Facts

LARGE_BYTES = 100_000_000
"""Below that, a copy for each worker is not worth a word."""
FITS_SHARE = 0.25
"""Of the memory that is available: so much data can well be held in it."""


class Level(StrEnum):
    NOTE = "note"
    WARNING = "warning"
    ALARM = "alarm"


@dataclass(frozen=True)
class Finding:
    name: str
    level: Level
    found: str
    """What is so, with its numbers, and what it costs."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}. {self.remedy}."


@dataclass(frozen=True)
class NotLooked:
    reason: str


Outcome = Sequence[Finding] | NotLooked
Outcomes = Mapping[str, Outcome]
"""By a finding's name: what was found, nothing if all is well, or why nobody looked."""


class Evidence(StrEnum):
    """What it takes to see something."""

    STATIC = "a look at the loader"
    RUN = "a run of the loop"
    STORAGE = "reads from the storage"


@dataclass(frozen=True)
class Rule:
    name: str
    fine: str
    """What is so if nothing is found."""
    look: Callable[[Facts], Outcome | None]
    """None: it means nothing to this loader."""
    seen: Evidence = Evidence.STATIC
    needs_accelerator: bool = False
    """Not worth a word at run time where nothing is computed on one."""
    said_by_others: bool = False
    """PyTorch warns of it by itself when a loop begins."""


def outcome_of(finding: Finding | None) -> list[Finding]:
    return [] if finding is None else [finding]


def level_of_copies(copies: int, held: Sequence[DataPiece]) -> Level:
    whole = copies * sum(each.bytes for each in held)
    return Level.ALARM if whole > host.available_bytes() else Level.WARNING


def listed(held: Sequence[DataPiece]) -> str:
    return ", ".join(f"{each.name}: {each.bytes / 1e6:,.0f} MB" for each in held[:4])


def in_gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
