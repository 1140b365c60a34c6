"""Documents longer than a row: split into full rows and a rest, or truncated, or dropped.

The rests of length r are those of the documents of length r, r + seq_len, r + 2 seq_len, ... With rows of 10, a
document of 23 tokens gives two full rows and a rest of 3; one of 20 gives two full rows and no rest.

So 'the j-th rest of length 3' is found without a list: the documents of length 3, then those of 13, then those
of 23, and so on, each length in the order of the index.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Overlong(StrEnum):
    SPLIT = "split"
    TRUNCATE = "truncate"
    DROP = "drop"


@dataclass(frozen=True)
class Runs:
    """Documents (or pieces of them) numbered by length: those of length `lengths[index]` begin at number `start`."""

    index: NDArray[np.int64]
    start: NDArray[np.int64]
    """One entry more than there are runs: the last is the number of all documents."""

    @staticmethod
    def of(index: NDArray[np.int64], count: NDArray[np.int64]) -> "Runs":
        return Runs(index, np.concatenate([[0], np.cumsum(count)]).astype(np.int64))

    @property
    def total(self) -> int:
        return int(self.start[-1])

    def find(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The index of the length of each document, and its number among those of that length."""
        run = np.searchsorted(self.start, numbers, side="right") - 1
        return self.index[run], numbers - self.start[run]


@dataclass(frozen=True)
class Cut:
    """A histogram split into full rows of `seq_len` tokens, and rests of 1 to seq_len - 1 tokens to pack."""

    seq_len: int
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    """The distinct lengths of the rests, ascending, and how many rests have each."""
    rests: Runs
    """The documents of each rest: those with a rest of `lengths[i]` begin at `rest_start[i]`."""
    rest_start: NDArray[np.int64]
    first_run: NDArray[np.int64]
    """The first run of each rest."""
    full: Runs
    """Pieces that fill a row."""
    full_per_document: NDArray[np.int64]
    """How many such pieces a document has, by the index of its length."""
    start_of_rest: NDArray[np.int64]
    """Where in its document the rest begins, by the index of its length."""
    documents_cut: int

    @property
    def full_rows(self) -> int:
        return self.full.total

    def class_of(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of each of these lengths of rests in `lengths`."""
        return np.searchsorted(self.lengths, lengths)

    def full_pieces(
        self, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """For each full piece: the index of its document's length, its number in that length, and where it starts."""
        index, number = self.full.find(numbers)
        per_document = self.full_per_document[index]
        return index, number // per_document, number % per_document * self.seq_len

    def rest_pieces(
        self, lengths: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The same for the `positions[i]`-th rest of length `lengths[i]`."""
        which = self.class_of(lengths)
        number, run = self.rest_start[which] + positions, self.first_run[which]
        # Most rests are whole documents, in the first run of their length; only the others need a search.
        further = np.flatnonzero(number >= self.rests.start[run + 1])
        run[further] = np.searchsorted(self.rests.start, number[further], side="right") - 1
        index = self.rests.index[run]
        return index, number - self.rests.start[run], self.start_of_rest[index]


def cut_overlong(lengths: Any, counts: Any, seq_len: int, overlong: Overlong = Overlong.SPLIT) -> Cut:
    """Split the lengths of a histogram. Empty documents take no space and are left out."""
    lengths, counts = np.asarray(lengths, dtype=np.int64), np.asarray(counts, dtype=np.int64)
    kept, pieces = lengths, lengths // seq_len
    if overlong is Overlong.TRUNCATE:
        kept, pieces = np.minimum(lengths, seq_len), np.minimum(pieces, 1)
    elif overlong is Overlong.DROP:
        kept = np.where(lengths <= seq_len, lengths, 0)
        pieces = kept // seq_len
    rest = kept - pieces * seq_len
    by_rest = np.lexsort((lengths, rest))
    by_rest = by_rest[rest[by_rest] > 0]
    runs = Runs.of(by_rest, counts[by_rest])
    ordered = rest[by_rest]
    # Not numpy.unique: see order/distinct.py.
    first = np.flatnonzero(np.diff(ordered, prepend=0))
    rest_start = runs.start[first]
    whole = np.flatnonzero(pieces)
    lost = lengths - kept
    return Cut(
        seq_len=seq_len,
        lengths=ordered[first],
        counts=np.diff(np.append(rest_start, runs.total)),
        rests=runs,
        rest_start=rest_start,
        first_run=first,
        full=Runs.of(whole, (counts * pieces)[whole]),
        full_per_document=pieces,
        start_of_rest=pieces * seq_len,
        documents_cut=int(counts[lost > 0].sum()),
    )
