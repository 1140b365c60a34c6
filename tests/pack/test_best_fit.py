"""Best fit on a histogram against the classical algorithm, document by document."""

from bisect import bisect_left, insort

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingsError
from headrace.pack.best_fit import plan_best_fit
from tests.properties import examples

HISTOGRAMS = st.integers(1, 60).flatmap(
    lambda seq_len: st.tuples(
        st.just(seq_len), st.dictionaries(st.integers(1, seq_len), st.integers(1, 40), max_size=20)
    )
)


def classical_rows(seq_len, histogram):
    """How many rows best-fit-decreasing opens: the textbook, one document at a time."""
    spaces = []
    for length in sorted((n for n, count in histogram.items() for _ in range(count)), reverse=True):
        place = bisect_left(spaces, length)
        insort(spaces, (spaces.pop(place) if place < len(spaces) else seq_len) - length)
    return len(spaces)


@examples(60)
@given(HISTOGRAMS)
def test_every_document_once_in_rows_that_hold_it_and_as_few_rows_as_the_textbook(case):
    seq_len, histogram = case
    plan = plan_best_fit(list(histogram), list(histogram.values()), seq_len)
    assert plan.rows == classical_rows(seq_len, histogram)
    packed = plan.documents_of(np.arange(plan.rows))
    documents = list(zip(packed.length.tolist(), packed.position.tolist(), strict=True))
    assert sorted(documents) == sorted((n, j) for n, count in histogram.items() for j in range(count))
    filled = np.zeros(plan.rows, np.int64)
    np.add.at(filled, packed.row, packed.length)
    assert (filled <= seq_len).all()
    assert (filled > 0).all()
    assert plan.tokens == filled.sum()
    if plan.rows:
        assert plan.efficiency == pytest.approx(filled.sum() / (plan.rows * seq_len))


@examples(40)
@given(HISTOGRAMS.filter(lambda case: case[1]), st.data())
def test_rows_can_be_asked_for_in_any_order(case, data):
    seq_len, histogram = case
    plan = plan_best_fit(list(histogram), list(histogram.values()), seq_len)
    everything = plan.documents_of(np.arange(plan.rows))
    rows = data.draw(st.lists(st.integers(0, plan.rows - 1), max_size=10))
    some = plan.documents_of(rows)
    for number, row in enumerate(rows):
        for part in ("length", "position"):
            wanted = getattr(everything, part)[everything.row == row].tolist()
            assert getattr(some, part)[some.row == number].tolist() == wanted
    assert (np.diff(some.row) >= 0).all()
    for number in range(len(rows)):
        held = some.length[some.row == number]
        assert (np.diff(held) <= 0).all(), "the longest document of a row stands first"


@examples(40)
@given(HISTOGRAMS)
def test_with_a_leaf_for_each_row_the_plan_stays_the_same(case):
    seq_len, histogram = case
    plan = plan_best_fit(list(histogram), list(histogram.values()), seq_len)
    other = plan.leaf_per_row()
    assert len(other.leaf_node) == other.rows == plan.rows
    wanted, found = (each.documents_of(np.arange(plan.rows)) for each in (plan, other))
    for name, column in vars(wanted).items():
        assert getattr(found, name).tolist() == column.tolist()


def test_the_example_in_the_module():
    plan = plan_best_fit([6, 4, 2], [2, 1, 3], 10)
    packed = plan.documents_of(np.arange(plan.rows))
    rows = [sorted(packed.length[packed.row == row].tolist(), reverse=True) for row in range(plan.rows)]
    assert sorted(rows, reverse=True) == [[6, 4], [6, 2, 2], [2]]


def test_a_billion_documents_take_thousands_of_nodes():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 1.2, 200_000).astype(np.int64), 1, 2048)
    distinct, counts = np.unique(lengths, return_counts=True)
    plan = plan_best_fit(distinct, counts * 5000, 2048)
    assert plan.efficiency > 0.999
    assert len(plan.parent) < 20_000
    packed = plan.documents_of([0, plan.rows // 2, plan.rows - 1])
    assert [int(packed.length[packed.row == row].sum()) <= 2048 for row in range(3)] == [True] * 3


@pytest.mark.parametrize(("lengths", "seq_len"), [([5], 4), ([0], 4), ([-1], 4), ([1], 0)])
def test_lengths_that_do_not_fit_are_refused(lengths, seq_len):
    with pytest.raises(SettingsError):
        plan_best_fit(lengths, [1], seq_len)


def test_no_documents_make_no_rows():
    plan = plan_best_fit([], [], 8)
    assert (plan.rows, plan.efficiency) == (0, 1.0)
    assert len(plan.documents_of([]).row) == 0
    with pytest.raises(SettingsError, match="inside the 0 rows"):
        plan.documents_of([0])
