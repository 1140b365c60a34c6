"""The whole training run as a function: a position in the stream -> a source, its epoch, and a row.

A stream never ends. With one source of 5 rows, positions 0 to 4 are its epoch 0 and 5 to 9 its epoch 1, each in its own
order. In a mixture every source counts its own epochs: `stages` says which source each position belongs to and how many
of its rows came before, and that number is divided into epochs in the same way.

With the order by units, positions also have lanes (lanes.py), by which the rows of a batch are dealt out to ranks.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.order.distinct import distinct
from headrace.order.keys import derive
from headrace.order.lanes import UnitOrder, sorted_by_lane
from headrace.order.mixture import Stages
from headrace.order.permutation import Permute, permute
from headrace.order.shuffle import MAX_LANES, Shuffle, ShuffleKind

_ORDER, _REMIX, _SAMPLE = 0, 1, 2
"""What a key is used for: the order of an epoch's rows, the documents of its rows, a transform of one row."""


@dataclass(frozen=True)
class Places:
    """One entry for each position."""

    source: NDArray[np.int64]
    epoch: NDArray[np.int64]
    row: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowStream:
    """`rows` are the numbers of rows that the sources have in one epoch."""

    rows: tuple[int, ...]
    units: tuple[NDArray[np.int64] | None, ...] = ()
    """The numbers of rows in the units of each source; None if it has no units."""
    stages: Stages
    shuffle: Shuffle
    seed: int
    permute: Permute = permute
    _orders: dict[int, tuple[tuple[int, UnitOrder], ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    """For each source, the latest epochs that were asked for. Entries are replaced as a whole, so threads may share
    them without a lock."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise SettingsError(f"seed={self.seed}: must be 0 to 2^64 - 1")
        if len(self.rows) != self.stages.sources:
            raise SettingsError(
                f"{len(self.rows)} sources and {self.stages.sources} weights: must be the same number"
            )
        self._check_units()

    def _check_units(self) -> None:
        if self.units and len(self.units) != len(self.rows):
            raise SettingsError(
                f"units of {len(self.units)} sources, but there are {len(self.rows)} sources: must be the same number"
            )
        for number, (rows, sizes) in enumerate(zip(self.rows, self.units, strict=False)):
            if sizes is not None and int(sizes.sum()) != rows:
                raise SettingsError(
                    f"the units of source {number} have {int(sizes.sum())} rows, but it has {rows}: must be the same"
                )

    def at(self, positions: Any) -> Places:
        source, epoch, row = self._counted(positions)
        if self.shuffle.kind is not ShuffleKind.NONE:
            for which in distinct(source):
                where = slice(None) if len(self.rows) == 1 else np.flatnonzero(source == which)
                row[where] = self._shuffled(which, epoch[where], row[where])
        return Places(source, epoch, row)

    def _counted(self, positions: Any) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The source and epoch of each position, and how many rows of that epoch come before."""
        number = np.asarray(positions, dtype=np.int64)
        source, sizes = np.zeros_like(number), np.array(self.rows, dtype=np.int64)
        if len(self.rows) > 1:
            source, number = self.stages.at(number)
            sizes = sizes[source]
        epoch = number // sizes
        return source, epoch, number - epoch * sizes

    def _shuffled(
        self, source: int, epoch: NDArray[np.int64], number: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The rows of a source that come after so many others of their epochs."""
        if not self._has_units(source):
            key = self._epoch_keys(source, epoch, _ORDER)
            return self.shuffle.rows_at(number, self.rows[source], key, self.permute)
        rows = np.empty_like(number)
        for each in distinct(epoch):
            where = np.flatnonzero(epoch == each)
            rows[where] = self._order_of(source, each).rows_at(number[where])
        return rows

    def lanes(self, positions: Any) -> NDArray[np.uint16]:
        """The lane of each position in the order by units, as a fraction of all lanes of its source, times 2^16.

        The rows of a source without units need not stay together, so they are spread over all lanes.
        """
        source, epoch, number = self._counted(positions)
        lane = number % self.shuffle.lanes * MAX_LANES // self.shuffle.lanes
        for which in filter(self._has_units, distinct(source)):
            for each in distinct(epoch[source == which]):
                where = np.flatnonzero((source == which) & (epoch == each))
                order = self._order_of(which, each)
                lane[where] = order.lanes_at(number[where]) * MAX_LANES // order.lanes
        return lane.astype(np.uint16)

    def by_lane(self, begins: NDArray[np.int64], rows: int, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of ranges of so many positions, put in the order of their lanes: the positions with these numbers.

        The result has a row for each range. Ranges inside an epoch of a single source, which are nearly all that it
        has, do not take longer if they are long.
        """
        found = np.empty((len(begins), len(wanted)), dtype=np.int64)
        is_found = np.zeros(len(begins), dtype=bool)
        if len(self.rows) == 1 and self._has_units(0):
            size = self.rows[0]
            epochs = begins // size
            is_found = epochs == (begins + rows - 1) // size
            for epoch in distinct(epochs[is_found]):
                where = np.flatnonzero(is_found & (epochs == epoch))
                order = self._order_of(0, epoch)
                found[where] = epoch * size + order.by_lane(begins[where] - epoch * size, rows, wanted)
        found[~is_found] = sorted_by_lane(self.lanes, begins[~is_found], rows, wanted)
        return found

    @property
    def unit_count(self) -> int:
        """How many units all sources have; a source without units counts as one."""
        return sum(1 if sizes is None else len(sizes) for sizes in self.units or (None,) * len(self.rows))

    def _has_units(self, source: int) -> bool:
        return self.shuffle.kind is ShuffleKind.UNITS and bool(self.units) and self.units[source] is not None

    def _order_of(self, source: int, epoch: int) -> UnitOrder:
        kept = self._orders.get(source, ())
        for known, order in kept:
            if known == epoch:
                return order
        sizes = self.units[source]
        if sizes is None:
            raise SettingsError(f"source {source} has no units")
        key = _epoch_key(self.seed, source, epoch, _ORDER)
        order = UnitOrder(sizes, self.shuffle.lanes, key, self.permute)
        # The one before stays, for threads that are still at the end of its epoch.
        self._orders[source] = ((epoch, order), *kept[:1])
        return order

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
