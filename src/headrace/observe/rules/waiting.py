"""A loop that waits for data."""

from headrace.observe.facts import Facts, RunFacts
from headrace.observe.findings import Evidence, Finding, Level, NotLooked, Outcome, Rule, outcome_of
from headrace.observe.stats import is_waiting


def look(facts: Facts) -> Outcome | None:
    run = facts.run
    if not isinstance(run, RunFacts):
        return None if run is None else NotLooked(run)
    if not run.has_step or run.wait_share is None:
        return NotLooked("a loop without a step only waits; give --compute-ms or --step")
    return outcome_of(waiting(run.wait_share, run.busiest, has_servers=bool(run.servers)))


RULE = Rule("waiting", "the step does not wait for data", look, Evidence.RUN)


def waiting(share: float, busiest: str | None = None, *, has_servers: bool = False) -> Finding | None:
    if not is_waiting(share):
        return None
    what = f"; the busiest stage is {busiest!r}" if busiest else ""
    return Finding(
        "waiting",
        Level.WARNING,
        f"The loop waits for data {share:.0%} of its time{what}",
        _WITH_SERVERS if has_servers else _ALONE,
    )


_ALONE = (
    "Run headrace tune, which looks for better workers and prefetch depth; if none help, make batches cheaper: move "
    "work into the build, or fetch whole batches"
)
_WITH_SERVERS = "Run headrace tune, which looks for the number of servers and of batches in flight"
