"""Rows of remote data that are read one by one, because of their order."""

from headrace.dataset.units import MOST_UNITS
from headrace.observe.facts import Facts, RemoteFacts
from headrace.observe.findings import Finding, Level, Outcome, Rule, in_gb, outcome_of
from headrace.order.shuffle import ShuffleKind

FEW_UNITS = MOST_UNITS
"""So many units of a source stay in memory, so that their order matters little."""


def look(facts: Facts) -> Outcome | None:
    if facts.remote is None:
        return None
    return outcome_of(remote_shuffle(facts.remote, facts.batch_size or 1))


RULE = Rule("remote-shuffle", "the order keeps to parts of the remote data that are fetched whole", look)


def remote_shuffle(remote: RemoteFacts, batch_size: int) -> Finding | None:
    if remote.shuffle != ShuffleKind.GLOBAL or remote.units <= FEW_UNITS:
        return None
    return Finding(
        "remote-shuffle",
        Level.ALARM,
        f"shuffle='global' reads single rows of {in_gb(remote.data_bytes)} over the network: a batch takes at least "
        f"{batch_size:,} requests, and nothing that they bring is used again",
        "Leave shuffle out, or give shuffle='units', which fetches whole units ahead and mixes the rows of 128 at a "
        "time; headrace inspect shows how well",
    )
