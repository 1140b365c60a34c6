"""A cache of remote data that is off, or too small to help."""

from headrace.observe.facts import Facts, RemoteFacts
from headrace.observe.findings import Finding, Level, Outcome, Rule, in_gb, outcome_of
from headrace.observe.rules.remote_shuffle import FEW_UNITS

_WHERE = "(cache=DIR and cache_bytes of headrace.open, or HEADRACE_CACHE and HEADRACE_CACHE_BYTES)"


def look(facts: Facts) -> Outcome | None:
    return None if facts.remote is None else outcome_of(remote_cache(facts.remote))


RULE = Rule("remote-cache", "the cache has room for the remote data", look)


def remote_cache(remote: RemoteFacts) -> Finding | None:
    if remote.cache_bytes >= remote.data_bytes:
        return None
    whole = in_gb(remote.data_bytes)
    if remote.cache_bytes < remote.working_set_bytes:
        what = "There is no cache of remote data"
        if remote.cache_bytes:
            needed = f"the {in_gb(remote.working_set_bytes)} that batches are drawn from at a time"
            what = f"The cache of remote data has {in_gb(remote.cache_bytes)}, less than {needed}"
        return Finding(
            "remote-cache",
            Level.WARNING if remote.processes > 1 else Level.NOTE,
            f"{what}: {_cost(remote)}",
            f"Give a cache with room for {whole}, or as much of it as the disk has {_WHERE}",
        )
    if remote.units <= FEW_UNITS:
        # An epoch needs nothing of the cache then, and a run that begins finds most of it there.
        return None
    share = remote.cache_bytes / remote.data_bytes
    return Finding(
        "remote-cache",
        Level.NOTE,
        f"The cache has room for {in_gb(remote.cache_bytes)} of {whole} of remote data: from the second epoch on, "
        f"{share:.0%} of what batches need will be there, and the rest is fetched",
        f"If the disk has room, give {whole} {_WHERE}; the share grows with the cache, whatever its size",
    )


def _cost(remote: RemoteFacts) -> str:
    """What is fetched again and again."""
    whole = in_gb(remote.data_bytes)
    stays_in_memory = remote.units <= FEW_UNITS
    if remote.processes > 1:
        each = f"each of {remote.processes} worker processes fetches all of {whole}"
        return f"{each} when a run begins" if stays_in_memory else f"{each} in every epoch"
    return f"every {'run' if stays_in_memory else 'epoch'} fetches all of {whole}"
