"""The expected row at each position: those of a run on one rank that is never stopped, as digests."""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.rows.recipe import Recipe
from headrace.rows.rows import Rows

_REFERENCE_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The first wrong row of a trial; trial 0 is the run that is never stopped."""

    trial: int
    position: int
    what: str


class WrongRow(Exception):
    def __init__(self, position: int, what: str) -> None:
        super().__init__(what)
        self.position, self.what = position, what


class Reference:
    """The content of the rows of one stretch, in a run on one rank that is never stopped."""

    def __init__(self, recipe: Recipe, first: int, last: int) -> None:
        self.first, self.last, self.rows_per_epoch = first, last, recipe.rows_per_epoch
        rows = Rows(recipe, batch_size=_REFERENCE_BATCH)
        starts = range(first, last, _REFERENCE_BATCH)
        blocks = [np.arange(start, min(start + _REFERENCE_BATCH, last)) for start in starts]
        self.digests = np.concatenate([row_digests(rows(block), len(block)) for block in blocks])

    def check(self, positions: NDArray[np.int64], digests: NDArray[np.uint64]) -> None:
        """Raise WrongRow if the rows that were handed out for these positions are not the expected ones."""
        wrong = np.flatnonzero(digests != self.digests[positions - self.first])
        if not len(wrong):
            return
        same = np.flatnonzero(self.digests == digests[wrong[0]])
        what = "its content differs from that of the run without a stop"
        if len(same):
            what = f"it held the row that belongs to {self.place(int(same[0]) + self.first)}"
        raise WrongRow(int(positions[wrong[0]]), what)

    def place(self, position: int) -> str:
        return f"position {position:,} (epoch {position // self.rows_per_epoch:,})"


def row_digests(columns: Mapping[str, Any], rows: int) -> NDArray[np.uint64]:
    """A hash of each row of a batch, over all its fields."""
    digests = [0] * rows
    for name, column in columns.items():
        for row, content in enumerate(_row_contents(columns, name, column, rows)):
            digests[row] = xxhash.xxh3_64_intdigest(content, seed=digests[row])
    return np.array(digests, dtype=np.uint64)


def _row_contents(columns: Mapping[str, Any], name: str, column: Any, rows: int) -> Iterator[Any]:
    """The content of each row in one column, in a form that can be hashed."""
    ends = columns.get(f"{name}_offsets")
    if isinstance(ends, np.ndarray) and len(ends) == rows + 1:
        column = [column[begin:end] for begin, end in pairwise(ends.tolist())]
    elif len(column) != rows:
        return  # the offsets themselves, which depend on the rows before them
    elif isinstance(column, np.ndarray) and column.size:
        yield from np.ascontiguousarray(column).reshape(rows, -1).view(np.uint8)
        return
    for value in column:
        plain = value.tobytes() if isinstance(value, np.ndarray) else value
        yield plain if isinstance(plain, bytes) else pickle.dumps(plain)


def repeated_rows(recipe: Recipe, stretches: list[tuple[int, int]]) -> Iterator[Problem]:
    """Even the run without a stop must contain every row of a source's epoch only once."""
    positions = np.concatenate([np.arange(first, last) for first, last in stretches])
    places = recipe.stream.at(positions)
    order = np.lexsort((positions, places.row, places.epoch, places.source))
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for column in (places.source, places.epoch, places.row):
        same &= np.diff(column[order]) == 0
    again = order[1:][same]
    if len(again):
        where = again[np.argmin(positions[again])]
        what = f"row {places.row[where]:,} of epoch {places.epoch[where]:,} appears at two positions"
        yield Problem(trial=0, position=int(positions[where]), what=what)
