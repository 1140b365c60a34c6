"""What came over the network in a run: at the beginning, and while batches were counted."""

from collections.abc import Sequence

from headrace.measure.running.run import Run
from headrace.observe.stats import FetchStats

_MB = 1e6
IN_MEMORY = (
    "data of up to 128 units, like this, stays in memory once it was read: while batches are counted, nothing or only "
    "the last of it is fetched, so the beginning alone shows the network"
)


def network_figures(runs: Sequence[Run]) -> dict[str, float]:
    """The figures of ranks that ran at once, added up; none if all data is on this machine."""
    found = _figures("network", [fetched_in(run) for run in runs], [run.seconds for run in runs])
    begun = [run.beginning for run in runs if run.beginning is not None]
    if begun:
        seconds = [each["seconds"] for each in begun]
        fetched = [FetchStats(**{name: each[name] for name in FetchStats._fields}) for each in begun]
        found |= {"beginning_seconds": max(seconds), **_figures("beginning", fetched, seconds)}
    return found if begun or any(found.values()) else {}


def _figures(kind: str, fetched: Sequence[FetchStats], seconds: Sequence[float]) -> dict[str, float]:
    whole = FetchStats()
    rate = 0.0
    for each, spent in zip(fetched, seconds, strict=True):
        whole = whole.plus(each)
        rate += each.bytes / _MB / spent if spent else 0.0
    return {
        f"{kind}_requests": whole.requests,
        f"{kind}_mb": whole.bytes / _MB,
        f"{kind}_mb_per_second": rate,
        f"{kind}_cached_share": whole.cached_share,
    }


def fetched_in(run: Run) -> FetchStats:
    """While batches were counted."""
    stats = run.stats or {}
    return FetchStats(**stats.get("fetched", {}))


def network_notes(run: Run) -> list[str]:
    """What to know about the figures."""
    if run.beginning is None or not run.batches:
        return []
    return [IN_MEMORY] if run.beginning["stays_in_memory"] else []
