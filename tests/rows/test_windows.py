"""Windows over all tokens against tokens that are really joined and cut."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import headrace
from headrace.errors import CorruptError, SettingsError
from headrace.rows.parts import PartTable
from headrace.rows.token_rows import Stretches, WindowRows
from tests.properties import examples
from tests.rows.parts_in_ram import in_parts, next_tokens, read

Parts = list[list[int]]
LENGTHS: st.SearchStrategy[Parts] = st.lists(st.lists(st.integers(0, 25), max_size=6), min_size=1, max_size=6)
CASES = st.tuples(LENGTHS, st.integers(2, 16)).filter(lambda case: sum(map(sum, case[0])) >= case[1])


def windows(
    lengths: Parts, seq_len: int, boundaries: bool, align: bool
) -> tuple[WindowRows, list[list[int]]]:
    data, documents = in_parts(lengths)
    return WindowRows(PartTable(data, "tokens"), seq_len, boundaries, align), documents


def every_row(rows: WindowRows) -> tuple[Stretches, list[list[list[int]]]]:
    stretches = rows.stretches(np.arange(rows.rows), None)
    found = read(stretches)
    return stretches, [found.get(row, []) for row in range(rows.rows)]


def pieces_between(
    begin: int, end: int, documents: Sequence[Sequence[int]]
) -> list[tuple[list[int], int | None]]:
    """The documents' tokens from place `begin` to `end` of all, each piece with the token that follows in it."""
    pieces = []
    starts = itertools.accumulate(map(len, documents), initial=0)
    for start, document in zip(starts, documents, strict=False):
        first, last = max(begin - start, 0), min(end - start, len(document))
        if last > first:
            pieces.append((list(document[first:last]), document[last] if last < len(document) else None))
    return pieces


@examples(60)
@given(CASES)
def test_windows_with_boundaries_are_all_tokens_joined_and_cut(case: tuple[Parts, int]) -> None:
    lengths, seq_len = case
    rows, documents = windows(lengths, seq_len, boundaries=True, align=False)
    total = sum(map(len, documents))
    assert rows.rows == -(-total // seq_len)
    stretches, found = every_row(rows)
    wanted = [
        pieces_between(row * seq_len, min((row + 1) * seq_len, total), documents) for row in range(rows.rows)
    ]
    assert found == [[piece for piece, _ in pieces] for pieces in wanted]
    assert next_tokens(stretches) == [following for pieces in wanted for _, following in pieces]
    for piece, record, start in zip(
        itertools.chain(*found), stretches.record.tolist(), stretches.start.tolist(), strict=True
    ):
        assert documents[record][start : start + len(piece)] == piece
    report = rows.report()
    assert (report.tokens, report.cut, report.documents_cut) == (total, 0, 0)
    assert report.padded == rows.rows * seq_len - total


@examples(60)
@given(CASES)
def test_windows_without_boundaries_hold_the_same_tokens(case: tuple[Parts, int]) -> None:
    lengths, seq_len = case
    rows, documents = windows(lengths, seq_len, boundaries=False, align=False)
    tokens = [token for document in documents for token in document]
    stretches, found = every_row(rows)
    joined = [[token for piece in pieces for token in piece] for pieces in found]
    assert joined == [tokens[start : start + seq_len] for start in range(0, len(tokens), seq_len)]
    # Stretches only end where a row or a part does; tokens count up, so the next one is one more.
    ends = [sum(map(sum, lengths[: number + 1])) for number in range(len(lengths))]
    for piece, following in zip(itertools.chain(*found), next_tokens(stretches), strict=True):
        assert following in (piece[-1] + 1, None)
        assert (following is None) == (piece[-1] in ends)
    assert rows.report().tokens == len(tokens)


@examples(40)
@given(st.lists(st.integers(0, 25), max_size=12), st.integers(2, 16))
def test_without_boundaries_a_row_is_one_stretch_with_a_label_for_every_token(
    lengths: list[int], seq_len: int
) -> None:
    if sum(lengths) < seq_len:
        return
    rows, documents = windows([lengths], seq_len, boundaries=False, align=False)
    stretches, found = every_row(rows)
    total = sum(map(len, documents))
    assert [len(pieces) for pieces in found] == [1] * rows.rows
    assert next_tokens(stretches) == [
        end + 1 if end < total else None for end in range(seq_len, total + seq_len, seq_len)
    ]


def test_without_boundaries_only_the_end_of_a_shard_shows() -> None:
    rows, _ = windows([[2, 4], [6]], 4, boundaries=False, align=False)
    stretches, found = every_row(rows)
    assert [len(pieces) for pieces in found] == [1, 2, 1]
    assert next_tokens(stretches) == [5, None, 9, None]


# Windows that begin with a document


def aligned_oracle(documents: Sequence[Sequence[int]], seq_len: int) -> list[tuple[int, int]]:
    """Where each aligned row begins and ends."""
    total = sum(map(len, documents))
    starts = [
        s for s, d in zip(itertools.accumulate(map(len, documents), initial=0), documents, strict=False) if d
    ]
    places = [*range(0, total, seq_len)]
    begins = [next((s for s in starts if place <= s < place + seq_len), place) for place in places]
    return [
        (begin, min(begin + seq_len, following))
        for begin, following in zip(begins, [*begins[1:], total], strict=True)
    ]


def check_aligned(lengths: Parts, seq_len: int) -> None:
    rows, documents = windows(lengths, seq_len, boundaries=True, align=True)
    stretches, found = every_row(rows)
    wanted = [pieces_between(begin, end, documents) for begin, end in aligned_oracle(documents, seq_len)]
    assert found == [[piece for piece, _ in pieces] for pieces in wanted]
    assert next_tokens(stretches) == [following for pieces in wanted for _, following in pieces]


@examples(100)
@example(([[10]], 4))
@given(CASES)
def test_aligned_rows_begin_with_the_first_document_that_starts_in_their_window(
    case: tuple[Parts, int],
) -> None:
    check_aligned(*case)


@examples(60)
@given(CASES, st.integers(1, 15))
def test_aligned_rows_are_right_where_a_document_starts_in_the_last_window(
    case: tuple[Parts, int], last: int
) -> None:
    lengths, seq_len = case
    total = sum(map(sum, lengths))
    last = min(last, seq_len - 1)
    # One document more, so that it starts in the last window.
    room = -total % seq_len or seq_len
    check_aligned([*lengths, [min(last, room)]], seq_len)


def test_a_last_window_inside_a_long_document_keeps_its_tokens() -> None:
    rows, _ = windows([[10]], 4, boundaries=True, align=True)
    _, found = every_row(rows)
    assert found == [[[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9, 10]]]
    assert rows.report().cut == 0


@examples(60)
@given(CASES)
def test_aligned_rows_repeat_no_token_and_the_report_says_what_they_hold(case: tuple[Parts, int]) -> None:
    lengths, seq_len = case
    rows, documents = windows(lengths, seq_len, boundaries=True, align=True)
    _, found = every_row(rows)
    tokens = [token for pieces in found for piece in pieces for token in piece]
    assert tokens == sorted(set(tokens))
    assert all(sum(map(len, pieces)) <= seq_len for pieces in found)
    report = rows.report()
    assert report.tokens == len(tokens)
    assert report.tokens + report.cut == sum(map(len, documents))
    assert report.tokens + report.padded == rows.rows * seq_len
    first_tokens = {document[0] for document in documents if document}
    for row, pieces in enumerate(found):
        starting = [
            token for token in range(row * seq_len + 1, (row + 1) * seq_len + 1) if token in first_tokens
        ]
        if starting:
            assert pieces[0][0] == starting[0]


@examples(40)
@given(CASES, st.booleans(), st.booleans(), st.data())
def test_rows_in_any_order_are_the_rows_one_by_one(
    case: tuple[Parts, int], boundaries: bool, align: bool, data: st.DataObject
) -> None:
    rows, _ = windows(*case, boundaries or align, align)
    _, everything = every_row(rows)
    asked = data.draw(st.lists(st.integers(0, rows.rows - 1), min_size=1, max_size=8))
    found = read(rows.stretches(np.array(asked), None))
    assert [found.get(number, []) for number in range(len(asked))] == [everything[row] for row in asked]


def test_fewer_tokens_than_a_row_are_refused(tmp_path: Path) -> None:
    with headrace.Writer(tmp_path / "data", {"tokens": "uint16[*]"}) as writer:
        for length in (3, 4):
            writer.write({"tokens": np.arange(length, dtype=np.uint16)})
    with pytest.raises(SettingsError, match=r"seq_len=8: the dataset has only 7 tokens"):
        headrace.Loader(headrace.open(tmp_path / "data"), seq_len=8, batch_size=1, packing="windows")


# On disk


@pytest.mark.parametrize("align", [False, True])
def test_windows_cross_the_borders_of_shards_on_disk(tmp_path: Path, align: bool) -> None:
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 60_000, n).tolist() for n in rng.integers(0, 40, 90)] + [[1, 2]]
    with headrace.Writer(tmp_path / "data", {"tokens": "uint16[*]"}, shard_bytes=500) as writer:
        for document in documents:
            writer.write({"tokens": np.array(document, dtype=np.uint16)})
    data = headrace.open(tmp_path / "data")
    assert len(data.source.part_records) > 5
    rows = WindowRows(PartTable(data, "tokens"), 16, True, align)
    _, found = every_row(rows)
    total = sum(map(len, documents))
    spans = [(row * 16, min(row * 16 + 16, total)) for row in range(rows.rows)]
    spans = aligned_oracle(documents, 16) if align else spans
    assert found == [[piece for piece, _ in pieces_between(*span, documents)] for span in spans]


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("offsets", [[0, 9, 4, 12], [0, 4, 2**63, 12], [0, 5, 13, 12], [0, 12, 0, 12]])
def test_damaged_offsets_are_an_error_or_only_move_where_documents_end(
    offsets: list[int], align: bool
) -> None:
    data, _ = in_parts([[3, 4, 5]])
    table = PartTable(data, "tokens")
    column: Any = data.part(0)["tokens"]
    column.offsets[:] = np.array(offsets, dtype=np.uint64).view(np.int64)
    rows = WindowRows(table, 4, True, align)
    for number in range(rows.rows):
        try:
            held = read(rows.stretches(np.array([number]), None)).get(0, [])
        except CorruptError as error:
            assert "headrace verify" in str(error)
        else:
            tokens = [token for piece in held for token in piece]
            first = tokens[0] if align and tokens else 4 * number + 1
            assert tokens == list(range(first, first + len(tokens)))
            assert len(tokens) == 4 or (align and len(tokens) < 4)


Write = Callable[..., Any]


def test_a_part_without_documents_is_passed_over(tmp_path: Path, write_dataset: Write) -> None:
    shards = [[], [{"tokens": [1, 2, 3]}], [], [{"tokens": []}], [{"tokens": [4, 5]}], []]
    write_dataset(tmp_path / "data", {"tokens": "uint16[*]"}, shards)
    data = headrace.open(tmp_path / "data")
    for align in (False, True):
        _, found = every_row(WindowRows(PartTable(data, "tokens"), 5, True, align))
        assert found == [[[1, 2, 3], [4, 5]]]
