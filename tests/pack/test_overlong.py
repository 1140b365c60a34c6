from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.pack.overlong import cut_overlong


@given(st.dictionaries(st.integers(0, 100), st.integers(1, 9), max_size=20), st.integers(1, 30))
def test_cutting_the_histogram_is_cutting_each_document(histogram, seq_len):
    rests, full_rows = Counter(), 0
    for length, count in histogram.items():
        for _ in range(count):
            full_rows += length // seq_len
            if length % seq_len:
                rests[length % seq_len] += 1
    cut = cut_overlong(list(histogram), list(histogram.values()), seq_len)
    assert cut.full_rows == full_rows
    assert dict(zip(cut.lengths.tolist(), cut.counts.tolist(), strict=True)) == rests
