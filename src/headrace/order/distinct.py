"""The distinct numbers of an array, in ascending order.

Like `numpy.unique`, which imports `numpy.ma` when it is first called: threads of a Loader must not import anything,
because a fork in that moment leaves its child with an import that never ends.
"""

import numpy as np
from numpy.typing import NDArray

_FEW = 64
"""Up to this many numbers, a set is faster than three calls of NumPy."""


def distinct(numbers: NDArray[np.integer]) -> list[int]:
    if len(numbers) <= _FEW:
        return sorted(set(numbers.tolist()))
    if numbers.min() == numbers.max():
        return [int(numbers[0])]
    ordered = np.sort(numbers)
    is_new = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    result: list[int] = ordered[is_new].tolist()
    return result
