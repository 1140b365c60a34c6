"""A loop that waits because remote data does not arrive in time."""

from headrace.observe.facts import Facts, RunFacts
from headrace.observe.findings import Evidence, Finding, Level, NotLooked, Outcome, Rule, outcome_of
from headrace.observe.stats import is_waiting

_READING = ("fetch", "read")
"""Stages in which batches wait for what was asked for."""


def look(facts: Facts) -> Outcome | None:
    run = facts.run
    if facts.remote is None or run is None:
        return None
    if not isinstance(run, RunFacts):
        return NotLooked(run)
    if not run.has_step or run.wait_share is None:
        return NotLooked("a loop without a step only waits; give --compute-ms or --step")
    return outcome_of(network(run, run.wait_share))


RULE = Rule("network", "batches do not wait for the network", look, Evidence.RUN)


def network(run: RunFacts, wait_share: float) -> Finding | None:
    if not is_waiting(wait_share) or run.busiest not in _READING or not run.fetched.requests:
        return None
    fetched = run.fetched
    rate = fetched.bytes / max(run.seconds, 1e-9) / 1e6
    each = fetched.bytes / fetched.requests / 1e3
    return Finding(
        "network",
        Level.WARNING,
        f"The loop waits {wait_share:.0%} of its time, mostly for the network: {rate:,.0f} MB/s came in "
        f"{fetched.requests:,} requests of {each:,.0f} KB on average, and {fetched.cached_share:.0%} from the cache",
        "If requests are small, let the Loader choose shuffle and pack_within; if they are megabytes, move nearer to "
        "the store (the same region, a faster network), fetch fewer fields (fields=...), or run a second epoch, which "
        "reads from the cache what fits there",
    )
