"""Batches that are copied to an accelerator from memory that the OS may move."""

from headrace.observe.facts import Facts
from headrace.observe.findings import Finding, Level, NotLooked, Outcome, Rule


def look(facts: Facts) -> Outcome | None:
    if facts.pageable is None:
        return None
    if not facts.accelerator:
        return NotLooked("there is no accelerator")
    return [pageable_copies(facts.pin_remedy)] if facts.pageable else []


RULE = Rule("pageable-copies", "batches are copied from page-locked memory", look, needs_accelerator=True)


def pageable_copies(remedy: str) -> Finding:
    return Finding(
        "pageable-copies",
        Level.WARNING,
        "Batches for an accelerator are in pageable memory: the driver copies them twice while the loop waits",
        remedy,
    )
