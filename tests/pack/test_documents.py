"""Documents in rows against documents that are really cut up and put away."""

from bisect import bisect_left, insort
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pack.documents import PackedDocuments, PaddedDocuments, Pieces
from headrace.pack.overlong import Overlong
from headrace.rows import kernel
from tests.properties import examples

Kind = type[PackedDocuments] | type[PaddedDocuments]
Piece = tuple[int, int, int, int]
"""The document's length, which of that length, where the piece starts, and its length."""

KINDS = st.sampled_from([PackedDocuments, PaddedDocuments])
OVERLONG = st.sampled_from(list(Overlong))
HISTOGRAMS = st.dictionaries(st.integers(0, 70), st.integers(0, 12), max_size=14)
SEQ_LENS = st.integers(1, 24)
KEYS = st.integers(0, 2**64 - 1)


def made(kind: Kind, histogram: dict[int, int], seq_len: int, overlong: Overlong) -> Any:
    return kind(list(histogram), list(histogram.values()), seq_len, overlong)


def listed(pieces: Pieces, histogram: dict[int, int]) -> list[tuple[int, Piece]]:
    """Each piece with its row."""
    lengths = np.array(list(histogram), dtype=np.int64)
    columns = (lengths[pieces.length_index], pieces.nth, pieces.start, pieces.length)
    return list(
        zip(pieces.row.tolist(), zip(*(column.tolist() for column in columns), strict=True), strict=True)
    )


def expected(histogram: dict[int, int], seq_len: int, overlong: Overlong) -> list[Piece]:
    """Every document, cut by hand."""
    pieces = []
    for length, count in histogram.items():
        for nth in range(count):
            kept = length
            if length > seq_len and overlong is not Overlong.SPLIT:
                kept = seq_len if overlong is Overlong.TRUNCATE else 0
            starts = range(0, kept, seq_len)
            pieces += [(length, nth, start, min(seq_len, kept - start)) for start in starts]
    return pieces


def classical_rows(seq_len: int, lengths: list[int]) -> int:
    """How many rows best-fit-decreasing opens: the textbook, one piece at a time."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = bisect_left(spaces, length)
        insort(spaces, (spaces.pop(place) if place < len(spaces) else seq_len) - length)
    return len(spaces)


def all_keys(documents: Any, key: int | None) -> Any:
    return None if key is None else np.full(documents.rows, key, dtype=np.uint64)


@examples(100)
@given(KINDS, HISTOGRAMS, SEQ_LENS, OVERLONG, st.none() | KEYS)
def test_all_rows_together_hold_every_document_once_cut_as_was_asked(
    kind: Kind, histogram: dict[int, int], seq_len: int, overlong: Overlong, key: int | None
) -> None:
    documents = made(kind, histogram, seq_len, overlong)
    pieces = documents.pieces_of(np.arange(documents.rows), all_keys(documents, key))
    found = listed(pieces, histogram)
    wanted = expected(histogram, seq_len, overlong)
    assert sorted(piece for _, piece in found) == sorted(wanted)
    assert (np.diff(pieces.row) >= 0).all()
    filled = Counter[int]()
    for row, (_, _, _, length) in found:
        filled[row] += length
    assert set(filled) == set(range(documents.rows)), "no row is empty"
    assert max(filled.values(), default=0) <= seq_len
    assert documents.tokens == sum(length for _, _, _, length in wanted)
    too_long = sum(count for length, count in histogram.items() if length > seq_len)
    assert documents.documents_cut == (0 if overlong is Overlong.SPLIT else too_long)
    _check_segments(documents, found, filled, seq_len)


def _check_segments(documents: Any, found: Any, filled: Counter[int], seq_len: int) -> None:
    in_rows = Counter(row for row, _ in found)
    held = [in_rows[row] + (filled[row] < seq_len) for row in range(documents.rows)]
    counts = documents.segments
    listed_counts = np.repeat(counts.segments, counts.rows).tolist()
    if isinstance(documents, PackedDocuments):
        assert sorted(listed_counts) == sorted(held)
    else:
        assert len(listed_counts) == len(held)
        assert max(held, default=0) <= 2


@examples(80)
@given(HISTOGRAMS, SEQ_LENS, OVERLONG)
def test_best_fit_takes_as_many_rows_as_the_textbook(
    histogram: dict[int, int], seq_len: int, overlong: Overlong
) -> None:
    pieces = [length for _, _, _, length in expected(histogram, seq_len, overlong)]
    documents = made(PackedDocuments, histogram, seq_len, overlong)
    assert documents.rows == classical_rows(seq_len, pieces)


@examples(60)
@given(HISTOGRAMS, SEQ_LENS, OVERLONG)
def test_padding_takes_a_row_for_each_piece_and_the_shortest_documents_come_first(
    histogram: dict[int, int], seq_len: int, overlong: Overlong
) -> None:
    histogram = dict(sorted(histogram.items()))
    documents = made(PaddedDocuments, histogram, seq_len, overlong)
    found = listed(documents.pieces_of(np.arange(documents.rows)), histogram)
    assert [piece for _, piece in found] == expected(histogram, seq_len, overlong)
    assert [row for row, _ in found] == list(range(documents.rows))


@examples(70)
@given(KINDS, HISTOGRAMS, SEQ_LENS, OVERLONG, st.none() | KEYS, st.data())
def test_rows_asked_for_alone_or_together_in_any_order_are_the_same(
    kind: Kind,
    histogram: dict[int, int],
    seq_len: int,
    overlong: Overlong,
    key: int | None,
    data: st.DataObject,
) -> None:
    documents = made(kind, histogram, seq_len, overlong)
    keys = all_keys(documents, key)
    everything = listed(documents.pieces_of(np.arange(documents.rows), keys), histogram)
    asked = data.draw(
        st.lists(st.integers(0, max(documents.rows - 1, 0)), max_size=8 if documents.rows else 0)
    )
    same = None if key is None else np.full(len(asked), key, dtype=np.uint64)
    some = documents.pieces_of(asked, same)
    wanted = [
        (number, piece) for number, row in enumerate(asked) for other, piece in everything if other == row
    ]
    assert listed(some, histogram) == wanted
    for row in asked[:2]:
        alone = documents.pieces_of([row], None if keys is None else keys[:1])
        assert [piece for _, piece in listed(alone, histogram)] == [p for r, p in everything if r == row]


@examples(50)
@given(HISTOGRAMS, SEQ_LENS, OVERLONG, KEYS, KEYS)
def test_keys_change_which_document_of_a_length_and_nothing_else(
    histogram: dict[int, int], seq_len: int, overlong: Overlong, one: int, other: int
) -> None:
    documents = made(PackedDocuments, histogram, seq_len, overlong)
    rows = np.arange(documents.rows)
    plain = documents.pieces_of(rows)
    for key in (one, other):
        mixed = documents.pieces_of(rows, all_keys(documents, key))
        assert mixed.row.tolist() == plain.row.tolist()
        assert mixed.length.tolist() == plain.length.tolist()


def test_other_keys_compose_other_rows_and_each_row_follows_its_own_key() -> None:
    histogram = {3: 40, 5: 40, 7: 40}
    documents = made(PackedDocuments, histogram, 15, Overlong.SPLIT)
    rows = np.arange(documents.rows)
    found = {key: listed(documents.pieces_of(rows, all_keys(documents, key)), histogram) for key in (1, 2, 3)}
    plain = listed(documents.pieces_of(rows), histogram)
    for left, right in ((found[1], found[2]), (found[2], found[3]), (found[1], plain)):
        same = sum(a == b for a, b in zip(left, right, strict=True))
        assert same < len(plain) / 3
    # Two epochs in one call: half of the rows with each key.
    half = np.where(rows % 2 == 0, 1, 2).astype(np.uint64)
    both = listed(documents.pieces_of(rows, half), histogram)
    assert both == [
        (first if row % 2 == 0 else second)
        for (row, _), first, second in zip(both, found[1], found[2], strict=True)
    ]


def test_lengths_are_mixed_independently_of_each_other() -> None:
    histogram = {3: 50, 4: 50}
    documents = made(PackedDocuments, histogram, 7, Overlong.SPLIT)
    pieces = documents.pieces_of(np.arange(documents.rows), all_keys(documents, 5))
    nth = {n: pieces.nth[pieces.length == n] for n in (3, 4)}
    assert sum(nth[3] == nth[4]) < 10


@examples(80)
@given(KINDS, HISTOGRAMS, SEQ_LENS, OVERLONG, st.booleans(), st.integers(0, 2**32))
def test_the_compiled_look_up_gives_the_same_pieces(
    kind: Kind, histogram: dict[int, int], seq_len: int, overlong: Overlong, mixed: bool, seed: int
) -> None:
    documents = made(kind, histogram, seq_len, overlong)
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, documents.rows, 40) if documents.rows else np.empty(0, dtype=np.int64)
    keys = rng.integers(0, 2**63, len(rows)).astype(np.uint64) if mixed else None
    own, other = documents.pieces_of(rows, keys), kernel.pack(documents, rows, keys)
    for name, column in vars(own).items():
        assert column.tolist() == getattr(other, name).tolist(), name


def test_rows_that_do_not_exist_are_refused_by_the_compiled_look_up_too() -> None:
    documents = made(PackedDocuments, dict.fromkeys(range(1, 40), 9), 16, Overlong.SPLIT)
    for row in (-1, documents.rows):
        with pytest.raises(ValueError):
            kernel.pack(documents, np.array([row]), None)


@pytest.mark.parametrize("kind", [PackedDocuments, PaddedDocuments])
@pytest.mark.parametrize("histogram", [{}, {0: 5}, {4: 0}, {0: 3, 9: 0}])
def test_nothing_but_empty_documents_makes_no_rows(kind: Kind, histogram: dict[int, int]) -> None:
    documents = made(kind, histogram, 4, Overlong.SPLIT)
    assert (documents.rows, documents.tokens, documents.documents_cut) == (0, 0, 0)
    assert listed(documents.pieces_of([]), histogram) == []


def test_a_billion_documents_are_packed_and_any_row_is_found() -> None:
    lengths = np.arange(1, 3000)
    counts = np.full(len(lengths), 400_000)
    for kind in (PackedDocuments, PaddedDocuments):
        documents = kind(lengths, counts, 512)
        assert documents.tokens == int((lengths * counts).sum())
        rows = np.array([0, documents.rows // 2, documents.rows - 1])
        pieces = documents.pieces_of(rows, np.full(3, 9, dtype=np.uint64))
        assert set(pieces.row.tolist()) == {0, 1, 2}
        assert (pieces.nth < 400_000).all()
        assert (pieces.start + pieces.length <= lengths[pieces.length_index]).all()
