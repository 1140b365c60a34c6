"""Data in memory that leaves too little room for the rest."""

from headrace.observe import host
from headrace.observe.facts import Facts
from headrace.observe.findings import LARGE_BYTES, Finding, Level, Outcome, Rule, in_gb, outcome_of

FULL_SHARE = 0.50


def look(facts: Facts) -> Outcome | None:
    return None if facts.loaded_bytes is None else outcome_of(in_ram(facts.loaded_bytes, facts.ranks))


RULE = Rule("in-ram", "what is in memory leaves room for the rest", look)


def in_ram(held_bytes: int, ranks: int) -> Finding | None:
    """`held_bytes` is what each rank on the machine has loaded."""
    if held_bytes < LARGE_BYTES:
        return None
    whole, memory = held_bytes * ranks, host.memory_bytes()
    if whole <= FULL_SHARE * memory:
        return None
    each = f"{in_gb(held_bytes)} in each of {ranks} ranks" if ranks > 1 else in_gb(held_bytes)
    return Finding(
        "in-ram",
        Level.ALARM if whole > memory else Level.WARNING,
        f"The data in memory takes {each}, of {in_gb(memory)} that this process may use",
        "Map it instead (headrace.open without in_memory): ranks share the pages of a memory map",
    )
