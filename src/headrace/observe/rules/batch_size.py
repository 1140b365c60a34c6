"""Batches that do not fill the accelerator's tiles."""

from headrace.observe.facts import Facts
from headrace.observe.findings import Finding, Level, NotLooked, Outcome, Rule, outcome_of

TILE, BETTER_TILE = 8, 32


def look(facts: Facts) -> Outcome | None:
    if facts.batch_size is None:
        return None
    if not facts.batch_size:
        return NotLooked("the loader does not decide the batch size")
    return outcome_of(batch_size(facts.batch_size, facts.row_tokens))


RULE = Rule("batch-size", "the batch fills the accelerator's tiles", look, needs_accelerator=True)


def batch_size(size: int, row: int = 1) -> Finding | None:
    """`row`: tokens of a row, where all rows are as long: then a matrix has so many lines for each."""
    if size % TILE == 0:
        return None
    whole = size * row % TILE == 0
    below, above = size // TILE * TILE, (size // TILE + 1) * TILE
    choice = f"{below} or {above}" if below else str(above)
    lines = f" of {row:,} tokens, {size * row:,} in all" if row > 1 else ""
    return Finding(
        "batch-size",
        # Of a small batch, something else is long: pixels, or tokens that nobody here has counted.
        Level.WARNING if size > TILE and not whole else Level.NOTE,
        f"Batches of {size}{lines}: no multiple of {TILE}, so that matrix units compute on padding"
        + (" wherever rows are not laid end to end" if whole else ""),
        f"Give batch_size={choice}, better a multiple of {BETTER_TILE}"
        + (f", or a seq_len that is a multiple of {TILE}" if row > 1 and not whole else ""),
    )
