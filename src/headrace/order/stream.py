"""The whole training run as a function: a position in the stream -> a source, its epoch, and a row.

A stream never ends. With one source of 5 rows, positions 0 to 4 are its epoch 0 and 5 to 9 its epoch 1, each in its own
order. In a mixture every source counts its own epochs: `stages` says which source each position belongs to and how many
of its rows came before, and that number is divided into epochs in the same way.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.order.distinct import distinct
from headrace.order.keys import derive
from headrace.order.mixture import Stages
from headrace.order.permutation import Permute, permute
from headrace.order.shuffle import Shuffle, ShuffleKind

_ORDER, _REMIX, _SAMPLE = 0, 1, 2
"""What a key is used for: the order of an epoch's rows, the documents of its rows, a transform of one row."""


@dataclass(frozen=True)
class Places:
    """One entry for each position."""

    source: NDArray[np.int64]
    epoch: NDArray[np.int64]
    row: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RowStream:
    """`rows` are the numbers of rows that the sources have in one epoch."""

    rows: tuple[int, ...]
    stages: Stages
    shuffle: Shuffle
    seed: int
    permute: Permute = permute

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise SettingsError(f"seed={self.seed}: must be 0 to 2^64 - 1")
        if len(self.rows) != self.stages.sources:
            raise SettingsError(
                f"{len(self.rows)} sources and {self.stages.sources} weights: must be the same number"
            )

    def at(self, positions: Any) -> Places:
        number = np.asarray(positions, dtype=np.int64)
        source, sizes = np.zeros_like(number), np.array(self.rows, dtype=np.int64)
        if len(self.rows) > 1:
            source, number = self.stages.at(number)
            sizes = sizes[source]
        epoch = number // sizes
        row = number - epoch * sizes
        if self.shuffle.kind is not ShuffleKind.NONE:
            for which in distinct(source):
                where = slice(None) if len(self.rows) == 1 else np.flatnonzero(source == which)
                key = self._epoch_keys(which, epoch[where], _ORDER)
                row[where] = self.shuffle.rows_at(row[where], self.rows[which], key, self.permute)
        return Places(source, epoch, row)

    def remix_keys(self, places: Places) -> NDArray[np.uint64] | None:
        """A key for each place, the same for all rows of a source's epoch; None if nothing is shuffled."""
        if self.shuffle.kind is ShuffleKind.NONE:
            return None
        keys = np.empty(len(places.row), dtype=np.uint64)
        for which in distinct(places.source):
            where = slice(None) if len(self.rows) == 1 else np.flatnonzero(places.source == which)
            keys[where] = self._epoch_keys(which, places.epoch[where], _REMIX)
        return keys

    def _epoch_keys(self, source: int, epoch: NDArray[np.int64], use: int) -> NDArray[np.uint64]:
        """A key for each epoch, or a single key if all epochs are the same, as they nearly always are."""
        if len(epoch) and epoch.min() == epoch.max():
            return _epoch_key(self.seed, source, int(epoch[0]), use)
        return derive(self.seed, source, epoch, use)

    def sample_keys(self, places: Places) -> NDArray[np.uint64]:
        """A different key for each place, from which transforms draw their random numbers."""
        return derive(self.seed, places.source, places.epoch, _SAMPLE, places.row)


@lru_cache(maxsize=256)
def _epoch_key(seed: int, source: int, epoch: int, use: int) -> NDArray[np.uint64]:
    return derive(seed, source, epoch, use)
