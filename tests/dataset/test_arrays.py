import pickle

import numpy as np
import pytest

import headrace
from headrace.errors import SettingsError
from headrace.format.fields import DTYPES
from headrace.format.ragged import Ragged


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (4,), (4, 0), (0, 3), (4, 2, 3)])
def test_arrays_of_every_dtype_without_a_copy(dtype, shape):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    dataset = headrace.from_arrays({"x": array})
    assert len(dataset) == shape[0]
    assert dataset.fields["x"].dtype == dtype
    assert dataset.fields["x"].shape == shape[1:]
    for number in range(len(dataset)):
        np.testing.assert_array_equal(dataset[number]["x"], array[number])
    whole = dataset[:]["x"]
    np.testing.assert_array_equal(whole, array)
    assert array.size == 0 or np.shares_memory(whole, array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_fields_of_every_dtype(dtype):
    items = [np.ones(n, dtype) for n in (2, 0, 3)]
    for given in (items, tuple(items), Ragged.from_items(items, dtype)):
        dataset = headrace.from_arrays({"tokens": given, "y": [1, 2, 3]})
        assert dataset.fields["tokens"].notation == f"{dtype}[*]"
        assert [len(dataset[i]["tokens"]) for i in range(3)] == dataset.lengths.tolist() == [2, 0, 3]
        assert [part.tolist() for part in dataset.length_histogram()] == [[0, 2, 3], [1, 1, 1]]
        assert dataset.num_tokens == 5


def test_bytes():
    dataset = headrace.from_arrays({"b": [b"one", b"", b"three"]})
    assert dataset.fields["b"].notation == "bytes"
    assert [record["b"] for record in dataset] == dataset[:]["b"] == [b"one", b"", b"three"]


def test_records_are_read_only_for_good_and_the_users_array_is_not():
    array = np.zeros((3, 2))
    ragged = Ragged.from_items([np.zeros(2)], np.float64)
    views = [headrace.from_arrays({"x": array})[0]["x"], headrace.from_arrays({"x": array})[0:2]["x"]]
    views += [headrace.from_arrays({"t": ragged})[0]["t"]]
    for view in views:
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    array[0] = ragged.values[0] = 7
    assert views[0].tolist() == [7, 7]
    assert views[2].tolist() == [7, 0]


def test_strides_and_byte_orders():
    array = np.arange(24, dtype=np.int32).reshape(6, 4)
    for given in (array[::2, ::-1], array.T, array.astype(">i4"), np.asfortranarray(array)):
        dataset = headrace.from_arrays({"x": given, "t": [np.arange(2, dtype=">u2")] * len(given)})
        np.testing.assert_array_equal(dataset[:]["x"], given)
        assert dataset[0]["x"].dtype == np.dtype("<i4")
        assert dataset[0]["t"].dtype == np.dtype("<u2")
        assert dataset[0]["t"].tolist() == [0, 1]


def test_a_stretch_of_a_ragged_is_a_dataset_of_its_own():
    whole = Ragged.from_items([np.arange(n) for n in (3, 2, 4, 1)], np.int64)
    stretch = headrace.from_arrays({"t": Ragged(whole.values, whole.offsets[1:4])})
    alone = headrace.from_arrays({"t": Ragged.from_items([np.arange(2), np.arange(4)], np.int64)})
    assert stretch.num_tokens == alone.num_tokens == 6
    assert stretch.fingerprint == alone.fingerprint
    assert [record["t"].tolist() for record in stretch] == [record["t"].tolist() for record in alone]


def test_fingerprints_follow_the_content():
    def fingerprint(**arrays):
        return headrace.from_arrays(arrays).fingerprint

    base = fingerprint(x=np.arange(4))
    assert base == fingerprint(x=np.arange(4)[:])
    others = [
        fingerprint(x=np.arange(4) + 1),
        fingerprint(y=np.arange(4)),
        fingerprint(x=np.arange(4).reshape(2, 2)),
        fingerprint(x=np.arange(4).astype(np.uint64)),
        fingerprint(x=[np.arange(4)]),
        fingerprint(x=[np.arange(2), np.arange(2, 4)]),
    ]
    assert len({base, *others}) == 7


def test_pickling_pickles_the_arrays():
    dataset = headrace.from_arrays({"x": np.arange(4), "t": [np.arange(2)] * 4, "b": [b"a"] * 4})
    again = pickle.loads(pickle.dumps(dataset))
    assert again.fingerprint == dataset.fingerprint
    assert again[3]["b"] == b"a"
    assert again.manifest is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "from_arrays got an empty dict"),
        (None, "from_arrays got NoneType"),
        (np.zeros(3), "from_arrays got ndarray: give a dict of arrays"),
        ({"x": 3}, "array 'x' is a single value"),
        ({"x": [[1, 2], [3]]}, "array 'x' has rows of different lengths; give a list of NumPy arrays"),
        ({"x": ["a", "b"]}, "array 'x' has dtype <U1; convert it to one of bool"),
        ({"x": [object()]}, "array 'x' has dtype object"),
        ({"x": [b"a", "b"]}, "array 'x' has dtype"),
        ({"x": np.zeros(2, "M8[s]")}, "array 'x' has dtype datetime64"),
        ({"x": np.zeros(2, [("a", int)])}, "array 'x' has dtype"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, "arrays of different lengths: {'x': 2, 'y': 3}"),
        (
            {"x": [np.zeros(2, np.int8), np.array([300])]},
            "arrays of 'x' differ: int64 .*, int8 .*; convert them",
        ),
        ({"x": [np.zeros((2, 1)), np.zeros((2, 2))]}, "arrays of 'x' differ: float64 with elements of shape"),
        ({"a/b": np.zeros(2)}, "field name 'a/b'"),
        ({3: np.zeros(2)}, "field name 3"),
        ({"x": Ragged(np.zeros(3), np.array([0, 2, 1]))}, "field 'x': .* must not decrease"),
        ({"x": Ragged(np.zeros(3), np.array([0, 4]))}, "field 'x': .* beyond the values"),
        ({"x": Ragged(np.zeros(3), np.array([0.0, 3.0]))}, "field 'x': .* whole numbers"),
    ],
)
def test_what_makes_no_dataset(arrays, message):
    with pytest.raises(SettingsError, match=message):
        headrace.from_arrays(arrays)
