"""The distinct numbers of an array, against NumPy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.order.distinct import distinct


@given(st.lists(st.integers(-5, 5), max_size=200), st.sampled_from(["int64", "int32"]))
def test_as_numpy_does_it(numbers: list[int], dtype: str) -> None:
    array = np.array(numbers, dtype=dtype)
    assert distinct(array) == np.unique(array).tolist()
