"""Which source a position of a mixture comes from, and which row of it: exact shares, in closed form.

Each stage has weights, and a cycle of slots that repeats: see schedule.py. Weights may change along the way. Each stage
has its own cycle, every source continues where it was, and a source that is behind its share gets its next rows earlier
by that much.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.order.schedule import (
    LAG_PARTS,
    PRECISION,
    Schedule,
    checked_positions,
    checked_weights,
    is_whole,
)

_MOST_OWED = 64
"""A source is never this many rows away from its share; counts in a damaged state may be."""


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
        checked = checked_weights(weights)
        nothing = np.zeros(len(checked), dtype=np.int64)
        nobody = (Fraction(0),) * len(checked)
        return Stages((0,), (checked,), (Schedule.from_weights(checked),), (nothing,), (nobody,))

    def then(self, position: int, weights: Sequence[float], counts: Any = None) -> "Stages":
        """Other weights from `position` on; a stage that begins there is replaced.

        `counts` are how many rows of each source come before, if that is known: counting them may take a while.
        """
        if not is_whole(position) or not self.starts[-1] <= position < 2**63:
            raise SettingsError(
                f"position={position!r}: must be a whole number of at least {self.starts[-1]}, "
                "where the last stage begins; add stages in the order of their positions"
            )
        checked = checked_weights(weights)
        if len(checked) != self.sources:
            raise SettingsError(
                f"{len(checked)} weights at position {position}, but there are {self.sources} sources; give as many"
            )
        before = self.counts(int(position)) if counts is None else self._checked_counts(int(position), counts)
        kept = len(self.starts) - (position == self.starts[-1])
        owed = self._owed_at(int(position), before)
        return Stages(
            (*self.starts[:kept], int(position)),
            (*self.weights[:kept], checked),
            (*self._past_schedules(kept), Schedule.from_weights(checked, owed)),
            (*self.before[:kept], before),
            (*self.owed[:kept], owed),
        )

    def _past_schedules(self, stages: int) -> list[Schedule]:
        """Rows of past stages hardly ever come again, so their slots need not be kept."""
        return [schedule.without_slots() for schedule in self.schedules[:stages]]

    def _checked_counts(self, position: int, counts: Any) -> NDArray[np.int64]:
        """Counts from a state, if the weights may have led to them."""
        are_whole = isinstance(counts, list) and all(is_whole(each) for each in counts)
        if not are_whole or len(counts) != self.sources or sum(counts) != position:
            raise SettingsError(
                f"counts {str(counts)[:200]} at position {position}: must be {self.sources} whole numbers that add up "
                "to it"
            )
        before = np.array(counts, dtype=np.int64)
        owed = self._owed_at(position, before)
        if (before < self.before[-1]).any() or any(abs(each) > _MOST_OWED for each in owed):
            raise SettingsError(
                f"counts {str(counts)[:200]} at position {position}: the weights give other numbers of rows"
            )
        return before

    def _owed_at(self, position: int, counts: NDArray[np.int64]) -> tuple[Fraction, ...]:
        """How many rows each source is behind its share at a position of the last stage."""
        schedule, length = self.schedules[-1], position - self.starts[-1]
        given = counts - self.before[-1]
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
        asked = checked_positions(positions)
        stage = np.searchsorted(self.starts, asked, side="right") - 1
        if stage.min(initial=0) < 0:
            raise SettingsError(f"position {asked.min()}: these weights begin at position {self.starts[0]}")
        sources, indices = np.empty_like(asked), np.empty_like(asked)
        for number in range(stage.min(initial=len(self.starts)), stage.max(initial=-1) + 1):
            here = stage == number
            found, index = self.schedules[number].at(asked[here] - self.starts[number])
            sources[here], indices[here] = found, self.before[number][found] + index
        return sources, indices

    def counts(self, position: int) -> NDArray[np.int64]:
        """How many rows of each source come before that position."""
        stage = int(np.searchsorted(self.starts, checked_positions(position), side="right")) - 1
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
            if not is_whole(size) or size < 1:
                raise SettingsError(f"sizes[{source}]={size!r}: must be a whole number of at least 1")
        return [int(size) for size in sizes]

    def to_json(self) -> list[list[Any]]:
        """`[[start, [weights...]], ...]`, with the rounded weights: whole numbers, which are short."""
        return [[start, list(each.quotas)] for start, each in zip(self.starts, self.schedules, strict=True)]

    def to_json_with_counts(self) -> list[list[Any]]:
        """`[[start, [weights...], [rows before it...]], ...]`: reading it does not have to count rows."""
        counts = (before.tolist() for before in self.before)
        return [[*stage, before] for stage, before in zip(self.to_json(), counts, strict=True)]

    def part(self, first: int, end: int) -> list[list[Any]]:
        """All that the positions from `first` to `end` depend on, as JSON, however many stages there were before.

        `[[start, [slots of the sources in a cycle...], [rows before it...], [by how much slots come earlier...]], ...]`
        """
        begins = int(np.searchsorted(self.starts, first, side="right")) - 1
        ends = max(begins + 1, int(np.searchsorted(self.starts, end, side="left")))
        return [
            [self.starts[number], list(schedule.quotas), self.before[number].tolist(), list(schedule.lags)]
            for number, schedule in enumerate(self.schedules[begins:ends], begins)
        ]

    @staticmethod
    def from_part(value: Any) -> "Stages":
        """Stages that know the positions of a `part`, and none before it."""
        _check_part(value)
        starts, quotas, before, lags = zip(*value, strict=True)
        return Stages(
            starts,
            tuple(tuple(map(float, each)) for each in quotas),
            tuple(Schedule(tuple(each), tuple(lag)) for each, lag in zip(quotas, lags, strict=True)),
            tuple(np.array(each, dtype=np.int64) for each in before),
            tuple(tuple(Fraction(each, LAG_PARTS) for each in lag) for lag in lags),
        )

    @staticmethod
    def from_json(value: Any) -> "Stages":
        if not _is_list_of_stages(value):
            raise SettingsError(
                f"stages {str(value)[:200]}: must be a list of [position, [weights]] or [position, [weights], [counts]]"
            )
        starts = [stage[0] for stage in value]
        are_whole = all(map(is_whole, starts))
        if not are_whole or starts[0] != 0 or starts != sorted(set(starts)):
            raise SettingsError(
                f"stages begin at {str(starts)[:200]}: must be ascending whole numbers, starting with 0"
            )
        stages = Stages.of(value[0][1])
        for stage in value:
            stages = stages.then(*stage)
        return stages


def _is_list_of_stages(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(stage, list) and len(stage) in (2, 3) for stage in value)


def _check_part(value: Any) -> None:
    """A SettingsError unless positions can be worked out with it."""
    if not isinstance(value, list) or not value or not all(map(_is_part_of_a_stage, value)):
        raise SettingsError(
            f"weights {str(value)[:200]}: must be a list of [position, [slots], [rows before it], [lags]]"
        )
    starts = [stage[0] for stage in value]
    sources = {len(listed) for stage in value for listed in stage[1:]}
    if starts != sorted(set(starts)) or len(sources) != 1:
        raise SettingsError(
            f"weights that begin at {str(starts)[:200]}: must ascend, and have the same sources"
        )


def _is_part_of_a_stage(stage: Any) -> bool:
    if not isinstance(stage, list) or len(stage) != 4:
        return False
    start, quotas, before, lags = stage
    if not all(isinstance(listed, list) and all(map(is_whole, listed)) for listed in ([start], *stage[1:])):
        return False
    are_slots = min(quotas, default=-1) >= 0 and 1 <= sum(quotas) <= PRECISION
    has_counts = min(before, default=-1) >= 0 and sum(before) == start < 2**62
    return are_slots and has_counts and all(abs(lag) <= _MOST_OWED * LAG_PARTS for lag in lags)
