"""Raw files that are read and parsed again in every epoch, though they would fit in memory."""

from headrace.observe import host
from headrace.observe.facts import Facts
from headrace.observe.findings import FITS_SHARE, Finding, Level, NotLooked, Outcome, Rule, in_gb, outcome_of


def look(facts: Facts) -> Outcome | None:
    if facts.streamed_bytes is None:
        return None
    if isinstance(facts.streamed_bytes, str):
        return NotLooked(facts.streamed_bytes)
    return outcome_of(streamed(facts.streamed_bytes, facts.ranks))


RULE = Rule("streamed", "nothing is read again and again that fits in memory", look)


def streamed(file_bytes: int, ranks: int) -> Finding | None:
    """Raw files that are read and parsed again in every epoch."""
    if not file_bytes:
        return None
    available = host.available_bytes()
    if file_bytes * ranks > FITS_SHARE * available:
        return None
    return Finding(
        "streamed",
        Level.NOTE,
        f"Files of {in_gb(file_bytes)} are read and parsed in every epoch, and there are {in_gb(available)} of memory",
        "Build a dataset of them once (headrace build) and use headrace.Loader, or keep the parsed records in memory",
    )
