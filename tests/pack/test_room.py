"""How many segments a batch may have, against drawing rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.pack.room import SegmentCounts, segments_of_a_batch
from tests.properties import examples

COUNTS = st.dictionaries(st.integers(1, 60), st.integers(1, 50), min_size=1, max_size=8)


def counts_of(histogram: dict[int, int]) -> SegmentCounts:
    return SegmentCounts(np.array(list(histogram)), np.array(list(histogram.values())))


@examples(100)
@given(COUNTS, st.integers(1, 40))
def test_in_any_order_it_is_what_the_fullest_rows_have(histogram: dict[int, int], batch_size: int) -> None:
    rows = sorted((segments for segments, count in histogram.items() for _ in range(count)), reverse=True)
    found = segments_of_a_batch([counts_of(histogram)], batch_size, is_shuffled=False)
    if batch_size <= len(rows):
        of_two_epochs = [segments for segments in rows for _ in range(2)]
        assert found == sum(of_two_epochs[:batch_size])
    else:
        assert found == batch_size * rows[0]


@examples(50)
@given(st.lists(COUNTS, min_size=1, max_size=3), st.integers(1, 64), st.integers(0, 2**32))
def test_rows_in_random_order_never_have_more(
    histograms: list[dict[int, int]], batch_size: int, seed: int
) -> None:
    sources = [counts_of(histogram) for histogram in histograms]
    room = segments_of_a_batch(sources, batch_size, is_shuffled=True)
    assert room <= segments_of_a_batch(sources, batch_size, is_shuffled=False)
    rng = np.random.default_rng(seed)
    worst = max(sources, key=lambda source: (source.segments * source.rows).sum() / source.rows.sum())
    rows = np.repeat(worst.segments, worst.rows)
    batches = [rng.choice(rows, batch_size, replace=batch_size > len(rows)).sum() for _ in range(200)]
    assert max(batches) <= room


def test_rare_full_rows_do_not_make_every_batch_large() -> None:
    """A thousand rows with 500 documents among a million with five."""
    counts = SegmentCounts(np.array([5, 500]), np.array([1_000_000, 1_000]))
    in_any_order = segments_of_a_batch([counts], 32, is_shuffled=False)
    assert in_any_order == 16_000
    assert 32 * 5 < segments_of_a_batch([counts], 32, is_shuffled=True) < in_any_order / 2
