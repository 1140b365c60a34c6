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
    """`row`: the tokens of a row, where all rows have the same number: a matrix then has a line for each of them."""
    if size % TILE == 0:
        return None
    fills_end_to_end = size * row % TILE == 0
    below, above = size // TILE * TILE, (size // TILE + 1) * TILE
    found = f"Batches of {size}"
    if row > 1:
        found += f" rows of {row:,} tokens, {size * row:,} in all"
    found += f": {size} is not a multiple of {TILE}, so matrix units compute on padding"
    remedy = (
        f"Give batch_size={f'{below} or {above}' if below else above}, or better a multiple of {BETTER_TILE}"
    )
    if fills_end_to_end:
        found += " wherever rows are not laid end to end"
    elif row > 1:
        remedy += f", or a seq_len that is a multiple of {TILE}"
    # In a small batch some other dimension is long: pixels, or tokens that were not counted here.
    is_costly = size > TILE and not fills_end_to_end
    return Finding("batch-size", Level.WARNING if is_costly else Level.NOTE, found, remedy)
