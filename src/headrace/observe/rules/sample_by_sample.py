"""Samples that are taken one by one, and then stacked, from data that could be indexed once per batch."""

from headrace.observe.facts import Facts
from headrace.observe.findings import Finding, Level, Outcome, Rule


def look(facts: Facts) -> Outcome | None:
    if facts.taken_apart is None:
        return [] if facts.takes_samples else None
    kind, remedy, count = facts.taken_apart
    return [sample_by_sample(kind, remedy, count)]


RULE = Rule("sample-by-sample", "batches are fetched whole where they can be", look)


def sample_by_sample(kind: str, remedy: str, count: int) -> Finding:
    return Finding(
        "sample-by-sample",
        Level.NOTE,
        f"{kind} is taken apart into {count} samples for each batch, which are then stacked again",
        remedy,
    )
