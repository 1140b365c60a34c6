"""Tokens that are padding, and take computing time like any other."""

from headrace.observe.facts import Facts, RunFacts
from headrace.observe.findings import Evidence, Finding, Level, NotLooked, Outcome, Rule, outcome_of
from headrace.pack.packing import Packing

PADDING_SHARE = 0.10


def look(facts: Facts) -> Outcome | None:
    if isinstance(facts.run, RunFacts) and facts.run.padding is not None:
        return outcome_of(padding(facts.run.padding, facts.packing))
    if facts.padding is not None:
        return outcome_of(padding(facts.padding, facts.packing))
    if isinstance(facts.run, RunFacts):
        return NotLooked("nothing in a batch tells which tokens are padding")
    return None if facts.run is None else NotLooked(facts.run)


RULE = Rule("padding", "little is padded", look, Evidence.RUN, needs_accelerator=True)


def padding(share: float, packing: str | None = None) -> Finding | None:
    """`packing` is that of a Headrace Loader; None if something else pads."""
    if share <= PADDING_SHARE:
        return None
    remedies: dict[str, str] = {
        Packing.PAD: "Give packing='best-fit', which puts several documents into a row",
        Packing.BEST_FIT: "Give a larger seq_len, or packing='windows', which has no padding",
    }
    other = "Pack documents into rows (headrace.Loader with seq_len), or batch documents of similar length"
    return Finding(
        "padding",
        Level.WARNING,
        f"{share:.0%} of the tokens are padding, and take computing time like any other",
        remedies.get(packing or "", other),
    )
