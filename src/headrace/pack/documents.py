"""Documents in rows, for any rows, from the histogram of their lengths alone.

A row is made of pieces: `length` tokens, from `start` on, of the `nth` document of one length. The dataset's by-length
index says which document that is. `keys` (the key of its epoch for each row) shuffle the documents of one length, so
that every epoch composes its rows differently. `tables` holds the whole packing, for the compiled loops.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.order.keys import derive
from headrace.order.permutation import permute
from headrace.pack.best_fit import BestFit, plan_best_fit
from headrace.pack.overlong import Cut, Overlong, Runs, cut_overlong
from headrace.pack.packing import Packing
from headrace.pack.room import SegmentCounts


@dataclass(frozen=True)
class Pieces:
    """Piece i is in row `row[i]` of those asked for; rows ascend, and the pieces of a row are in order."""

    row: NDArray[np.int64]
    length_index: NDArray[np.int64]
    nth: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]


class DocumentPacking(Protocol):
    """A way to put documents into rows, made from the histogram of their lengths; `STRATEGIES` lists them all."""

    rows: int
    tokens: int
    """How many tokens all rows hold."""
    documents_cut: int

    @property
    def segments(self) -> SegmentCounts:
        """How many segments (documents and padding) the rows have."""
        ...

    def pieces_of(self, rows: Any, keys: NDArray[np.uint64] | None = None) -> Pieces:
        """The pieces of each row."""
        ...


class PackedDocuments:
    """Best fit: first rows filled by pieces of long documents, then rows of their rests and shorter documents."""

    def __init__(self, lengths: Any, counts: Any, seq_len: int, overlong: Overlong = Overlong.SPLIT) -> None:
        self.cut: Cut = cut_overlong(lengths, counts, seq_len, overlong)
        self.plan: BestFit = plan_best_fit(self.cut.lengths, self.cut.counts, seq_len)
        self.rows = self.cut.full_rows + self.plan.rows
        self.pieces = self.cut.full_rows + self.cut.rests.total
        self.tokens = self.cut.full_rows * seq_len + self.plan.tokens
        self.documents_cut = self.cut.documents_cut
        self.seq_len = seq_len

    @cached_property
    def segments(self) -> SegmentCounts:
        documents, tokens, rows = self.plan.rows_by_content
        of_packed_rows = documents + (tokens < self.seq_len)
        return SegmentCounts(np.append(of_packed_rows, 1), np.append(rows, self.cut.full_rows))

    @cached_property
    def tables(self) -> tuple[NDArray[np.int64], ...]:
        """Everything that `pieces_of` uses: full pieces, the tree of moves, the classes of rests."""
        cut, plan = self.cut, self.plan
        full = (cut.full.start, cut.full.index, cut.full_per_document, cut.start_of_rest)
        leaves = (plan.leaf_start, plan.leaf_node, plan.leaf_first)
        moves = (plan.parent, plan.first, plan.length, plan.per_row, plan.offset)
        classes = (cut.place_of, cut.counts, cut.rest_start, cut.first_run, cut.rests.start, cut.rests.index)
        return tuple(
            np.ascontiguousarray(each, dtype=np.int64) for each in (*full, *leaves, *moves, *classes)
        )

    def pieces_of(self, rows: Any, keys: NDArray[np.uint64] | None = None) -> Pieces:
        rows = np.asarray(rows, dtype=np.int64)
        full = np.flatnonzero(rows < self.cut.full_rows)
        packed = np.flatnonzero(rows >= self.cut.full_rows)
        whole = self._whole(full, rows[full])
        mixed = self._mixed(packed, rows[packed] - self.cut.full_rows, keys)
        if not len(full) or not len(packed):
            return whole if len(full) else mixed
        order = np.argsort(np.concatenate([whole.row, mixed.row]), kind="stable")
        return Pieces(
            *(
                np.concatenate([a, b])[order]
                for a, b in zip(vars(whole).values(), vars(mixed).values(), strict=True)
            )
        )

    def _whole(self, asked: NDArray[np.intp], numbers: NDArray[np.int64]) -> Pieces:
        index, nth, start = self.cut.full_pieces(numbers)
        return Pieces(asked, index, nth, start, np.full(len(asked), self.seq_len, dtype=np.int64))

    def _mixed(
        self, asked: NDArray[np.intp], numbers: NDArray[np.int64], keys: NDArray[np.uint64] | None
    ) -> Pieces:
        documents = self.plan.documents_of(numbers)
        row, position = asked[documents.row], documents.position
        if keys is not None and len(position):
            sizes = self.cut.counts[self.cut.place_of[documents.length]]
            position = permute(position, sizes, derive(keys[row], documents.length))
        index, nth, start = self.cut.rest_pieces(documents.length, position)
        return Pieces(row, index, nth, start, documents.length)


class PaddedDocuments:
    """One document per row, the shortest first, then padding; a long document takes several rows if it is split."""

    def __init__(self, lengths: Any, counts: Any, seq_len: int, overlong: Overlong = Overlong.SPLIT) -> None:
        self._lengths, counts = np.asarray(lengths, dtype=np.int64), np.asarray(counts, dtype=np.int64)
        self._kept = self._lengths
        if overlong is not Overlong.SPLIT:
            longest = seq_len if overlong is Overlong.TRUNCATE else 0
            self._kept = np.where(self._lengths > seq_len, longest, self._lengths)
        self._per_document = -(-self._kept // seq_len)
        some = np.flatnonzero(self._per_document)
        self._runs = Runs.of(some, (counts * self._per_document)[some])
        self._seq_len = seq_len
        self.rows = self._runs.total
        self.tokens = int((self._kept * counts).sum())
        self.documents_cut = int(counts[self._kept < self._lengths].sum())

    @property
    def segments(self) -> SegmentCounts:
        # A document and, nearly always, padding.
        return SegmentCounts(np.array([2]), np.array([self.rows]))

    def pieces_of(self, rows: Any, keys: NDArray[np.uint64] | None = None) -> Pieces:
        rows = np.asarray(rows, dtype=np.int64)
        index, number = self._runs.find(rows)
        start = number % self._per_document[index] * self._seq_len
        length = np.minimum(self._kept[index] - start, self._seq_len)
        return Pieces(np.arange(len(rows)), index, number // self._per_document[index], start, length)


STRATEGIES: Mapping[Packing, type[PackedDocuments] | type[PaddedDocuments]] = {
    Packing.BEST_FIT: PackedDocuments,
    Packing.PAD: PaddedDocuments,
}
"""By the user's choice. `Packing.WINDOWS` is missing because it needs no lengths, only the ends of documents."""
