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


RULE = Rule("streamed", "no files are parsed in every epoch that would fit in memory", look)


def streamed(file_bytes: int, ranks: int) -> Finding | None:
    if not file_bytes:
        return None
    available = host.available_bytes()
    if file_bytes * ranks > FITS_SHARE * available:
        return None
    return Finding(
        "streamed",
        Level.NOTE,
        f"Files of {in_gb(file_bytes)} are read and parsed in every epoch, though {in_gb(available)} of memory is "
        "available",
        "Build a dataset from them once (headrace build) and use headrace.Loader, or keep the parsed records in memory",
    )
