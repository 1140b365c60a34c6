"""Which source a position of a mixture comes from, and which row of it: exact shares, in closed form.

Weights become whole numbers of slots in a short cycle, which repeats. The slots of a source are spread
evenly: cut the cycle into as many equal stretches as the source has slots, and put one slot into each. Weights of
0.5, 0.3 and 0.2 are 5, 3 and 2 slots of 10; the stretches of the second source end at 3.3, 6.7 and 10:

    position     0 1 2 3 4 5 6 7 8 9
    source       0 1 0 2 0 1 0 1 0 2      then the cycle repeats
    turn         0 0 1 0 2 1 3 2 4 1      how many slots of that source come before it in the cycle

At every position, take the slot whose stretch has begun and ends first: this meets every end ('Pfair' scheduling on
one machine). So after any t rows, a source with q of the Q slots has given t q / Q rows, to within less than one row.

Weights may change along the way. Each stage has its own cycle, every source continues where it was, and a source that
is behind its share gets its next rows earlier by that much.
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

_PARTS = 2**20
PRECISION = 65_536
"""The most slots in a cycle: weights that are not small fractions are rounded to 1/65,536."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Schedule:
    """One cycle of a mixture.

    `quotas` are the numbers of slots of the sources, in lowest terms. `source` is the source of each slot, and `turn`
    says how many slots of that source come before it in the cycle.
    """

    quotas: tuple[int, ...]
    source: NDArray[np.int32]
    turn: NDArray[np.int64]

    @staticmethod
    def from_weights(weights: Sequence[float], owed: Sequence[Fraction] | None = None) -> "Schedule":
        """Weights are any numbers of at least 0; only their ratios matter.

        `owed` is how many rows each source is behind its share (ahead of it, if negative) when the schedule begins: its
        slots come earlier (or later) by that much.
        """
        return Schedule._from_quotas(_quotas_of(_checked_weights(weights)), owed)

    @staticmethod
    def _from_quotas(quotas: Sequence[int], owed: Sequence[Fraction] | None = None) -> "Schedule":
        lags = [math.floor(each * _PARTS) for each in owed] if owed else [0] * len(quotas)
        source = _earliest_deadline_first(np.array(quotas, dtype=np.int64), np.array(lags, dtype=np.int64))
        by_source = np.argsort(source, kind="stable")
        turn = np.empty(len(source), dtype=np.int64)
        turn[by_source] = np.arange(len(source)) - np.repeat(np.cumsum(quotas) - quotas, quotas)
        source.setflags(write=False)
        turn.setflags(write=False)
        return Schedule(tuple(quotas), source, turn)

    @property
    def cycle(self) -> int:
        return len(self.source)

    def at(self, positions: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each position, and how many rows of that source come before it."""
        cycles, slots = np.divmod(_checked_positions(positions), self.cycle)
        sources = self.source[slots].astype(np.int64)
        return sources, cycles * self._quotas[sources] + self.turn[slots]

    def counts(self, positions: Any) -> NDArray[np.int64]:
        """How many rows of each source come before each position; the result has a last dimension of sources."""
        cycles, slots = np.divmod(_checked_positions(positions)[..., None], self.cycle)
        wanted = np.arange(len(self.quotas)) * self.cycle + slots
        return cycles * self._quotas + np.searchsorted(self._places, wanted) - self._starts

    def position_of(self, source: int, index: int) -> int:
        """The position of row `index` of a source with a share. Python integers make it exact for any size."""
        cycles, turn = divmod(index, self.quotas[source])
        slot = int(self._places[self._starts[source] + turn]) - source * self.cycle
        return cycles * self.cycle + slot

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


@dataclass(frozen=True, eq=False)
class Stages:
    """Weights that change at given positions; each source continues where it was.

    >>> stages = Stages.of([3, 1]).then(1000, [1, 1])
    >>> stages.counts(1002)
    array([751, 251])
    """

    starts: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    schedules: tuple[Schedule, ...]
    before: tuple[NDArray[np.int64], ...]
    """How many rows of each source come before each stage."""
    owed: tuple[tuple[Fraction, ...], ...]
    """How many rows each source is behind its share when a stage begins. The stage makes up for them: else a source
    with a small weight would never come if stages follow each other quickly."""

    @staticmethod
    def of(weights: Sequence[float]) -> "Stages":
        checked = _checked_weights(weights)
        nothing = np.zeros(len(checked), dtype=np.int64)
        nobody = (Fraction(0),) * len(checked)
        return Stages((0,), (checked,), (Schedule.from_weights(checked),), (nothing,), (nobody,))

    def then(self, position: int, weights: Sequence[float]) -> "Stages":
        """Other weights from `position` on; a stage that begins there is replaced."""
        if not _is_whole(position) or not self.starts[-1] <= position < 2**63:
            raise SettingsError(
                f"position={position!r}: must be a whole number of at least {self.starts[-1]}, "
                "where the last stage begins; add stages in the order of their positions"
            )
        checked = _checked_weights(weights)
        if len(checked) != self.sources:
            raise SettingsError(
                f"{len(checked)} weights at position {position}, but there are {self.sources} sources; give as many"
            )
        kept = len(self.starts) - (position == self.starts[-1])
        owed = self._owed_at(int(position))
        return Stages(
            (*self.starts[:kept], int(position)),
            (*self.weights[:kept], checked),
            (*self.schedules[:kept], Schedule.from_weights(checked, owed)),
            (*self.before[:kept], self.counts(int(position))),
            (*self.owed[:kept], owed),
        )

    def _owed_at(self, position: int) -> tuple[Fraction, ...]:
        """How many rows each source is behind its share at a position of the last stage."""
        schedule, length = self.schedules[-1], position - self.starts[-1]
        given = self.counts(position) - self.before[-1]
        return tuple(
            lag + Fraction(quota * length, schedule.cycle) - int(rows)
            for lag, quota, rows in zip(self.owed[-1], schedule.quotas, given, strict=True)
        )

    def until(self, position: int) -> "Stages":
        """Only the stages that begin before that position; the first one always stays."""
        kept = max(1, sum(start < position for start in self.starts))
        return Stages(
            self.starts[:kept],
            self.weights[:kept],
            self.schedules[:kept],
            self.before[:kept],
            self.owed[:kept],
        )

    @property
    def sources(self) -> int:
        return len(self.weights[0])

    def at(self, positions: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each position, and how many rows of that source come before it."""
        asked = _checked_positions(positions)
        stage = np.searchsorted(self.starts, asked, side="right") - 1
        sources, indices = np.empty_like(asked), np.empty_like(asked)
        for number in range(stage.min(initial=len(self.starts)), stage.max(initial=-1) + 1):
            here = stage == number
            found, index = self.schedules[number].at(asked[here] - self.starts[number])
            sources[here], indices[here] = found, self.before[number][found] + index
        return sources, indices

    def counts(self, position: int) -> NDArray[np.int64]:
        """How many rows of each source come before that position."""
        stage = int(np.searchsorted(self.starts, _checked_positions(position), side="right")) - 1
        return self.before[stage] + self.schedules[stage].counts(position - self.starts[stage])

    def rows_before_repeat(self, sizes: Sequence[int]) -> int:
        """The longest prefix in which no source of `sizes[source]` rows gives more rows than it has."""
        checked = self._checked_sizes(sizes)
        # Lazily, because a later stage is only reached if no source is used up before it.
        stops = (self._first_repeat(stage, checked) for stage in range(len(self.starts)))
        ends = (*self.starts[1:], math.inf)
        return next(stop for stop, end in zip(stops, ends, strict=True) if stop < end)

    def _first_repeat(self, stage: int, sizes: list[int]) -> int:
        """The first position at which a source would repeat a row, if the stage lasts long enough."""
        quotas = self.schedules[stage].quotas
        return min(
            self._position_of(stage, source, sizes[source]) for source in np.flatnonzero(quotas).tolist()
        )

    def rows_to_cover(self, sizes: Sequence[int]) -> int:
        """The shortest prefix in which each source that ever comes has given all of its `sizes[source]` rows."""
        return max(
            self._covered_at(source, size)
            for source, size in enumerate(self._checked_sizes(sizes))
            if any(schedule.quotas[source] for schedule in self.schedules)
        )

    def _covered_at(self, source: int, size: int) -> int:
        stage = max(number for number, before in enumerate(self.before) if before[source] < size)
        if not self.schedules[stage].quotas[source]:
            raise SettingsError(
                f"sizes[{source}]={size}: source {source} gives {self.before[stage][source]} rows before its weight "
                f"becomes 0 for good at position {self.starts[stage]}; give it a weight in the last stage"
            )
        return self._position_of(stage, source, size - 1) + 1

    def _position_of(self, stage: int, source: int, index: int) -> int:
        """The position of row `index` of a source, if the stage lasts long enough."""
        within = index - int(self.before[stage][source])
        return self.starts[stage] + self.schedules[stage].position_of(source, within)

    def _checked_sizes(self, sizes: Sequence[int]) -> list[int]:
        if len(sizes) != self.sources:
            raise SettingsError(
                f"{len(sizes)} sizes, but there are {self.sources} sources; give one for each"
            )
        for source, size in enumerate(sizes):
            if not _is_whole(size) or size < 1:
                raise SettingsError(f"sizes[{source}]={size!r}: must be a whole number of at least 1")
        return [int(size) for size in sizes]

    def to_json(self) -> list[list[Any]]:
        """`[[start, [weights...]], ...]`, with the rounded weights: whole numbers, which are short."""
        return [[start, list(each.quotas)] for start, each in zip(self.starts, self.schedules, strict=True)]

    @staticmethod
    def from_json(value: Any) -> "Stages":
        if not _is_list_of_pairs(value):
            raise SettingsError(f"stages {str(value)[:200]}: must be a list of [position, [weights]]")
        starts = [start for start, _ in value]
        are_whole = all(map(_is_whole, starts))
        if not are_whole or starts[0] != 0 or starts != sorted(set(starts)):
            raise SettingsError(
                f"stages begin at {str(starts)[:200]}: must be ascending whole numbers, starting with 0"
            )
        stages = Stages.of(value[0][1])
        for start, weights in value[1:]:
            stages = stages.then(start, weights)
        return stages


def _is_list_of_pairs(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(pair, list) and len(pair) == 2 for pair in value)


def _checked_positions(positions: Any) -> NDArray[np.int64]:
    asked = np.asarray(positions, dtype=np.int64)
    if asked.size and asked.min() < 0:
        raise SettingsError(f"position {asked.min()}: must be at least 0")
    return asked


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _checked_weights(weights: Any) -> tuple[float, ...]:
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
    is_number = isinstance(weight, float) or _is_whole(weight)
    # The comparison is also false for nan, and a whole number may be too large for a float.
    if not is_number or not 0 <= weight <= sys.float_info.max:
        raise SettingsError(f"weights[{source}]={str(weight)[:80]}: must be a finite number of at least 0")
    return float(weight)


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


def _earliest_deadline_first(quotas: NDArray[np.int64], lags: NDArray[np.int64]) -> NDArray[np.int32]:
    """The source of every slot: of the stretches that have begun, the one that ends first, then the lowest source.

    `lags` are in fractions of a row (1 / _PARTS); stretches begin and end earlier by that much.
    """
    cycle, sources = int(quotas.sum()), len(quotas)
    source = np.repeat(np.arange(sources), quotas)
    turn = np.arange(cycle) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    scale = quotas[source] * _PARTS
    release = (turn * _PARTS - lags[source]) * cycle // scale
    deadline = -(-((turn + 1) * _PARTS - lags[source]) * cycle // scale)
    # In a heap, one number for each stretch is faster than a pair.
    ranks = (deadline - deadline.min()) * sources + source
    by_release = np.argsort(release, kind="stable")
    begun_by = np.searchsorted(release[by_release], np.arange(cycle), side="right").tolist()
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
