"""Documents in rows, for any rows, from the histogram of their lengths alone.

A row is made of pieces: `length` tokens, from `start` on, of the `nth` document of one length. The dataset's by-length
index says which document that is. `keys` (the key of its epoch for each row) shuffle the documents of one length, so
that every epoch composes its rows differently. `tables` holds the whole packing, for the compiled loops.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.order.keys import derive
from headrace.order.permutation import permute
from headrace.pack.best_fit import BestFit, PlanBestFit, plan_best_fit
from headrace.pack.overlong import Cut, Overlong, Runs, cut_overlong
from headrace.pack.packing import Packing
from headrace.pack.room import SegmentCounts

_FEW_ROWS = 2**14
"""With so few, a packing has a leaf for each row in its tables, so that none has to be searched for."""


@dataclass(frozen=True)
class Pieces:
    """Piece i is in row `row[i]` of those asked for; rows ascend, and the pieces of a row are in order."""

    row: NDArray[np.int64]
    length_index: NDArray[np.int64]
    nth: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]


class DocumentPacking(Protocol):
    """A way to put documents into rows, made from the histogram of their lengths; see `strategy_of`."""

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
    """Best fit: first rows filled by pieces of long documents, then rows of their rests and shorter documents.

    A compiled `plan` makes the same plan, faster.
    """

    def __init__(
        self,
        lengths: Any,
        counts: Any,
        seq_len: int,
        overlong: Overlong = Overlong.SPLIT,
        plan: PlanBestFit = plan_best_fit,
    ) -> None:
        self.cut: Cut = cut_overlong(lengths, counts, seq_len, overlong)
        self.plan: BestFit = plan(self.cut.lengths, self.cut.counts, seq_len)
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
    def tables(self) -> NDArray[np.int64]:
        """Everything that `pieces_of` uses: runs of full pieces, the leaves and moves of the plan, and runs of rests.

        All of it is in one array, because a batch may need hundreds of packings: first how many numbers each table has,
        then the tables, row by row, so that numbers that are used together lie together.
        """
        cut, plan = self.cut, self.plan
        if plan.rows <= _FEW_ROWS:
            plan = plan.leaf_per_row()
        full, rests = cut.full.index, cut.rests.index
        class_of_move = cut.class_of(plan.length)
        documents, first_run = cut.counts[class_of_move], cut.first_run[class_of_move]
        tables = (
            _row_by_row(cut.full.start, np.append(full, 0), np.append(cut.full_per_document[full], 0)),
            plan.leaf_start,
            _row_by_row(plan.leaf_node, plan.leaf_first),
            _row_by_row(
                plan.parent, plan.first, plan.length, plan.per_row, plan.offset, documents, first_run
            ),
            _row_by_row(cut.rests.start, np.append(rests, 0), np.append(cut.start_of_rest[rests], 0)),
        )
        sizes = [len(table) for table in tables]
        return np.concatenate([sizes, *tables])

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
            sizes = self.cut.counts[self.cut.class_of(documents.length)]
            position = permute(position, sizes, derive(keys[row], documents.length))
        index, nth, start = self.cut.rest_pieces(documents.length, position)
        return Pieces(row, index, nth, start, documents.length)


def _row_by_row(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack(columns, axis=1).reshape(-1)


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


Strategy = Callable[[Any, Any, int, Overlong], DocumentPacking]
"""Makes a packing from lengths, counts, seq_len, and what happens to longer documents."""


def strategy_of(packing: Packing, plan: PlanBestFit = plan_best_fit) -> Strategy:
    """By the user's choice. `Packing.WINDOWS` is missing because it needs no lengths, only the ends of documents."""
    strategies: dict[Packing, Strategy] = {
        Packing.BEST_FIT: partial(PackedDocuments, plan=plan),
        Packing.PAD: PaddedDocuments,
    }
    return strategies[packing]
