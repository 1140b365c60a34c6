"""Packing by the compiled loops against packing in Python: plans, numbers of rows, and rows of many packings."""

import threading
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.pack import best_fit
from headrace.pack.documents import PackedDocuments, PaddedDocuments
from headrace.pack.overlong import Overlong
from headrace.rows import kernel, reference
from tests.properties import examples
from tests.rows.compiled import compiled_kernel

compiled: Any = compiled_kernel()

BEYOND_TABLES = 2**20 + 1
"""From this seq_len on, the kernel keeps the open spaces in a list instead of tables."""
PLAN = ("parent", "first", "length", "per_row", "offset", "leaf_node", "leaf_first", "leaf_start")


def short_and_long(seq_len: int) -> st.SearchStrategy[int]:
    """Lengths from 1 to seq_len, of which many are alike, or near a fraction of it."""
    near = st.integers(1, 5).flatmap(lambda part: st.integers(-2, 2).map(lambda more: seq_len // part + more))
    any_length = st.integers(1, seq_len) | st.integers(1, min(seq_len, 40)) | near
    return any_length.map(lambda length: min(max(length, 1), seq_len))


SEQ_LENS = st.one_of(
    st.integers(1, 70),
    st.sampled_from([63, 64, 65, 4095, 4096, 4097, BEYOND_TABLES - 1, BEYOND_TABLES, 2**31]),
)
HISTOGRAMS = SEQ_LENS.flatmap(
    lambda seq_len: st.tuples(
        st.just(seq_len), st.dictionaries(short_and_long(seq_len), st.integers(0, 40), max_size=30)
    )
)


def assert_same_plan(lengths: Any, counts: Any, seq_len: int) -> None:
    expected = best_fit.plan_best_fit(lengths, counts, seq_len)
    found = kernel.plan_best_fit(lengths, counts, seq_len)
    for name in PLAN:
        assert getattr(found, name).dtype == np.int64
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    assert (found.seq_len, found.tokens, found.rows) == (expected.seq_len, expected.tokens, expected.rows)


# Plans


@examples(100)
@given(HISTOGRAMS)
def test_plans_are_those_of_python_move_by_move(case: tuple[int, dict[int, int]]) -> None:
    seq_len, histogram = case
    assert_same_plan(list(histogram), list(histogram.values()), seq_len)


@examples(40)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2**40)), max_size=12), st.integers(9, 12))
def test_a_length_may_come_twice_and_a_trillion_documents_are_packed(
    entries: list[tuple[int, int]], seq_len: int
) -> None:
    assert_same_plan([length for length, _ in entries], [count for _, count in entries], seq_len)


@pytest.mark.parametrize("seq_len", [1, 2, 64, 2048, BEYOND_TABLES, 2**31, 2**50])
def test_no_document_one_and_many_of_one_length(seq_len: int) -> None:
    for length in {1, max(1, seq_len // 3), seq_len}:
        assert_same_plan([], [], seq_len)
        assert_same_plan([length], [0], seq_len)
        assert_same_plan([length], [1], seq_len)
        assert_same_plan([length], [1000], seq_len)


@pytest.mark.parametrize("seq_len", [512, 2048, 65536, BEYOND_TABLES, 2**31])
def test_lengths_as_those_of_web_pages_give_the_same_plan(seq_len: int) -> None:
    rng = np.random.default_rng(seq_len)
    lengths = np.clip(rng.lognormal(6, 1.6, 5000).astype(np.int64), 1, seq_len)
    assert_same_plan(*np.unique(lengths, return_counts=True), seq_len)


@pytest.mark.parametrize(
    ("lengths", "counts", "seq_len"),
    [
        ([5], [1], 4),
        ([0], [1], 4),
        ([-1], [1], 4),
        ([3, -(2**63)], [1, 1], 4),
        ([2**63 - 1], [1], 4),
        ([1], [1], 0),
        ([1], [1], -3),
        ([1], [1], 2**63),
        ([1], [-1], 4),
        ([2, 3], [5, -(2**63)], 4),
        ([4], [2**63 - 1], 4),
        ([3, 4], [2**61, 2**61], 4),
        ([1, 2], [1], 4),
        ([1], [1, 2], 4),
        ([[1]], [[1]], 4),
        (1, 1, 4),
    ],
)
def test_histograms_that_cannot_be_packed_are_refused_in_the_same_words(
    lengths: Any, counts: Any, seq_len: int
) -> None:
    with pytest.raises(SettingsError) as expected:
        best_fit.plan_best_fit(lengths, counts, seq_len)
    with pytest.raises(SettingsError) as found:
        kernel.plan_best_fit(lengths, counts, seq_len)
    assert str(found.value) == str(expected.value)


ANY_NUMBER = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 50)


@examples(80)
@given(st.lists(st.tuples(ANY_NUMBER, ANY_NUMBER), max_size=8), ANY_NUMBER, st.booleans())
def test_the_loop_itself_refuses_what_it_cannot_pack(
    entries: list[tuple[int, int]], seq_len: int, ordered: bool
) -> None:
    if ordered:
        entries = sorted(entries, reverse=True)
    lengths = np.array([length for length, _ in entries], dtype=np.int64)
    counts = np.array([count for _, count in entries], dtype=np.int64)
    fits = all(1 <= length <= seq_len and count >= 0 for length, count in entries)
    descends = lengths.tolist() == sorted(lengths.tolist(), reverse=True)
    rows_fit = int(counts.astype(object).sum()) < 2**63 if len(counts) else True
    if seq_len >= 1 and fits and descends and rows_fit:
        moves, leaves = compiled.plan(lengths, counts, seq_len)
        assert len(moves) % 40 == 0
        assert len(leaves) % 24 == 8
    elif seq_len < 1 or not fits or not descends:
        with pytest.raises(ValueError):
            compiled.plan(lengths, counts, seq_len)


def test_memory_follows_the_documents_and_not_seq_len() -> None:
    lengths, counts = np.array([3, 700, 2**30, 2**33 + 5]), np.array([4, 2, 3, 1])
    tracemalloc.start()
    try:
        documents = PackedDocuments(lengths, counts, 2**31, plan=kernel.plan_best_fit)
        pieces = kernel.pack(documents, np.arange(documents.rows), None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert int(pieces.length.sum()) == int((lengths * counts).sum())


def test_threads_plan_at_the_same_time() -> None:
    rng = np.random.default_rng(1)
    cases = [np.unique(rng.integers(1, 4097, 3000), return_counts=True) for _ in range(8)]
    expected = [best_fit.plan_best_fit(*case, 4096).leaf_start.tolist() for case in cases]
    found: dict[int, list[int]] = {}

    def plan(number: int) -> None:
        found[number] = kernel.plan_best_fit(*cases[number], 4096).leaf_start.tolist()

    threads = [threading.Thread(target=plan, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(cases))] == expected


# Numbers of rows

UNITS = st.lists(st.lists(st.integers(0, 12) | st.integers(0, 300), max_size=12), max_size=5)


def end_to_end(units: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    flat = np.array([length for unit in units for length in unit], dtype=np.int64)
    return flat, np.cumsum([0, *map(len, units)])


def rows_of(unit: list[int], seq_len: int) -> int:
    histogram = Counter(unit)
    return PackedDocuments(list(histogram), list(histogram.values()), seq_len).rows


@examples(60)
@given(UNITS, st.lists(SEQ_LENS, max_size=5))
def test_rows_are_counted_as_they_are_packed(units: list[list[int]], seq_lens: list[int]) -> None:
    lengths, bounds = end_to_end(units)
    expected = [[rows_of(unit, seq_len) for seq_len in seq_lens] for unit in units]
    found = kernel.count_best_fit_rows(lengths, bounds, seq_lens)
    assert found.shape == (len(units), len(seq_lens))
    assert found.tolist() == expected
    by_numpy = np.full_like(found, -1)
    reference.count_rows(lengths, bounds, np.array(seq_lens, dtype=np.int64), by_numpy)
    assert by_numpy.tolist() == expected


@pytest.mark.parametrize("seq_len", [1, 300, 2048, 40_000, BEYOND_TABLES])
def test_rows_of_units_of_web_pages_are_counted_as_they_are_packed(seq_len: int) -> None:
    rng = np.random.default_rng(seq_len)
    units = [rng.lognormal(6, 1.6, count).astype(np.int64).tolist() for count in (900, 0, 1, 1500)]
    # One document is so long that its length needs every digit of the sort.
    units[0].append(2**40 + 7)
    lengths, bounds = end_to_end(units)
    found = kernel.count_best_fit_rows(lengths, bounds, [seq_len])
    assert found[:, 0].tolist() == [rows_of(unit, seq_len) for unit in units]


def test_only_the_documents_within_the_bounds_are_counted() -> None:
    lengths = np.array([8, 8, 8, 8, 8], dtype=np.uint64)
    assert kernel.count_best_fit_rows(lengths, [1, 3, 4], [8, 16, 4]).tolist() == [[2, 1, 4], [1, 1, 2]]
    assert kernel.count_best_fit_rows(lengths, [2], [8]).shape == (0, 1)
    assert kernel.count_best_fit_rows([], [0, 0], [8]).tolist() == [[0]]


@pytest.mark.parametrize(
    ("lengths", "bounds", "seq_lens"),
    [
        ([5, -1], [0, 2], [4]),
        ([5], [0, 2], [4]),
        ([5], [-1, 1], [4]),
        ([5, 5], [0, 2, 1], [4]),
        ([5], [], [4]),
        ([5], [0, 1], [4, 0]),
        ([5], [0, 1], [-4]),
    ],
)
def test_units_that_cannot_be_counted_are_refused(lengths: Any, bounds: Any, seq_lens: Any) -> None:
    with pytest.raises(SettingsError, match="must"):
        kernel.count_best_fit_rows(lengths, bounds, seq_lens)
    arrays = [np.array(each, dtype=np.int64) for each in (lengths, bounds, seq_lens)]
    rows = np.zeros(max(0, len(bounds) - 1) * len(seq_lens), dtype=np.int64)
    with pytest.raises(ValueError):
        compiled.count_rows(*arrays, rows)


def test_more_rows_than_can_be_counted_are_refused() -> None:
    arguments = np.full(3, 2**62), np.array([0, 3]), np.array([1])
    with pytest.raises(SettingsError, match="must be at most"):
        kernel.count_best_fit_rows(*arguments)
    with pytest.raises(ValueError, match="overflow"):
        compiled.count_rows(*arguments, np.zeros(1, np.int64))


# Rows of many packings

GROUPS = st.lists(
    st.dictionaries(st.integers(0, 70), st.integers(0, 40), max_size=14), min_size=1, max_size=5
)


@examples(40)
@given(GROUPS, st.integers(1, 24), st.sampled_from(list(Overlong)), st.booleans(), st.integers(0, 2**32))
def test_rows_of_many_packings_are_found_as_one_by_one(
    histograms: list[dict[int, int]], seq_len: int, overlong: Overlong, mixed: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.choice([PackedDocuments, PaddedDocuments], len(histograms), p=[0.9, 0.1])
    groups = [
        kind(list(histogram), list(histogram.values()), seq_len, overlong)
        for kind, histogram in zip(kinds, histograms, strict=True)
    ]
    some = [number for number, documents in enumerate(groups) if documents.rows]
    which = rng.choice(some, 40) if some else np.zeros(0, dtype=np.int64)
    rows = np.array([rng.integers(groups[number].rows) for number in which], dtype=np.int64)
    keys = rng.integers(0, 2**63, len(rows)).astype(np.uint64) if mixed else None
    for pack_groups in (kernel.pack_groups, reference.pack_groups):
        found = pack_groups(groups, which, rows, keys)
        assert (np.diff(found.row) >= 0).all()
        for i, (number, row) in enumerate(zip(which, rows, strict=True)):
            alone = groups[number].pieces_of([row], None if keys is None else keys[i : i + 1])
            own = found.row == i
            for name in ("length_index", "nth", "start", "length"):
                assert getattr(found, name)[own].tolist() == getattr(alone, name).tolist(), name


@examples(40)
@given(GROUPS, st.integers(1, 24), st.integers(1, 2**20), st.booleans())
def test_rows_of_large_packings_are_found_by_searching_for_their_leaves(
    histograms: list[dict[int, int]], seq_len: int, times: int, mixed: bool
) -> None:
    # So many that there are more rows than a leaf for each is made for.
    lengths, counts = np.arange(1, 60), np.arange(60, 1, -1) * 20_000
    large = PackedDocuments(lengths, counts, 64, plan=kernel.plan_best_fit)
    many = [{length: count * times for length, count in histogram.items()} for histogram in histograms]
    for documents in (large, *(PackedDocuments(list(each), list(each.values()), seq_len) for each in many)):
        rows = np.linspace(0, documents.rows - 1, 50 if documents.rows else 0).astype(np.int64)
        keys = rows.astype(np.uint64) if mixed else None
        found, expected = kernel.pack(documents, rows, keys), documents.pieces_of(rows, keys)
        for name, column in vars(expected).items():
            assert getattr(found, name).tolist() == column.tolist(), name
    assert large.rows > 2**14


def test_rows_and_packings_that_do_not_exist_are_refused() -> None:
    groups = [PackedDocuments([3, 9], [4, count], 8) for count in (1, 5)]
    for row in (groups[0].rows, -1, 2**62):
        with pytest.raises(ValueError):
            kernel.pack_groups(groups, np.array([1, 0]), np.array([0, row]), None)
    tables = tuple(documents.tables for documents in groups)
    columns = [np.empty(50, dtype=np.int64) for _ in range(5)]
    for which in (2, -1, 2**62):
        with pytest.raises(ValueError):
            compiled.pack(np.zeros(2, np.int64), None, np.array([0, which]), 8, tables, *columns)


@examples(100)
@given(st.integers(0, 10**9), ANY_NUMBER.filter(lambda number: abs(number) < 2**60), st.booleans())
def test_damaged_tables_give_an_error_or_other_pieces_and_never_harm(
    at: int, value: int, mixed: bool
) -> None:
    documents = PackedDocuments(range(1, 30), range(7, 36), 12)
    tables = documents.tables.copy()
    tables[at % len(tables)] = value
    rows = np.arange(documents.rows)
    keys = rows.astype(np.uint64) if mixed else None
    columns = [np.full(2000 + 8, 99) for _ in range(5)]
    inside = [column[:2000] for column in columns]
    try:
        count = compiled.pack(rows, keys, np.zeros_like(rows), 12, (tables,), *inside)
    except ValueError:
        count = 0
    assert count >= 0
    assert all((column[2000:] == 99).all() for column in columns)


@examples(60)
@given(st.integers(0, 400), st.integers(0, 30))
def test_tables_that_are_cut_short_are_refused(length: int, more: int) -> None:
    tables = PackedDocuments([1, 2, 5, 14], [2, 3, 4, 5], 6).tables
    cut = tables[: min(length, len(tables) - 1)]
    columns = [np.empty(more, dtype=np.int64) for _ in range(5)]
    one = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="tables"):
        compiled.pack(one, None, one, 6, (cut,), *columns)
    for wrong in ([tables], (tables.astype(np.int32),), (tables.astype(np.float64),), None):
        with pytest.raises(ValueError):
            compiled.pack(one, None, one, 6, wrong, *columns)


@examples(60)
@given(st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=4), st.data())
def test_numbers_are_looked_up_in_many_tables(numbers: list[list[int]], data: st.DataObject) -> None:
    tables = [np.array(each, dtype=np.int64) for each in numbers]
    places = [(w, i) for w, each in enumerate(numbers) for i in range(len(each))]
    outside = st.tuples(st.integers(-1, 5), st.integers(-1, 5))
    asked = data.draw(st.lists(st.sampled_from(places) if places else outside, max_size=8))
    if data.draw(st.booleans()):
        asked = [*asked, data.draw(outside)]
    which, index = (np.array([pair[i] for pair in asked], dtype=np.int64) for i in (0, 1))
    wrong = [number for number, pair in enumerate(asked) if pair not in places]
    for loops in (compiled, reference):
        out = np.full(len(asked), 99)
        assert loops.look_up(tuple(tables), which, index, out) == (wrong[0] if wrong else -1)
        if not wrong:
            assert out.tolist() == [numbers[w][i] for w, i in asked]
    if wrong and len(tables) > 1:
        with pytest.raises(SettingsError, match="is not in table"):
            kernel.look_up(tables, which, index)
    elif tables and not wrong:
        assert kernel.look_up(tables, which, index).tolist() == [numbers[w][i] for w, i in asked]
