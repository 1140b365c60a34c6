"""Packed rows of remote data whose documents lie in different units."""

from headrace.observe.facts import Facts, RemoteFacts
from headrace.observe.findings import Finding, Level, Outcome, Rule, in_gb, outcome_of
from headrace.observe.rules.remote_shuffle import FEW_UNITS


def look(facts: Facts) -> Outcome | None:
    return None if facts.remote is None else outcome_of(remote_packing(facts.remote))


RULE = Rule("remote-packing", "rows of remote data need a single unit each", look)


def remote_packing(remote: RemoteFacts) -> Finding | None:
    if remote.packs_within_units or remote.units <= FEW_UNITS:
        return None
    return Finding(
        "remote-packing",
        Level.ALARM,
        f"The documents of a row are from all over {in_gb(remote.data_bytes)} of remote data, so each of them is "
        "searched for and read with requests of its own",
        "Leave pack_within and group_shards out, or give pack_within='units': a row then has documents of one unit",
    )
