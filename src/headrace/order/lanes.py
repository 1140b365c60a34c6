"""The order by units: parts of the data that are fetched whole, many of them in use at once, each needed only once.

The units are permuted and divided into lanes, which have nearly the same number of rows. Every lane gives the rows of
one unit after another, and all lanes give rows in turn, so a batch has rows of as many units as there are lanes. Six
units of 4 rows, a to f, in two lanes, with the key 0:

    units, permuted     a c e | b d f           slots 0 to 5
    lane 0              . a . a a . a c | c . c . c . | . . e . e . . e . e
    lane 1              b . b . . b . . | . b . d . d | d d . f . f f . f .
                        opening           turns         closing
    rows                4 3 5 2 1 6 0 9 | 11 7 8 13 10 12 | 15 14 19 22 17 20 23 16 21 18

Were it turns from beginning to end, all lanes would need their next unit at the same time, since units have nearly the
same size: a reader would fetch nothing for a while, and then everything at once. So in the opening, which is as long as
one unit, every other lane gives more rows than a unit has, and its partner fewer by as many. Each pair has another
lead, from nothing to half a unit; afterwards the units of all lanes begin one by one. The closing is all that is left
when the first lane comes to its last rows, as many as a unit has. Lanes then have unequal numbers of rows, and both
here and in the opening those of every lane are spread evenly (evenly.py): all lanes last until the end. Lanes of less
than three units have only a closing.

The rows of a unit are permuted as well. What is stored is where each slot begins, and its unit's first row.

How well that mixes, with 2 million rows of 4 KB in shards of 64 MB that each hold one kind of rows, units of 4 MB and
128 lanes (tests/order/test_unit_quality.py): the variance of the mean of 256 rows is 1.9 times that of an independent
draw, 2.0 to 2.3 in the first and in the last 3 % of the epoch; 128 units are in use at once; and in the time in which
eight units are used up on average, at most 22 begin, after the first turn. With turns alone it would be all 128, and
the last batches of an epoch might come from a single lane.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.order.evenly import Evenly
from headrace.order.keys import derive
from headrace.order.permutation import MAX_SIZE, Permute, permute

_LEAST_UNITS = 3
"""Lanes of fewer units have only a closing."""
_SORTED_AT_ONCE = 2**18
"""How many positions are sorted at once, which takes some 60 bytes for each."""


class UnitOrder:
    """One epoch of units of these sizes, by the key of the epoch. Made once for an epoch; threads may share it."""

    def __init__(self, sizes: NDArray[np.int64], lanes: int, key: Any, permute: Permute = permute) -> None:
        _check_sizes(sizes)
        self._key, self._permute = key, permute
        units = permute(np.arange(len(sizes)), len(sizes), key)
        self._starts = np.zeros(len(sizes) + 1, dtype=np.int64)
        """Where the slots begin if their rows lie end to end, and where the last one ends."""
        np.cumsum(sizes[units], out=self._starts[1:])
        self._first_rows = (np.cumsum(sizes) - sizes)[units]
        """The first row of the unit in each slot."""
        self.rows = int(self._starts[-1])
        edges = _lane_edges(self._starts, lanes)
        rows_of_lanes = np.diff(edges)
        has_rows = rows_of_lanes > 0
        self._lane_starts = edges[:-1][has_rows]
        self.lanes = len(self._lane_starts)
        unit_rows = self.rows // max(1, int(np.count_nonzero(sizes)))
        self._divide(rows_of_lanes[has_rows], unit_rows)

    def _divide(self, rows: NDArray[np.int64], unit_rows: int) -> None:
        """Decide how many rows each lane gives in the opening, in the turns after it, and in the closing."""
        opened, turns = np.zeros_like(rows), 0
        if len(rows) and rows.min() >= _LEAST_UNITS * unit_rows:
            opened = unit_rows + _leads(len(rows), unit_rows)
            turns = int((rows - opened).min()) - unit_rows
        self._opening = Evenly(opened)
        self._opened = opened
        self._closing = Evenly(rows - opened - turns)
        self._turns_end = self._opening.rows + turns * len(rows)
        """The position after the last turn, where the closing begins."""
        self._before_closing = opened + turns

    def rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows at these positions of the epoch."""
        self._check(positions)
        lanes, numbers = self._find(positions)
        numbers += self._lane_starts[lanes]
        slots = np.searchsorted(self._starts, numbers, side="right") - 1
        starts = self._starts[slots]
        sizes = self._starts[slots + 1] - starts
        within = self._permute(numbers - starts, sizes, derive(self._key, slots))
        rows: NDArray[np.int64] = self._first_rows[slots] + within
        return rows

    def lanes_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the lane that each position belongs to."""
        self._check(positions)
        return self._find(positions)[0]

    def by_lane(self, begins: NDArray[np.int64], rows: int, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of ranges of so many positions, put in the order of their lanes: the positions with these numbers.

        The result has a row for each range. Except for ranges across the parts of an epoch it does not take longer if
        they are long.
        """
        found = np.empty((len(begins), len(wanted)), dtype=np.int64)
        turns_begin, turns_end = self._opening.rows, self._turns_end
        is_opening = begins + rows <= turns_begin
        is_turns = (begins >= turns_begin) & (begins + rows <= turns_end)
        is_closing = begins >= turns_end
        found[is_opening] = self._opening.by_lane(begins[is_opening], rows, wanted)
        found[is_turns] = turns_begin + self._turns_by_lane(begins[is_turns] - turns_begin, rows, wanted)
        found[is_closing] = turns_end + self._closing.by_lane(begins[is_closing] - turns_end, rows, wanted)
        is_across = ~(is_opening | is_turns | is_closing)
        found[is_across] = sorted_by_lane(self.lanes_at, begins[is_across], rows, wanted)
        return found

    def _turns_by_lane(
        self, begins: NDArray[np.int64], rows: int, wanted: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """In turns: every lane has as many positions as there are whole rounds in the range, and some have one more."""
        lanes, (rounds, more) = self.lanes, divmod(rows, max(1, self.lanes))
        start = (begins % max(1, lanes))[:, None]
        # Those with one more are the lanes from `start` on; they may go on with lane 0.
        is_wrapped = start + more > lanes
        first_edge = np.where(is_wrapped, start + more - lanes, start)
        last_edge = np.where(is_wrapped, start, start + more)
        outside, between = rounds + is_wrapped, rounds + ~is_wrapped
        before_first = first_edge * outside
        before_last = before_first + (last_edge - first_edge) * between
        is_first, is_last = wanted < before_first, wanted >= before_last
        base = np.where(is_first, 0, np.where(is_last, last_edge, first_edge))
        before = np.where(is_first, 0, np.where(is_last, before_last, before_first))
        each = np.where(is_first | is_last, outside, between)
        lane, turn = np.divmod(wanted - before, np.maximum(each, 1))
        found: NDArray[np.int64] = begins[:, None] + (base + lane - start) % max(1, lanes) + turn * lanes
        return found

    def _check(self, positions: NDArray[np.int64]) -> None:
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.rows:
            raise SettingsError(
                f"positions from {positions.min()} to {positions.max()}: must be inside the {self.rows} rows of the "
                "epoch"
            )

    def _find(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The lane of each position, and how many of its rows come before."""
        turns, lanes = np.divmod(positions - self._opening.rows, max(1, self.lanes))
        numbers = turns + self._opened[lanes]
        if positions.min(initial=self.rows) < self._opening.rows:
            where = np.flatnonzero(positions < self._opening.rows)
            lanes[where], numbers[where] = self._opening.at(positions[where])
        if positions.max(initial=0) >= self._turns_end:
            where = np.flatnonzero(positions >= self._turns_end)
            held, number = self._closing.at(positions[where] - self._turns_end)
            lanes[where], numbers[where] = held, number + self._before_closing[held]
        return lanes, numbers


def sorted_by_lane(
    lanes_at: Callable[[NDArray[np.int64]], NDArray[Any]],
    begins: NDArray[np.int64],
    rows: int,
    wanted: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Of ranges of so many positions, put in the order of their lanes: the positions with these numbers."""
    found = np.empty((len(begins), len(wanted)), dtype=np.int64)
    at_once = max(1, _SORTED_AT_ONCE // max(1, rows))
    for first in range(0, len(begins), at_once):
        some = begins[first : first + at_once, None]
        lanes = lanes_at((some + np.arange(rows)).reshape(-1)).reshape(-1, rows)
        found[first : first + at_once] = some + np.argsort(lanes, axis=1, kind="stable")[:, wanted]
    return found


def _check_sizes(sizes: NDArray[np.int64]) -> None:
    if len(sizes) and sizes.min() < 0:
        raise SettingsError(f"units: one has {sizes.min()} rows; must be 0 or more")
    # As a float, because the sum itself may overflow.
    if sizes.sum(dtype=np.float64) > MAX_SIZE:
        raise SettingsError("units: they have more than 2^48 rows, which is more than an epoch may have")


def _leads(lanes: int, unit_rows: int) -> NDArray[np.int64]:
    """How many rows more than a unit each lane gives in the opening: one lane of a pair as many more as the other less.

    They are spread evenly from minus half a unit to half a unit. A last lane without a partner gives as many as a unit.
    """
    pairs = lanes // 2
    ahead = unit_rows * np.arange(1, 2 * pairs, 2) // (4 * max(1, pairs))
    leads = np.zeros(lanes, dtype=np.int64)
    leads[0 : 2 * pairs : 2], leads[1 : 2 * pairs : 2] = ahead, -ahead
    return leads


def _lane_edges(starts: NDArray[np.int64], lanes: int) -> NDArray[np.int64]:
    """Where lanes begin, and where the last one ends: at the starts of slots that are nearest to equal shares."""
    numbers = np.arange(lanes + 1)
    whole, rest = divmod(int(starts[-1]), lanes)
    # A share ends after `whole` rows and a fraction, counted in parts of a row: `lanes` parts are one row.
    wanted, parts = numbers * whole + numbers * rest // lanes, numbers * rest % lanes
    after = np.searchsorted(starts, wanted, side="right")
    above, below = starts[np.minimum(after, len(starts) - 1)], starts[after - 1]
    # How much nearer the start below is, in rows; anything beyond 2 decides it in any case.
    nearer = np.clip(above + below - 2 * wanted, -1, 2)
    return np.where(2 * parts <= nearer * lanes, below, above)
