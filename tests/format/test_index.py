import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.dataset.stored import StoredSource
from headrace.errors import CorruptError
from headrace.format import index
from headrace.format.index import (
    LengthTable,
    check_histogram,
    check_order,
    fill_order,
    histogram,
    merge_histograms,
    number_dtype,
    stable_order,
)
from headrace.store.local import LocalStore

LENGTHS = st.one_of(st.integers(0, 7), st.integers(2**16 - 2, 2**17))
SHARDS = st.lists(st.lists(LENGTHS, max_size=15), max_size=6)


def arrays_of(shards):
    return [np.array(lengths, np.int64) for lengths in shards]


def table_of(shards):
    arrays = arrays_of(shards)
    lengths, starts = merge_histograms(histogram(array) for array in arrays)
    order = np.empty(int(starts[-1]), number_dtype(int(starts[-1])))
    fill_order(order, lengths, starts, arrays)
    return LengthTable(lengths, starts, order)


def check(table, shards):
    arrays = arrays_of(shards)
    check_histogram(table, sum(map(len, shards)), sum(map(sum, shards)), "name")
    check_order(table, (histogram(array) for array in arrays), arrays, "name")


@given(SHARDS)
def test_the_table_is_a_stable_sort_of_all_lengths(shards):
    table = table_of(shards)
    everything = [length for shard in shards for length in shard]
    assert table.order.tolist() == sorted(range(len(everything)), key=everything.__getitem__)
    assert table.lengths.tolist() == sorted(set(everything))
    assert table.counts.tolist() == [everything.count(length) for length in table.lengths]
    assert (table.lengths.dtype.str, table.starts.dtype.str, table.order.dtype.str) == ("<u4", "<u8", "<u4")
    check(table, shards)


@given(SHARDS)
def test_merging_a_few_histograms_at_a_time_gives_the_same(shards):
    arrays = arrays_of(shards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_MERGED_AT_ONCE", 3)
        for few, all_at_once in zip(
            merge_histograms(histogram(array) for array in arrays),
            (table_of(shards).lengths, table_of(shards).starts),
            strict=True,
        ):
            assert few.tolist() == all_at_once.tolist()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_the_radix_sort_is_a_stable_argsort(lengths):
    assert stable_order(np.array(lengths, np.int64)).tolist() == sorted(
        range(len(lengths)), key=lengths.__getitem__
    )


def test_record_numbers_are_as_wide_as_they_must_be():
    assert number_dtype(2**32).str == "<u4"
    assert number_dtype(2**32 + 1).str == "<u8"


@given(SHARDS.filter(any), st.data())
def test_no_wrong_number_passes(shards, data):
    table = table_of(shards)
    part = data.draw(st.sampled_from(["lengths", "starts", "order"]))
    changed = getattr(table, part).copy()
    place = data.draw(st.integers(0, len(changed) - 1))
    old = int(changed[place])
    changed[place] = data.draw(
        st.one_of(st.integers(0, 20), st.sampled_from([2**31, 2**32 - 1])).filter(lambda n: n != old)
    )
    parts = {"lengths": table.lengths, "starts": table.starts, "order": table.order, part: changed}
    with pytest.raises(CorruptError, match="name: "):
        check(LengthTable(**parts), shards)


def test_missing_and_surplus_shards_are_noticed():
    table = table_of([[1, 2], [2]])
    for shards in ([[1, 2]], [[1, 2], [2], [2]], [[1, 2], [3]]):
        with pytest.raises(CorruptError, match="name"):
            check(table, shards)


def test_a_forged_sum_does_not_wrap_around():
    table = LengthTable(np.array([2**32 - 1], "<u4"), np.array([0, 2**63], "<u8"), np.empty(0, "<u4"))
    with pytest.raises(CorruptError, match="add up to"):
        check_histogram(table, 2**63, (2**32 - 1) * 2**63 % 2**64, "name")


def test_the_stored_table_is_the_merged_one(write_dataset, tmp_path):
    shards = [[3, 0, 3], [], [1, 3]]
    write_dataset(tmp_path, {"t": "int8[*]"}, [[{"t": [0] * n} for n in part] for part in shards])
    stored, wanted = StoredSource(LocalStore(tmp_path)).length_table("t"), table_of(shards)
    for part in ("lengths", "starts", "order"):
        np.testing.assert_array_equal(getattr(stored, part), getattr(wanted, part))
    lengths, counts = headrace.open(tmp_path).length_histogram()
    assert (lengths.tolist(), counts.tolist()) == ([0, 1, 3], [1, 1, 3])
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [*[".hdrc"] * 5, ".json"]


@pytest.mark.parametrize("name", ["t/starts", "t/lengths"])
def test_a_forged_histogram_is_not_believed(write_dataset, reseal, tmp_path, name):
    manifest = write_dataset(tmp_path, {"t": "int8[*]"}, [[{"t": [0] * n} for n in (3, 0, 3)]])
    path = tmp_path / manifest.index.file
    content = bytearray(path.read_bytes())
    # Sections follow the header in the order lengths, starts, 64 bytes each.
    place = manifest.index.header_bytes + (64 + 8 if name == "t/starts" else 4)
    content[place] += 1
    path.write_bytes(content)
    reseal(tmp_path)
    with pytest.raises(CorruptError, match=f"{manifest.index.file}: damaged index"):
        headrace.open(tmp_path).length_histogram()
    assert [bool(verdict.problem) for verdict in headrace.verify(tmp_path)] == [False, False, True]
