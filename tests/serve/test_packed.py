"""Batches as bytes: what comes out is what went in, and damaged bytes are refused."""

import contextlib
import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace.errors import StageError
from headrace.serve import packed
from headrace.serve.packed import DamagedBatchError, pack, unpack
from tests.properties import examples

DTYPES = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.unsigned_integer_dtypes(endianness="?"),
    arrays.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    arrays.complex_number_dtypes(endianness="?"),
    arrays.byte_string_dtypes(min_len=1),
    arrays.unicode_string_dtypes(min_len=1),
    arrays.datetime64_dtypes(),
)
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
    ARRAYS,
    ARRAYS.filter(lambda array: array.shape == ()).map(lambda array: array[()]),
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(NAMES, inner, max_size=3),
    ),
    max_leaves=8,
)
BATCHES = st.dictionaries(NAMES, VALUES, max_size=5)


def sent(batch: dict[str, Any]) -> tuple[bytes, np.ndarray[Any, np.dtype[np.uint8]]]:
    made = pack(batch)
    body = np.zeros(made.body_bytes, dtype=np.uint8)
    made.write(body)
    return made.head, body


def same(one: Any, other: Any) -> bool:
    """Equal in type, in form and in every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@examples(150)
@given(BATCHES)
def test_what_comes_out_is_what_went_in(batch: dict[str, Any]) -> None:
    assert same(unpack(*sent(batch)), batch)


def test_arrays_that_are_not_contiguous_and_are_written_to() -> None:
    batch = {"turned": np.arange(12).reshape(3, 4).T, "every other": np.arange(10)[::2]}
    found = unpack(*sent(batch))
    assert all(np.array_equal(found[name], batch[name]) for name in batch)
    found["turned"][0, 0] = 7
    assert (
        found["turned"].ctypes.data % packed.ALIGNMENT == found["every other"].ctypes.data % packed.ALIGNMENT
    )


def test_tensors_stay_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    head, body = sent({"x": torch.arange(6).reshape(2, 3), "y": [torch.ones(2)]})
    found = unpack(head, body)
    assert torch.equal(found["x"], torch.arange(6).reshape(2, 3))
    assert torch.equal(found["y"][0], torch.ones(2))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DamagedBatchError, match="PyTorch is not installed here"):
        unpack(head, body)


def test_types_of_other_packages() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    batch = {"x": np.arange(4).astype(ml_dtypes.bfloat16)}
    assert same(unpack(*sent(batch)), batch)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "field 'x' holds builtins.object, which cannot be sent"),
        (
            np.ma.masked_array([1, 2], [True, False]),
            "field 'x' holds numpy.ma.*MaskedArray, which cannot be sent",
        ),
        ({1: 2}, "field 'x' holds builtins.dict"),
        (np.array([object()]), "field 'x' is an array of object"),
        (np.zeros(2, [("a", "i4")]), "field 'x' is an array of "),
        ("\ud800", "cannot be sent: .*surrogates"),
        (b"x" * (packed.MOST_HEAD_BYTES + 1), "use arrays instead"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, said: str) -> None:
    with pytest.raises(StageError, match=said):
        pack({"x": value})


def test_what_is_nested_too_deep_is_refused() -> None:
    value: Any = 1
    for _ in range(packed.MOST_DEPTH + 1):
        value = [value]
    with pytest.raises(StageError, match="nested more than 16 deep"):
        pack({"x": value})


MUTATIONS = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)


@examples(300)
@given(BATCHES, MUTATIONS, st.integers(-3, 3))
def test_damaged_bytes_are_refused_or_are_a_batch(
    batch: dict[str, Any], mutations: list[tuple[int, int]], cut: int
) -> None:
    head, body = sent(batch)
    damaged = bytearray(head)
    for place, byte in mutations:
        damaged[place % len(damaged)] = byte
    damaged = damaged[: len(damaged) + min(cut, 0)] + bytes(max(cut, 0))
    try:
        found = unpack(bytes(damaged), body)
    except DamagedBatchError:
        return
    # It may still be a batch, but none that is larger than what was sent.
    assert sum(array.nbytes for array in found.values() if isinstance(array, np.ndarray)) <= 64 * (
        len(body) + 1
    )


@examples(200)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_are_refused_or_are_a_batch(head: bytes, body: bytes) -> None:
    with contextlib.suppress(DamagedBatchError):
        assert isinstance(unpack(head, np.frombuffer(body, dtype=np.uint8)), dict)
