from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.dataset.summary import log_buckets, percentile, summarize, summarize_lengths, summarize_packing
from headrace.format.fields import parse_fields
from headrace.format.finish import finish_dataset
from headrace.format.ragged import Ragged
from headrace.format.shard import ShardBuilder
from headrace.store.local import LocalStore

lengths_lists = st.lists(st.integers(0, 40) | st.integers(0, 2**32 - 1), min_size=1, max_size=80)


def histogram_of(lengths):
    return np.unique(np.array(lengths, dtype=np.int64), return_counts=True)


@given(lengths_lists, st.sampled_from([0, 1, 50, 90, 99, 100]))
def test_percentiles_agree_with_sorting(lengths, percent):
    rank = max(1, -(-len(lengths) * percent // 100))
    assert percentile(histogram_of(lengths), percent) == sorted(lengths)[rank - 1]


@given(lengths_lists)
def test_statistics_agree_with_brute_force(lengths):
    summary = summarize_lengths(histogram_of(lengths))
    assert (summary.min, summary.max, summary.records) == (min(lengths), max(lengths), len(lengths))
    assert summary.elements == sum(lengths)
    assert summary.mean == pytest.approx(sum(lengths) / len(lengths))


@given(lengths_lists, st.integers(1, 20))
def test_buckets_hold_every_record_once(lengths, count):
    buckets = log_buckets(histogram_of(lengths), count)
    assert len(buckets) <= max(count, 1) + (0 in lengths)
    assert (buckets[0].low, buckets[-1].high) == (min(lengths), max(lengths))
    for before, after in pairwise(buckets):
        assert before.low <= before.high < after.low <= after.high
    for bucket in buckets:
        assert bucket.records == sum(bucket.low <= length <= bucket.high for length in lengths)
    assert sum(bucket.records for bucket in buckets) == len(lengths)


def test_the_worked_examples():
    summary = summarize_lengths((np.array([2, 5]), np.array([3, 1])))
    assert (summary.mean, summary.percentiles[50], summary.percentiles[90]) == (2.75, 2, 5)
    buckets = log_buckets((np.arange(1, 9), np.ones(8, int)), 6)
    assert [(b.low, b.high) for b in buckets] == [(1, 1), (2, 2), (3, 3), (4, 5), (6, 8)]


def test_nothing_has_no_statistics():
    assert summarize_lengths((np.empty(0, int), np.empty(0, int))) is None
    assert log_buckets((np.empty(0, int), np.empty(0, int)), 5) == []
    assert [(b.low, b.high, b.records) for b in log_buckets((np.array([0]), np.array([4])), 5)] == [(0, 0, 4)]


def test_a_dataset_in_a_directory(tmp_path):
    fields = parse_fields({"tokens": "uint16[*]", "label": "int64", "raw": "bytes"})
    entries = []
    for number in range(2):
        builder = ShardBuilder(fields)
        tokens = Ragged.from_items([np.arange(5, dtype=np.uint16), np.arange(2, dtype=np.uint16)], np.uint16)
        raw = Ragged.from_items([np.zeros(3, np.uint8)] * 2, np.uint8)
        builder.append({"tokens": tokens, "label": np.array([number, 1]), "raw": raw})
        entries.append(builder.write(LocalStore(tmp_path)))
    finish_dataset(
        LocalStore(tmp_path), fields, entries, "tests", tokenizer={"kind": "bytes"}, settings={"a": 1}
    )
    summary = summarize(headrace.open(tmp_path))
    assert (summary.records, summary.tokens, summary.parts) == (4, 14, 2)
    assert summary.fields == {"tokens": "uint16[*]", "label": "int64", "raw": "bytes"}
    assert list(summary.lengths) == ["tokens"]
    assert summary.lengths["tokens"].max == 5
    assert (summary.tokenizer, summary.settings, summary.written_by) == ({"kind": "bytes"}, {"a": 1}, "tests")
    on_disk = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert {file.file: file.bytes for file in summary.files} == on_disk
    assert summary.bytes == sum(on_disk.values())


def test_arrays_have_no_files_and_maybe_no_tokens():
    summary = summarize(headrace.from_arrays({"x": np.zeros((3, 2))}))
    assert (summary.records, summary.tokens, summary.files, summary.lengths) == (3, None, (), {})


def test_a_neighbours_files_are_counted_with_the_sidecar(tmp_path):
    np.arange(10, dtype="<u2").tofile(tmp_path / "t.bin")
    summary = summarize(headrace.open(tmp_path / "t.bin", eos_id=4))
    assert [file.file for file in summary.files] == ["t.bin", "t.bin.headrace-index"]
    assert (summary.records, summary.tokens) == (2, 10)


def test_packing_counts_every_token_and_cuts_long_documents():
    # Rows of 10: 25 tokens make two full rows and a rest of 5, which shares a row with the other 5.
    packing = summarize_packing((np.array([0, 5, 25]), np.array([3, 1, 1])), 10)
    assert (packing.rows, packing.best_fit, packing.padded) == (3, 1.0, 30 / 40)


def test_records_without_tokens_have_no_packing(tmp_path):
    assert summarize(headrace.from_arrays({"x": np.zeros(3)})).packing == ()
