import pickle
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import FieldError, HeadraceError
from headrace.format.ragged import Ragged
from tests.properties import examples

NOTATIONS = [
    "uint16[*]",
    "float32[*,2]",
    "int8[*,0]",
    "bytes",
    "float64",
    "int32[2,3]",
    "bool[0]",
    "complex64",
]


def value_for(notation, rng):
    length = int(rng.integers(0, 5))
    if notation == "bytes":
        return rng.bytes(length)
    field = headrace.Field.parse(notation)
    shape = (length, *field.shape) if field.variable else field.shape
    return np.asarray(rng.integers(0, 200, shape)).astype(field.dtype)


@st.composite
def datasets(draw):
    """Fields, records and the shards they are cut into."""
    fields = {
        f"f{number}": notation
        for number, notation in enumerate(draw(st.lists(st.sampled_from(NOTATIONS), min_size=1, max_size=4)))
    }
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(0, 25))
    records = [{name: value_for(notation, rng) for name, notation in fields.items()} for _ in range(count)]
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=5)))
    return fields, records, [records[a:b] for a, b in pairwise([0, *cuts, count])]


def same(got, want):
    if isinstance(want, bytes):
        return isinstance(got, bytes) and got == want
    want = np.asarray(want)
    return got.dtype == want.dtype and got.shape == want.shape and np.array_equal(got, want)


def same_columns(columns, records, fields):
    assert list(columns) == list(fields)
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            assert column.shape[0] == len(records)
            assert column.dtype == headrace.Field.parse(fields[name]).numpy_dtype
        assert isinstance(column, list) == (fields[name] == "bytes")
        assert isinstance(column, Ragged) == ("*" in fields[name])
        assert len(column) == len(records)
        assert all(same(got, record[name]) for got, record in zip(column, records, strict=True))


@examples(30)
@given(case=datasets(), data=st.data())
def test_everything_comes_back(write_dataset, case, data):
    fields, records, shards = case
    count = len(records)
    with tempfile.TemporaryDirectory() as path:
        write_dataset(Path(path), fields, shards)
        dataset = headrace.open(path, in_memory=data.draw(st.booleans()))
        assert len(dataset) == count
        assert all(same(got[n], want[n]) for got, want in zip(dataset, records, strict=True) for n in fields)
        for number in range(-count, count):
            assert all(same(dataset[number][name], records[number][name]) for name in fields)
        chosen = data.draw(st.slices(count))
        same_columns(dataset[chosen], records[chosen], fields)
        numbers = data.draw(st.lists(st.integers(-count, count - 1), max_size=10)) if count else []
        for indices in (numbers, tuple(numbers), np.array(numbers, np.int32), np.array(numbers, np.int64)):
            same_columns(dataset[indices], [records[number] for number in numbers], fields)
        listed = dataset.__getitems__(numbers)
        assert all(same(listed[i][n], records[k][n]) for i, k in enumerate(numbers) for n in fields)
        for name, notation in fields.items():
            if notation == "bytes" or "*" in notation:
                lengths = [len(record[name]) for record in records]
                assert dataset.lengths_of(name).tolist() == lengths
                distinct, counts = dataset.length_histogram(name)
                assert (distinct.dtype, counts.dtype) == (np.int64, np.int64)
                assert distinct.tolist() == sorted(set(lengths))
                assert counts.tolist() == [lengths.count(length) for length in distinct]
                assert dataset.num_elements[name] == sum(lengths)
            else:
                assert dataset.num_elements[name] == count
        again = pickle.loads(pickle.dumps(dataset))
        assert again.fingerprint == dataset.fingerprint
        same_columns(again[:], records, fields)


@pytest.fixture
def dataset(write_dataset, tmp_path):
    shards = [[{"tokens": range(n), "x": n, "b": b"x" * n} for n in part] for part in ([3, 0, 2], [], [1, 3])]
    write_dataset(tmp_path / "d", {"tokens": "uint16[*]", "x": "float32", "b": "bytes"}, shards)
    return headrace.open(tmp_path / "d")


@pytest.mark.parametrize("kind", [int, np.int8, np.uint8, np.int64, np.uint64, np.array])
def test_whole_numbers_of_any_type(dataset, kind):
    assert dataset[kind(4)]["x"] == 3


@pytest.mark.parametrize(
    "index", [True, False, np.True_, 1.0, np.float64(1), None, "1", b"1", 1j, {1}, np.array(1.0)]
)
def test_what_is_no_whole_number_is_a_type_error(dataset, index):
    with pytest.raises(TypeError, match="must be a whole number, a slice or a list of numbers"):
        dataset[index]
    with pytest.raises(TypeError, match="must be a whole number"):
        dataset.__getitems__([0, index])


@pytest.mark.parametrize(
    "indices", [[True, False], [1.0], ["1"], [None], [[1, 2]], [[1], [2, 3]], np.zeros((2, 2), int)]
)
def test_what_is_no_list_of_whole_numbers_is_a_type_error(dataset, indices):
    with pytest.raises(TypeError, match="must be a list of whole numbers"):
        dataset[indices]


@pytest.mark.parametrize("number", [5, -6, 10**6, -(10**6), 2**63, 2**64 - 1, -(2**63)])
def test_out_of_range(dataset, number):
    message = f"index {number} is out of range for a dataset of 5 records"
    # In a list, NumPy makes whole numbers beyond 64 bits floats, and those are a TypeError.
    for index in (number, [0, number] if number < 2**63 else [number]):
        with pytest.raises(IndexError, match=message):
            dataset[index]
    with pytest.raises(IndexError, match=message):
        dataset.__getitems__([number])


def test_the_largest_unsigned_number_is_not_the_last_record(dataset):
    for indices in ([2**64 - 1], np.array([2**64 - 1], np.uint64), [2**63]):
        with pytest.raises(IndexError, match="out of range"):
            dataset[indices]


def test_nothing_asked_for(dataset):
    for indices in ([], (), np.array([]), range(0), slice(3, 3)):
        columns = dataset[indices]
        assert (len(columns["tokens"]), columns["x"].shape, columns["b"]) == (0, (0,), [])


def test_views_are_of_the_file_and_read_only_for_good(dataset):
    part = dataset.part(0)
    record = dataset[0]
    assert np.shares_memory(record["tokens"], part["tokens"].values)
    stretch = dataset[0:3]["x"]
    assert np.shares_memory(stretch, part["x"])
    for view in (record["tokens"], stretch, part["tokens"].offsets, part["x"]):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            view[:] = 0


def test_a_view_outlives_its_dataset_and_directory(write_dataset, tmp_path):
    write_dataset(tmp_path, {"t": "int32[*]"}, [[{"t": range(5000)}]])
    view = headrace.open(tmp_path)[0]["t"]
    for path in tmp_path.iterdir():
        path.unlink()
    assert int(view.sum()) == 5000 * 4999 // 2


def test_fields_and_lengths(dataset):
    assert dataset.token_field == "tokens"
    assert dataset.num_tokens == 9
    assert dataset.lengths.tolist() == [3, 0, 2, 1, 3]
    assert {name: field.notation for name, field in dataset.fields.items()} == {
        "tokens": "uint16[*]",
        "x": "float32",
        "b": "bytes",
    }
    assert repr(dataset).endswith("5 records, 9 tokens, fields {tokens: uint16[*], x: float32, b: bytes})")
    dataset.fields.clear()  # a copy
    assert len(dataset.fields) == 3
    for name in ("y", "", 3, ["tokens"]):
        for ask in (dataset.lengths_of, dataset.length_histogram):
            with pytest.raises(FieldError, match=r"no field .*; the fields are 'tokens' \(uint16"):
                ask(name)
    with pytest.raises(FieldError, match="field 'x' has a fixed shape, so it has no lengths"):
        dataset.lengths_of("x")


def test_which_field_holds_tokens(write_dataset, tmp_path):
    cases = [
        ({"a": "int8[*]", "b": "bytes"}, "a", ""),
        ({"a": "int8[*]", "b": "int8[*]"}, None, "no field 'tokens', and any of 'a', 'b' might be meant"),
        ({"b": "bytes"}, None, "no field of tokens among 'b'"),
    ]
    for number, (fields, name, problem) in enumerate(cases):
        write_dataset(tmp_path / str(number), fields, [])
        opened = headrace.open(tmp_path / str(number))
        if name:
            assert opened.token_field == name
        else:
            with pytest.raises(FieldError, match=problem):
                _ = opened.num_tokens


def test_errors_are_also_builtin_ones(dataset):
    for kind in (HeadraceError, ValueError, KeyError):
        with pytest.raises(kind):
            dataset.lengths_of("y")
