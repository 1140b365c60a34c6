"""A histogram that is cut against documents that are cut one by one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pack.overlong import Overlong, cut_overlong
from tests.properties import examples


@examples(60)
@given(st.dictionaries(st.integers(0, 100), st.integers(1, 9), max_size=20), st.integers(1, 30))
def test_cutting_the_histogram_is_cutting_each_document(histogram: dict[int, int], seq_len: int) -> None:
    rests, full_rows = Counter[int](), 0
    for length, count in histogram.items():
        for _ in range(count):
            full_rows += length // seq_len
            if length % seq_len:
                rests[length % seq_len] += 1
    cut = cut_overlong(list(histogram), list(histogram.values()), seq_len)
    assert cut.full_rows == full_rows
    assert dict(zip(cut.lengths.tolist(), cut.counts.tolist(), strict=True)) == rests


def cut_by_hand(
    histogram: dict[int, int], seq_len: int, overlong: Overlong
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int, int]], list[int]]:
    """Full pieces and rests as (length of the document, which of it, start[, length]); and tokens lost of each."""
    full, rests, lost = [], [], []
    for length, count in histogram.items():
        for nth in range(count):
            kept = length
            if length > seq_len and overlong is not Overlong.SPLIT:
                kept = seq_len if overlong is Overlong.TRUNCATE else 0
            for start in range(0, kept, seq_len):
                if start + seq_len <= kept:
                    full.append((length, nth, start))
                else:
                    rests.append((length, nth, start, kept - start))
            lost.append(length - kept)
    return full, rests, lost


@examples(80)
@given(
    st.dictionaries(st.integers(0, 100), st.integers(0, 9), max_size=20),
    st.integers(1, 30),
    st.sampled_from(list(Overlong)),
)
def test_every_piece_is_found_once_by_its_number(
    histogram: dict[int, int], seq_len: int, overlong: Overlong
) -> None:
    lengths = np.array(list(histogram), dtype=np.int64)
    cut = cut_overlong(list(histogram), list(histogram.values()), seq_len, overlong)
    full, rests, lost = cut_by_hand(histogram, seq_len, overlong)

    index, nth, start = cut.full_pieces(np.arange(cut.full_rows))
    found = zip(lengths[index].tolist(), nth.tolist(), start.tolist(), strict=True)
    assert sorted(found) == sorted(full)

    length = np.repeat(cut.lengths, cut.counts)
    position = np.concatenate([np.arange(count) for count in cut.counts.tolist()] or [np.empty(0, np.int64)])
    index, nth, start = cut.rest_pieces(length, position)
    columns = (lengths[index].tolist(), nth.tolist(), start.tolist(), length.tolist())
    assert sorted(zip(*columns, strict=True)) == sorted(rests)

    assert cut.documents_cut == sum(each > 0 for each in lost)


def test_the_example_in_the_module() -> None:
    cut = cut_overlong([3, 13, 20, 23], [2, 1, 1, 1], 10)
    assert cut.full_rows == 0 + 1 + 2 + 2
    assert (cut.lengths.tolist(), cut.counts.tolist()) == ([3], [4])
    index, nth, start = cut.rest_pieces(np.full(4, 3), np.arange(4))
    assert [(3, 13, 20, 23)[i] for i in index.tolist()] == [3, 3, 13, 23]
    assert nth.tolist() == [0, 1, 0, 0]
    assert start.tolist() == [0, 0, 10, 20]


@pytest.mark.parametrize(("overlong", "kept"), [("split", [10, 13]), ("truncate", [10, 10]), ("drop", [10])])
def test_a_document_just_as_long_as_a_row_is_never_cut(overlong: str, kept: list[int]) -> None:
    cut = cut_overlong([10, 13], [1, 1], 10, Overlong(overlong))
    assert cut.full_rows * 10 + int((cut.lengths * cut.counts).sum()) == sum(kept)
    assert cut.documents_cut == (overlong != "split")
