"""A loop that waits because batches are long on their way from the servers."""

from headrace.observe.facts import Facts, RunFacts
from headrace.observe.findings import Evidence, Finding, Level, Outcome, Rule, look_at_serving
from headrace.observe.serving import ServingTimes
from headrace.observe.stats import is_waiting

_ON_THIS_MACHINE = (
    "grpc://127.",
    "grpc://[::1]",
    "grpc://localhost:",
    "grpc+tls://127.",
    "grpc+tls://[::1]",
    "grpc+tls://localhost:",
)


def look(facts: Facts) -> Outcome | None:
    return look_at_serving(facts, server_network)


RULE = Rule("server-network", "batches do not wait for the way from servers to the loop", look, Evidence.RUN)


def server_network(run: RunFacts, serving: ServingTimes, wait_share: float) -> Finding | None:
    if not is_waiting(wait_share) or not serving.is_mostly_network:
        return None
    received = sum(each.bytes for each in run.servers.values())
    answers = sum(each.answers for each in run.servers.values())
    rate = received / max(run.seconds, 1e-9) / 1e6
    size = received / max(answers, 1) / 1e3
    return Finding(
        "server-network",
        Level.WARNING,
        f"The loop waits {wait_share:.0%} of its time, mostly for the network between it and its servers: "
        f"{rate:,.1f} MB/s came in batches of {size:,.1f} KB; a batch spends {1e3 * serving.on_servers:,.1f} ms on a "
        f"server and {1e3 * serving.network:,.1f} ms on its way",
        _remedy(run),
    )


def _remedy(run: RunFacts) -> str:
    remedies = ["send less (fewer fields, or smaller dtypes such as uint8 and float16)"]
    if any(name.startswith(_ON_THIS_MACHINE) for name in run.servers):
        remedies.insert(
            0, "reach servers on this machine by a Unix socket (unix:///path), through shared memory"
        )
    remedies.append("use more bandwidth between the machines")
    if run.in_flight is not None:
        remedies.append(f"have more small batches on their way at once (prefetch; it is {run.in_flight} now)")
    *first, last = remedies
    said = f"{', '.join(first)}, or {last}"
    return said[0].upper() + said[1:]
