"""The rows of several lanes as one sequence, over which those of each lane are spread evenly, in closed form.

The lanes are halved, the halves are halved, and so on down to single lanes. A sequence of n items of which m belong to
the first half gives an item to that half wherever floor(place * m / n) grows. Lanes of 3, 1 and 4 rows:

    place       0 1 2 3 4 5 6 7
    half        b b a b b a b a         lane 0 (a, 3 of 8), or one of the lanes 1 and 2 (b, 5 of 8)
    lane        2 2 0 2 2 0 1 0         of the five places in b, floor(place / 5) grows at the last: lane 1's
    its row     0 1 0 2 3 1 0 2
"""

import numpy as np
from numpy.typing import NDArray


class Evenly:
    """Lanes with these numbers of rows. Threads may share it."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self._before = np.append(0, np.cumsum(counts))
        """How many rows the lanes before each lane have."""
        self.lanes = len(counts)
        self.rows = int(self._before[-1])

    def at(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The lane at each place, and how many rows of that lane come before."""
        first = np.zeros(len(places), dtype=np.int64)
        stop = np.full(len(places), self.lanes)
        numbers = places
        for _ in range((self.lanes - 1).bit_length()):
            middle, in_first_half, rows = self._halve(first, stop)
            before, is_in_first_half = _share(numbers, in_first_half, rows)
            numbers = np.where(is_in_first_half, before, numbers - before)
            first = np.where(is_in_first_half, first, middle)
            stop = np.where(is_in_first_half, middle, stop)
        return first, numbers

    def _halve(
        self, first: NDArray[np.int64], stop: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Where ranges of lanes are halved, the rows of their first halves, and all their rows. Of a single lane, all
        rows belong to its second half."""
        middle = (first + stop) >> 1
        start = self._before[first]
        return middle, self._before[middle] - start, self._before[stop] - start

    def by_lane(self, begins: NDArray[np.int64], places: int, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of ranges of so many places, put in the order of their lanes: the places with these numbers.

        The result has a row for each range. It takes no longer for long ranges: the way down the halves is found from
        the numbers of places that a range has in each, and the way up leads from a lane's row to its place.
        """
        low = np.repeat(begins, len(wanted))
        high = low + places
        numbers = np.tile(wanted, len(begins))
        first = np.zeros(len(low), dtype=np.int64)
        stop = np.full(len(low), self.lanes)
        way = []
        for _ in range((self.lanes - 1).bit_length()):
            middle, in_first_half, rows = self._halve(first, stop)
            low_there, _ = _share(low, in_first_half, rows)
            high_there, _ = _share(high, in_first_half, rows)
            is_first = numbers < high_there - low_there
            way.append((is_first, in_first_half, rows))
            numbers = np.where(is_first, numbers, numbers - (high_there - low_there))
            low = np.where(is_first, low_there, low - low_there)
            high = np.where(is_first, high_there, high - high_there)
            first = np.where(is_first, first, middle)
            stop = np.where(is_first, middle, stop)
        found = low + numbers
        for is_first, in_first_half, rows in reversed(way):
            # An item of the first half is where floor(place * m / n) grows to one more; one of the second, where the
            # number of places beside it does.
            own = np.where(is_first, in_first_half, rows - in_first_half)
            quotient, rest = _divide(found + is_first, rows, own)
            found = np.where(is_first & (rest == 0), quotient - 1, quotient)
        return found.reshape(len(begins), len(wanted))


def _share(
    places: NDArray[np.int64], part: NDArray[np.int64], whole: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """floor(place * part / whole), and whether it grows after this place."""
    quotient, rest = _divide(places, part, whole)
    return quotient, rest + part >= whole


def _divide(
    a: NDArray[np.int64], b: NDArray[np.int64], divisor: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """a * b divided by the divisor, and the rest; exact if these and the result are below 2^48.

    The product may have more than 64 bits, and then wraps around. But the guess is off by one at most, so what remains
    of the product is small, and comes out right.
    """
    guess = (a.astype(np.float64) * b / divisor).astype(np.int64)
    rest = a * b - guess * divisor
    off = (rest >= divisor).astype(np.int64) - (rest < 0)
    return guess + off, rest - off * divisor
