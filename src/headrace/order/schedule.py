"""One cycle of a mixture: which source each of its slots belongs to.

Weights become whole numbers of slots in a short cycle, which repeats. The slots of a source are spread
evenly: cut the cycle into as many equal stretches as the source has slots, and put one slot into each. Weights of
0.5, 0.3 and 0.2 are 5, 3 and 2 slots of 10; the stretches of the second source end at 3.3, 6.7 and 10:

    position     0 1 2 3 4 5 6 7 8 9
    source       0 1 0 2 0 1 0 1 0 2      then the cycle repeats
    turn         0 0 1 0 2 1 3 2 4 1      how many slots of that source come before it in the cycle

At every position, take the slot whose stretch has begun and ends first: this meets every end ('Pfair' scheduling on
one machine). So after any t rows, a source with q of the Q slots has given t q / Q rows, to within less than one row.
"""

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError

PRECISION = 65_536
"""The most slots in a cycle: weights that are not small fractions are rounded to 1/65,536."""
LAG_PARTS = 2**20
_FIRST_SLOTS = 1024
"""How many slots are worked out at first. When more are needed, it is four times as many."""

logger = logging.getLogger(__name__)

Slots = tuple[NDArray[np.int32], NDArray[np.int64]]
"""The source of each slot, and how many slots of that source come before it in the cycle."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """One cycle of a mixture. Its slots are worked out when they are needed, from the first one on."""

    quotas: tuple[int, ...]
    """The numbers of slots of the sources, in lowest terms."""
    lags: tuple[int, ...]
    """By how much the slots of each source come earlier, in fractions of a row (1 / LAG_PARTS)."""

    @staticmethod
    def from_weights(weights: Sequence[float], owed: Sequence[Fraction] | None = None) -> "Schedule":
        """Weights are any numbers of at least 0; only their ratios matter.

        `owed` is how many rows each source is behind its share (ahead of it, if negative) when the schedule begins: its
        slots come earlier (or later) by that much.
        """
        quotas = _quotas_of(checked_weights(weights))
        lags = [math.floor(each * LAG_PARTS) for each in owed] if owed else [0] * len(quotas)
        return Schedule(tuple(quotas), tuple(lags))

    @cached_property
    def cycle(self) -> int:
        return sum(self.quotas)

    @property
    def source(self) -> NDArray[np.int32]:
        """The source of each slot."""
        return self._slots(self.cycle)[0]

    @property
    def turn(self) -> NDArray[np.int64]:
        """How many slots of its source come before each slot in the cycle."""
        return self._slots(self.cycle)[1]

    def at(self, positions: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each position, and how many rows of that source come before it."""
        cycles, slots = np.divmod(checked_positions(positions), self.cycle)
        source, turn = self._slots(int(slots.max(initial=-1)) + 1)
        sources = source[slots].astype(np.int64)
        return sources, cycles * self._quotas[sources] + turn[slots]

    def counts(self, positions: Any) -> NDArray[np.int64]:
        """How many rows of each source come before each position; the result has a last dimension of sources."""
        asked = checked_positions(positions)
        if asked.ndim:
            cycles, slots = np.divmod(asked[..., None], self.cycle)
            wanted = np.arange(len(self.quotas)) * self.cycle + slots
            return cycles * self._quotas + np.searchsorted(self._places, wanted) - self._starts
        whole_cycles, slot = divmod(int(asked), self.cycle)
        source, _ = self._slots(slot)
        return whole_cycles * self._quotas + np.bincount(source[:slot], minlength=len(self.quotas))

    def position_of(self, source: int, index: int) -> int:
        """The position of row `index` of a source with a share. Python integers make it exact for any size."""
        cycles, turn = divmod(index, self.quotas[source])
        slot = int(self._places[self._starts[source] + turn]) - source * self.cycle
        return cycles * self.cycle + slot

    def without_slots(self) -> "Schedule":
        """The same schedule without what was worked out so far, which takes memory."""
        return Schedule(self.quotas, self.lags)

    def _slots(self, count: int) -> Slots:
        """At least the first `count` slots."""
        known: Slots | None = self.__dict__.get("_known")
        if known is None or len(known[0]) < count:
            enough = max(count, _FIRST_SLOTS, 4 * len(known[0]) if known else 0)
            known = _first_slots(self.quotas, self.lags, min(enough, self.cycle))
            # Two threads may work it out at the same time; the results are the same.
            self.__dict__["_known"] = known
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        return Schedule, (self.quotas, self.lags)

    @cached_property
    def _quotas(self) -> NDArray[np.int64]:
        return np.array(self.quotas, dtype=np.int64)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Where the slots of each source begin in `_places`."""
        return np.cumsum(self._quotas) - self._quotas

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """`source * cycle + slot` of every slot, sorted: the slots of each source, one source after the other."""
        return np.sort(self.source * np.int64(self.cycle) + np.arange(self.cycle))


def _first_slots(quotas: Sequence[int], lags: Sequence[int], count: int) -> Slots:
    source = _earliest_deadline_first(np.array(quotas, dtype=np.int64), np.array(lags, dtype=np.int64), count)
    by_source = np.argsort(source, kind="stable")
    given = np.bincount(source, minlength=len(quotas))
    turn = np.empty(count, dtype=np.int64)
    turn[by_source] = np.arange(count) - np.repeat(np.cumsum(given) - given, given)
    source.setflags(write=False)
    turn.setflags(write=False)
    return source, turn


def _earliest_deadline_first(
    quotas: NDArray[np.int64], lags: NDArray[np.int64], count: int
) -> NDArray[np.int32]:
    """The source of each of the first slots: of the stretches that have begun, the one that ends first, then the
    lowest source.
    """
    cycle, sources = int(quotas.sum()), len(quotas)
    source = np.repeat(np.arange(sources), quotas)
    turn = np.arange(cycle) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    scale = quotas[source] * LAG_PARTS
    release = (turn * LAG_PARTS - lags[source]) * cycle // scale
    deadline = -(-((turn + 1) * LAG_PARTS - lags[source]) * cycle // scale)
    # In a heap, one number for each stretch is faster than a pair.
    ranks = (deadline - deadline.min()) * sources + source
    by_release = np.argsort(release, kind="stable")
    begun_by = np.searchsorted(release[by_release], np.arange(count), side="right").tolist()
    waiting = ranks[by_release].tolist()
    ready: list[int] = []
    chosen: list[int] = []
    begun = 0
    for slot, stop in enumerate(begun_by):
        # No slot stays empty: if no stretch has begun, the next one is taken early.
        stop = max(stop, slot + 1)
        for rank in waiting[begun:stop]:
            heappush(ready, rank)
        begun = max(begun, stop)
        chosen.append(heappop(ready) % sources)
    return np.array(chosen, dtype=np.int32)


def _quotas_of(weights: Sequence[float]) -> list[int]:
    """The number of slots of each source, in lowest terms."""
    if sum(weight > 0 for weight in weights) > PRECISION:
        raise SettingsError(
            f"{len(weights)} sources: a mixture can have at most {PRECISION:,} with a weight above 0"
        )
    # Fractions, because floats could overflow in the sum and lose small weights next to large ones.
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    quotas = _as_small_fractions(shares) or _round_to_precision(shares)
    divisor = math.gcd(*quotas)
    return [quota // divisor for quota in quotas]


def _as_small_fractions(shares: list[Fraction]) -> list[int] | None:
    """The shares as simple fractions, 0.3 as 3/10, if one short cycle holds them all."""
    near = [share.limit_denominator(PRECISION) for share in shares]
    cycle = 1
    for fraction in near:
        cycle = math.lcm(cycle, fraction.denominator)
        if cycle > PRECISION:
            return None
    lost = any(share and not fraction for share, fraction in zip(shares, near, strict=True))
    return None if lost or sum(near) != 1 else [int(fraction * cycle) for fraction in near]


def _round_to_precision(shares: list[Fraction]) -> list[int]:
    """PRECISION slots, distributed by the largest remainders; every source with a share gets at least one."""
    wanted = [share * PRECISION for share in shares]
    quotas = [math.floor(want) for want in wanted]
    by_remainder = sorted(range(len(shares)), key=lambda source: (quotas[source] - wanted[source], source))
    for source in by_remainder[: PRECISION - sum(quotas)]:
        quotas[source] += 1
    too_small = [source for source, share in enumerate(shares) if share and not quotas[source]]
    if too_small:
        logger.warning(
            "weights of sources %s%s are too small for a mixture: source %d asks for %.3g of the rows and gets %.3g",
            ", ".join(map(str, too_small[:5])),
            f" and {len(too_small) - 5} more" if len(too_small) > 5 else "",
            too_small[0],
            shares[too_small[0]],
            1 / PRECISION,
        )
    for source in too_small:
        quotas[source] = 1
    _take_from_largest(quotas, len(too_small))
    return quotas


def _take_from_largest(quotas: list[int], slots: int) -> None:
    largest = [(-quota, source) for source, quota in enumerate(quotas)]
    heapify(largest)
    for _ in range(slots):
        quota, source = largest[0]
        heapreplace(largest, (quota + 1, source))
        quotas[source] -= 1


def checked_positions(positions: Any) -> NDArray[np.int64]:
    asked = np.asarray(positions, dtype=np.int64)
    if asked.size and asked.min() < 0:
        raise SettingsError(f"position {asked.min()}: must be at least 0")
    return asked


def is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def checked_weights(weights: Any) -> tuple[float, ...]:
    weights = weights.tolist() if isinstance(weights, np.ndarray) else weights
    is_list = isinstance(weights, Sequence) and not isinstance(weights, str | bytes)
    if not is_list or not weights:
        raise SettingsError(
            f"weights={weights!r}: must be a list of at least one weight, one for each source"
        )
    checked = tuple(_checked_weight(source, weight) for source, weight in enumerate(weights))
    if not any(checked):
        raise SettingsError(f"weights={str(weights)[:200]}: at least one source needs a weight above 0")
    return checked


def _checked_weight(source: int, weight: Any) -> float:
    weight = weight.item() if isinstance(weight, np.generic) else weight
    is_number = isinstance(weight, float) or is_whole(weight)
    # The comparison is also false for nan, and a whole number may be too large for a float.
    if not is_number or not 0 <= weight <= sys.float_info.max:
        raise SettingsError(f"weights[{source}]={str(weight)[:80]}: must be a finite number of at least 0")
    return float(weight)
