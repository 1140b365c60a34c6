"""How many segments (documents and padding) a batch may have, from how many its rows have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_SAFETY = math.log(1e18)
"""A batch with more segments comes once in so many."""
_TILTS = np.geomspace(1e-4, 50.0, 200)


@dataclass(frozen=True)
class SegmentCounts:
    """How many rows of one source have how many segments."""

    segments: NDArray[np.int64]
    rows: NDArray[np.int64]

    @property
    def most(self) -> int:
        return int(self.segments.max(initial=0))

    def of_the_fullest(self, rows: int) -> int:
        """The segments of so many rows of two epochs, if they are those that have the most."""
        by_segments = np.argsort(-self.segments)
        # A batch may hold the end of an epoch and the beginning of the next, and a row of both.
        of_two_epochs = 2 * self.rows[by_segments]
        before = np.concatenate([[0], np.cumsum(of_two_epochs)])
        taken = np.clip(rows - before[:-1], 0, of_two_epochs)
        return int((taken * self.segments[by_segments]).sum())


def segments_of_a_batch(sources: Sequence[SegmentCounts], batch_size: int, is_shuffled: bool) -> int:
    """So many segments that no batch has more, whichever rows it gets.

    If the rows of all sources are shuffled, the fullest rows do not come together, and it is so many that a batch with
    more will not come (Chernoff's bound, for the source that is worst at it).
    """
    certain = batch_size * max(source.most for source in sources)
    if len(sources) == 1 and batch_size <= sources[0].rows.sum():
        certain = sources[0].of_the_fullest(batch_size)
    if not is_shuffled:
        return certain
    growth = np.max([_log_of_mean_exponential(source) for source in sources], axis=0)
    likely = float(((batch_size * growth + _SAFETY) / _TILTS).min())
    return min(certain, math.ceil(likely))


def _log_of_mean_exponential(source: SegmentCounts) -> NDArray[np.float64]:
    """log(mean(exp(tilt * segments))) over all rows, for each tilt."""
    exponents = _TILTS[:, None] * (source.segments - source.most)
    means = (np.exp(exponents) * source.rows).sum(axis=1) / source.rows.sum()
    return np.asarray(np.log(means) + _TILTS * source.most)
