"""Keys of 64 bits, derived from other keys and numbers, so that every use of randomness has its own key.

>>> derive(7, 0), derive(7, 1)  # a seed, and its epochs 0 and 1
(array([8409816773569330625], dtype=uint64), array([4369894418777901244], dtype=uint64))
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.order.permutation import GOLDEN, mix


def derive(key: Any, *words: Any) -> NDArray[np.uint64]:
    """A key for each combination of numbers from 0 to 2^64 - 1; `key` and the words may be arrays to broadcast."""
    keys = np.atleast_1d(np.asarray(key, dtype=np.uint64)).copy()
    for word in words:
        keys = mix(mix(keys + GOLDEN) + np.atleast_1d(np.asarray(word, dtype=np.uint64)))
    return keys
