"""What servers did in a run: how long batches waited there, were made, and were on their way."""

from collections.abc import Sequence

from headrace.measure.running.run import Run
from headrace.observe.serving import ServingTimes, serving_times
from headrace.observe.stats import ServerStats, StageStats


def serving_times_of(run: Run) -> ServingTimes | None:
    """None if no batch came from a server while batches were counted."""
    stages = (run.stats or {}).get("stages", {})
    return serving_times({name: StageStats(**stage) for name, stage in stages.items()})


def servers_in(run: Run) -> dict[str, ServerStats]:
    """What each server has done while batches were counted."""
    found = (run.stats or {}).get("servers", {})
    return {name: ServerStats(**server) for name, server in found.items()}


def in_flight(run: Run) -> int | None:
    """How many batches could be asked for ahead; None if that is unknown."""
    queues = (run.stats or {}).get("queues", {})
    return queues["ready"]["capacity"] if "ready" in queues else None


def server_figures(runs: Sequence[Run]) -> dict[str, float]:
    """The figures of ranks that ran at once: the times of the slowest, and all late answers; none without servers."""
    known = [times for run in runs if (times := serving_times_of(run)) is not None]
    if not known:
        return {}
    servers = [server for run in runs for server in servers_in(run).values()]
    return {
        "server_queue_ms": 1e3 * max(times.queue for times in known),
        "server_making_ms": 1e3 * max(times.made for times in known),
        "server_network_ms": 1e3 * max(times.network for times in known),
        "server_late": sum(server.late for server in servers),
        "server_faults": sum(server.faults for server in servers),
    }
