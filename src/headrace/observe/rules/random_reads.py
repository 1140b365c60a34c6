"""Storage that is slow at the random reads that the order needs."""

from headrace.observe import host
from headrace.observe.facts import Facts, Reads
from headrace.observe.findings import (
    FITS_SHARE,
    Evidence,
    Finding,
    Level,
    NotLooked,
    Outcome,
    Rule,
    outcome_of,
)

SLOW_MS = 1.0
"""A hard disk takes 5 to 10 ms to move its head, network storage 0.5 to 5 ms; flash memory takes 0.1 ms."""
SLOWER_THAN_IN_ORDER = 4.0
"""Otherwise another order would not help."""


def look(facts: Facts) -> Outcome | None:
    if facts.reads is None:
        return None
    if not isinstance(facts.reads, Reads):
        return NotLooked(facts.reads)
    return outcome_of(random_reads(facts.reads))


RULE = Rule("random-reads", "storage is fast at the reads that the order needs", look, Evidence.STORAGE)


def random_reads(measured: Reads) -> Finding | None:
    """For data that is read in random order."""
    faster = measured.sequential_mb_per_second / max(1e-9, measured.random_mb_per_second)
    if measured.small_ms <= SLOW_MS or faster < SLOWER_THAN_IN_ORDER:
        return None
    available = host.available_bytes()
    stays = measured.data_bytes <= available
    found = (
        f"Random reads are slow here: {measured.small_ms:.1f} ms for 4 KB, {measured.random_mb_per_second:,.1f} MB/s "
        f"for 64 KB at a time, {measured.sequential_mb_per_second:,.0f} MB/s in order ({measured.reads} reads, cold)"
    )
    if measured.data_bytes <= FITS_SHARE * available:
        remedy = "The data fits in memory: open it with in_memory=True, which reads it in order"
    elif stays:
        remedy = "This lasts until the data is in the page cache: read the files once in order, or give shuffle='block'"
    else:
        remedy = (
            "Give shuffle='block', which reads neighbouring rows together, or copy the data to a local disk"
        )
    return Finding("random-reads", Level.NOTE if stays else Level.WARNING, found, remedy)
