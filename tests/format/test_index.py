from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.dataset.directory import DirectorySource
from penstock.errors import CorruptError
from penstock.format.index import PARTS, TableCheck, check_histogram, merge_histograms
from penstock.format.shard import by_length

SHARDS = st.lists(st.lists(st.integers(0, 7), max_size=15), max_size=6)


def table_of(shards):
    parts = [by_length(np.array(lengths, np.int64)) for lengths in shards]
    return merge_histograms([(part["lengths"], part["counts"]) for part in parts]), parts


def find(table, parts, length, j):
    """The lookup rule of docs/format.md, step by step."""
    i = table["lengths"].tolist().index(length)
    place = int(table["starts"][i]) + j
    k = bisect_right(table["first"].tolist(), place) - 1
    shard = int(table["shard"][k])
    return shard, int(parts[shard]["order"][int(table["position"][k]) + place - int(table["first"][k])])


@given(SHARDS)
def test_lookup_equals_a_sort_of_all_lengths(shards):
    table, parts = table_of(shards)
    assert {part: table[part].dtype.str for part in PARTS} == PARTS
    everything = sorted((n, s, i) for s, lengths in enumerate(shards) for i, n in enumerate(lengths))
    for length in {n for n, _, _ in everything}:
        wanted = [(s, i) for n, s, i in everything if n == length]
        assert [find(table, parts, length, j) for j in range(len(wanted))] == wanted
    assert table["starts"][-1] == len(everything)


def check(table, parts, skipped=()):
    checker = TableCheck(table, "t", "name")
    for number, part in enumerate(parts):
        if number in skipped:
            checker.skip(number)
        else:
            checker.shard(number, part["lengths"], part["counts"])
    checker.finish()


@given(SHARDS, st.sets(st.integers(0, 5)))
def test_a_right_table_passes_also_beside_damaged_shards(shards, skipped):
    table, parts = table_of(shards)
    check_histogram(table, sum(map(len, shards)), sum(map(sum, shards)), "name")
    check(table, parts, skipped)


@given(SHARDS, st.data())
def test_no_wrong_number_passes(shards, data):
    table, parts = table_of(shards)
    part = data.draw(st.sampled_from([part for part in PARTS if len(table[part])]))
    place = data.draw(st.integers(0, len(table[part]) - 1))
    old = int(table[part][place])
    new = data.draw(
        st.one_of(st.integers(0, 20), st.sampled_from([2**31, 2**32 - 1])).filter(lambda n: n != old)
    )
    table[part] = table[part].copy()
    table[part][place] = new
    with pytest.raises(CorruptError, match="name: "):  # noqa: PT012  (either of the two notices)
        check_histogram(table, sum(map(len, shards)), sum(map(sum, shards)), "name")
        check(table, parts)


@pytest.mark.parametrize("shards", [[[1, 2]], [[1, 2], [2], [5]]])
def test_missing_and_surplus_shards_are_noticed(shards):
    table, parts = table_of([*shards, [2]])
    with pytest.raises(CorruptError, match="shards that do not exist"):
        check(table, parts[:-1])
    table, _ = table_of(shards)
    with pytest.raises(CorruptError, match="missing or out of order"):
        check(table, parts)
    _, other = table_of([*shards, [9]])
    with pytest.raises(CorruptError, match=r"lengths of shard .* are missing"):
        check(table, other)


def test_a_forged_sum_does_not_wrap_around():
    table = {"lengths": np.array([2**32 - 1], "<u4"), "starts": np.array([0, 2**63], "<u8")}
    with pytest.raises(CorruptError, match="add up to"):
        check_histogram(table, 2**63, (2**32 - 1) * 2**63 % 2**64, "name")


def test_the_stored_table_is_the_merged_one(write_dataset, tmp_path):
    shards = [[3, 0, 3], [], [1, 3]]
    write_dataset(tmp_path, {"t": "int8[*]"}, [[{"t": [0] * n} for n in part] for part in shards])
    stored = DirectorySource(str(tmp_path)).length_table("t")
    for part, want in table_of(shards)[0].items():
        np.testing.assert_array_equal(stored[part], want)
    lengths, counts = penstock.open(tmp_path).length_histogram()
    assert (lengths.tolist(), counts.tolist()) == ([0, 1, 3], [1, 1, 3])


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
        penstock.open(tmp_path).length_histogram()
    assert [bool(verdict.problem) for verdict in penstock.verify(tmp_path)] == [False, True]
