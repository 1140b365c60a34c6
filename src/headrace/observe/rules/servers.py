"""A loop that waits because its servers do not make batches as fast as it needs them."""

from headrace.observe.facts import Facts, RunFacts
from headrace.observe.findings import Evidence, Finding, Level, Outcome, Rule, look_at_serving
from headrace.observe.serving import ServingTimes
from headrace.observe.stats import is_waiting

_MOST_NAMED = 4


def look(facts: Facts) -> Outcome | None:
    return look_at_serving(facts, servers)


RULE = Rule("servers", "batches do not wait for servers to make them", look, Evidence.RUN)


def servers(run: RunFacts, serving: ServingTimes, wait_share: float) -> Finding | None:
    if not is_waiting(wait_share) or not serving.is_mostly_servers:
        return None
    up = [each for each in run.servers.values() if each.state == "up"]
    slots = sum(each.slots for each in up)
    found = (
        f"The loop waits {wait_share:.0%} of its time, mostly for its {_counted(len(up), 'server')}: a batch waits "
        f"{1e3 * serving.queue:,.1f} ms for a worker, takes {1e3 * serving.made:,.1f} ms to make, and is "
        f"{1e3 * serving.network:,.1f} ms on its way; {_counted(slots, 'batch', 'batches')} can be made at once"
    )
    if run.in_flight is not None and run.in_flight < slots and serving.queue < serving.making:
        found += f", but only {run.in_flight} are asked for ahead"
        return Finding("servers", Level.WARNING, found, f"Give prefetch={2 * slots}, or leave it out")
    others = [f"{name} is {each.state}" for name, each in run.servers.items() if each.state != "up"]
    if others:
        found += f"; {', '.join(others[:_MOST_NAMED])}"
    return Finding(
        "servers",
        Level.WARNING,
        found,
        "Add servers (headrace tune estimates how many are needed), or workers to servers that have cores to spare; "
        "if the functions of the servers wait more than they compute, give each worker several threads",
    )


def _counted(count: int, thing: str, things: str | None = None) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {things or thing + 's'}"
