"""A cache of remote data that is off, or too small to help."""

from headrace.observe.facts import Facts, RemoteFacts
from headrace.observe.findings import Finding, Level, Outcome, Rule, in_gb, outcome_of

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
        is_shared = remote.processes > 1
        cost = f"each of {remote.processes} worker processes fetches" if is_shared else "every epoch fetches"
        return Finding(
            "remote-cache",
            Level.WARNING if is_shared else Level.NOTE,
            f"{what}: {cost} all of {whole}" + (" in every epoch" if is_shared else ""),
            f"Give a cache with room for {whole}, or as much of it as the disk has {_WHERE}",
        )
    share = remote.cache_bytes / remote.data_bytes
    return Finding(
        "remote-cache",
        Level.NOTE,
        f"The cache has room for {in_gb(remote.cache_bytes)} of {whole} of remote data: from the second epoch on, "
        f"{share:.0%} of what batches need will be there, and the rest is fetched",
        f"If the disk has room, give {whole} {_WHERE}; the share grows with the cache, whatever its size",
    )
