"""Which positions of a stream a proof checks: all of them, or stretches of a pass that is too long for that."""

from typing import Any

import numpy as np

from headrace.rows.recipe import Recipe
from headrace.rows.sample_rows import RecordRows

_MOST_ROWS, _LEAST_ROWS = 20_000, 512
_BYTES_A_TRIAL, _BYTES_OF_UNKNOWN_ROW = 2**27, 2**16
_STRETCHES = 5


def default_rows(recipe: Recipe) -> int:
    """As many rows as a trial checks in about a second, whatever the size of a row.

    For a mixture, the source with the largest rows counts.
    """
    if recipe.settings.seq_len is not None:
        size = recipe.settings.seq_len * np.dtype(recipe.settings.dtype).itemsize
    else:
        size = max(_row_bytes(source) for source in recipe.sources)
    return int(np.clip(_BYTES_A_TRIAL // max(size, 1), _LEAST_ROWS, _MOST_ROWS))


def _row_bytes(source: Any) -> int:
    """The size of a source's rows on average, if it is known."""
    if not isinstance(source, RecordRows):
        return _BYTES_OF_UNKNOWN_ROW
    whole = sum(table.elements * table.item_bytes for table in source.tables.values())
    return int(whole // max(1, source.rows))


def choose_stretches(
    rows_per_epoch: int, epochs: int, limit: int, seed: int
) -> tuple[list[tuple[int, int]], bool]:
    """The stretches to check, and whether they are the whole pass (with some of the next one), as the limit allows."""
    total = rows_per_epoch * epochs
    if total <= limit:
        return [(0, total + max(1, min(rows_per_epoch, limit // 8)))], True
    each = max(2, limit // _STRETCHES)
    half = each // 2
    # The first step into another epoch, and the end of the pass; these are the same if a pass is one epoch.
    crossings = {rows_per_epoch, total}
    chosen = [(0, each), *((max(0, place - half), place + each - half) for place in crossings)]
    between = max(1, _STRETCHES - len(chosen))
    starts = np.sort(np.random.default_rng([seed, 0]).integers(0, max(1, total - each), between))
    chosen += [(start, start + each) for start in starts.tolist()]
    return _joined(sorted(chosen)), False


def _joined(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges stretches that overlap or touch."""
    joined = stretches[:1]
    for first, last in stretches[1:]:
        if first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined
