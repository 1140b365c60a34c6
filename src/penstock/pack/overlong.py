"""Documents longer than a row: cut into full rows and a rest.

The rests of length r are those of the documents of length r, r + seq_len, r + 2 seq_len, ... With rows of 10, a
document of 23 tokens makes two full rows and a rest of 3; one of 20 makes two full rows and no rest.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Cut:
    """`lengths` (1 to seq_len - 1) and `counts` of what is left to pack, beside `full_rows` rows without a gap."""

    full_rows: int
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]


def cut_overlong(lengths: Any, counts: Any, seq_len: int) -> Cut:
    """Cut a histogram. Empty documents need no place and are left out."""
    lengths, counts = np.asarray(lengths, dtype=np.int64), np.asarray(counts, dtype=np.int64)
    rests, where = np.unique(lengths % seq_len, return_inverse=True)
    summed = np.zeros(len(rests), dtype=np.int64)
    np.add.at(summed, where, counts)
    some = rests > 0
    return Cut(int((lengths // seq_len * counts).sum()), rests[some], summed[some])
