"""Memory that is page-locked in vain."""

from headrace.observe.facts import Facts
from headrace.observe.findings import Finding, Level, Outcome, Rule


def look(facts: Facts) -> Outcome | None:
    if facts.pins_memory is None:
        return None
    return [_pinned_memory()] if facts.pins_memory and not facts.accelerator else []


# PyTorch itself warns about it when a loop begins.
RULE = Rule("pinned-memory", "memory is page-locked only for an accelerator", look, said_by_others=True)


def _pinned_memory() -> Finding:
    return Finding(
        "pinned-memory",
        Level.NOTE,
        "pin_memory=True without an accelerator: there is nothing to page-lock memory for, and PyTorch ignores it",
        "Give pin_memory=torch.accelerator.is_available()",
    )
