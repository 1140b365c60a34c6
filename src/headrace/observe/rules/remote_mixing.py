"""Batches of remote data that are mixed badly, because their rows are from few places at a time."""

from headrace.observe.facts import Facts, MixingFacts
from headrace.observe.findings import Finding, Level, Outcome, Rule, outcome_of
from headrace.order.shuffle import MAX_LANES, Shuffle, ShuffleKind

MOST_VARIANCE = 4.0
"""Of a batch's mean, against that of an independent draw. The default has 2.0 for batches of 256 rows."""
_WANTED_VARIANCE = 2.0


def look(facts: Facts) -> Outcome | None:
    return None if facts.mixing is None else outcome_of(remote_mixing(facts.mixing))


RULE = Rule("remote-mixing", "batches of remote data are mixed well", look)


def remote_mixing(mixing: MixingFacts) -> Finding | None:
    if mixing.variance <= MOST_VARIANCE:
        return None
    is_chosen = mixing.shuffle == ShuffleKind.NONE
    return Finding(
        "remote-mixing",
        Level.NOTE if is_chosen else Level.WARNING,
        f"Batches are mixed badly: if the rows of a shard are alike, the mean of a batch of {mixing.batch_rows:,} rows "
        f"varies {mixing.variance:,.1f} times as much as with a perfect shuffle",
        _remedy(mixing),
    )


def _remedy(mixing: MixingFacts) -> str:
    lanes = _enough_lanes(mixing.batch_rows)
    by_units = f"headrace.Shuffle(kind='units', lanes={lanes}), or --set lanes={lanes}"
    if mixing.shuffle == ShuffleKind.UNITS:
        return f"Give more lanes ({by_units}); each lane takes about 4 MB of memory"
    if mixing.shuffle == ShuffleKind.BLOCK:
        return f"Give a larger window, or an order by units ({by_units})"
    return f"For training, leave shuffle out, or give an order by units ({by_units})"


def _enough_lanes(batch_rows: int) -> int:
    """The default number of lanes, doubled until the variance is that of the default."""
    lanes = Shuffle(kind=ShuffleKind.UNITS).lanes
    while batch_rows / lanes > _WANTED_VARIANCE:
        lanes *= 2
    return min(lanes, MAX_LANES)
