"""More workers than there are cores for them."""

from headrace.observe import host
from headrace.observe.facts import Facts
from headrace.observe.findings import Finding, Level, Outcome, Rule, outcome_of


def look(facts: Facts) -> Outcome | None:
    found = facts.workers
    if found is None:
        return None
    if found.count <= found.harmless:
        return []
    return outcome_of(
        workers(found.count, host.useful_cores(), facts.ranks, found.setting, threads=found.threads)
    )


RULE = Rule("workers", "workers have a core each", look)


def workers(
    count: int, cores: float, ranks: int, setting: str = "workers", threads: bool = False
) -> Finding | None:
    each = max(1, int(cores / ranks))
    if count <= each:
        return None
    shared = f" shared by {ranks} ranks" if ranks > 1 else ""
    return Finding(
        "workers",
        # Threads may wait for a disk or a network, so more of them than cores can make sense.
        Level.NOTE if threads else Level.WARNING,
        f"{count} workers for {cores:g} core{'' if cores == 1 else 's'}{shared}: they compete with each other and with "
        "the training loop",
        f"Give {setting}={each} or fewer",
    )
