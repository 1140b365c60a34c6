"""Units are fetched before batches need them, and kept until those batches are made.

Which rows come next is a function of the position, so the units that they lie in are known as well. When a batch is
made, the units of the next batches are looked up, as far ahead as `AHEAD_BYTES` of new units go, and asked for in the
order of their first use. A unit is let go of when its last known use is past.

The first batch does not wait for whole units: its own rows are read first, and only then everything around them. So are
those of the next few batches, for loops whose steps take a while. After that, waiting for units brings more batches a
second than hundreds of small requests for each.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset
from headrace.dataset.unit_part import UnitPart
from headrace.dataset.units import UnitSource
from headrace.fork_lock import fork_lock
from headrace.format.units import UNIT_BYTES
from headrace.order.shuffle import ShuffleKind
from headrace.order.steps import Steps
from headrace.rows.choices import is_remote
from headrace.rows.parts import PartTable
from headrace.rows.recipe import Make, Recipe
from headrace.rows.sample_rows import RecordRows

AHEAD_BYTES = 128 * 2**20
_ROWS_AT_ONCE = 1024
_MOST_ROWS_AHEAD = 2**20
_SINGLE_ROWS = 128
"""How many rows of the beginning are read by themselves, and in any case those of the first batch."""
_STEPS_KEPT = 64
"""Other threads may still be making batches before the latest one."""


@dataclass
class _Held:
    part: UnitPart
    last_step: int


@dataclass(frozen=True)
class _Source:
    """A remote dataset, and what is read of it."""

    number: int
    dataset: Dataset
    units: UnitSource
    units_of: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    tables: Sequence[PartTable]
    """Of the fields that are read."""


def fetching_ahead(make: Make, recipe: Recipe, steps: Steps) -> Make:
    """The same function, which also has the units of the next batches fetched, if some of the data is remote."""
    sources = list(_remote_sources(recipe))
    return _FetchingAhead(make, Lookahead(recipe, steps, sources)) if sources else make


def _remote_sources(recipe: Recipe) -> Any:
    if recipe.settings.shuffle.kind is ShuffleKind.GLOBAL:
        # Each row is in another unit, so only the rows themselves are read.
        return
    for number, (data, rows) in enumerate(zip(recipe.data, recipe.sources, strict=True)):
        units_of = getattr(rows, "units_of", None)
        if is_remote(data) and units_of is not None:
            tables = tuple(rows.tables.values()) if isinstance(rows, RecordRows) else (rows.table,)
            yield _Source(number, data, data.source, units_of, tables)


class Lookahead:
    def __init__(self, recipe: Recipe, steps: Steps, sources: list[_Source]) -> None:
        self._recipe, self._steps, self._sources = recipe, steps, sources
        self._held: dict[tuple[int, int], _Held] = {}
        self._coming: deque[int] = deque()
        """The steps that first need units that no batch has come to yet, in ascending order."""
        self._next_step = 0
        """The first step that was not looked at."""
        self._let_go_at = _STEPS_KEPT
        self._latest = -1
        self._advancing = fork_lock()
        self._waits = False
        self._at_once = max(1, _ROWS_AT_ONCE // steps.batch_size)
        weakref.finalize(self, _give_up, self._held)
        for table in self._tables():
            table.waits = False

    def making(self, step: int) -> None:
        """Before the batch of a step is made."""
        if not self._waits and step > 0 and step * self._steps.batch_size >= _SINGLE_ROWS:
            self._waits = True
            for table in self._tables():
                table.waits = True

    def made(self, step: int) -> None:
        """Look ahead, now that the batch of a step was made."""
        if not self._advancing.acquire(blocking=False):
            return
        try:
            self._latest = max(self._latest, step)
            self._next_step = max(self._next_step, step + 1)
            self._let_go()
            self._advance()
        finally:
            self._advancing.release()

    def _advance(self) -> None:
        # An epoch ahead, all units are known.
        rows = min(_MOST_ROWS_AHEAD, self._recipe.rows_per_epoch)
        most = self._latest + 1 + max(1, rows // self._steps.batch_size)
        if self._steps.count is not None:
            most = min(most, self._steps.count)
        while self._next_step < most and self._bytes_ahead() < AHEAD_BYTES:
            steps = range(self._next_step, min(self._next_step + self._at_once, most))
            self._look_at(steps)
            self._next_step = steps.stop

    def _bytes_ahead(self) -> int:
        """How much is held that the next batch does not come to yet."""
        while self._coming and self._coming[0] <= self._latest + 1:
            self._coming.popleft()
        return UNIT_BYTES * len(self._coming)

    def _look_at(self, steps: range) -> None:
        positions, sizes = self._steps.positions_of(steps)
        step_of = np.repeat(np.arange(steps.start, steps.stop), sizes)
        places = self._recipe.stream.at(positions)
        for source in self._sources:
            here = np.flatnonzero(places.source == source.number)
            units = source.units_of(places.row[here])
            self._hold(source, units, step_of[here])

    def _hold(self, source: _Source, units: NDArray[np.int64], steps: NDArray[np.int64]) -> None:
        """Keep the units of rows until the last of these steps, which ascend."""
        new: list[tuple[int, int, int]] = []
        for unit, first, last in _uses(units, steps):
            held = self._held.get((source.number, unit))
            if held is None:
                new.append((first, last, unit))
            else:
                held.last_step = last
        for first, last, unit in sorted(new):
            part = source.dataset.part(unit)
            if isinstance(part, UnitPart):
                self._held[source.number, unit] = _Held(part, last)
                self._coming.append(first)
                source.units.fetch_ahead([part], [table.field_name for table in source.tables])

    def _let_go(self) -> None:
        if self._latest < self._let_go_at:
            return
        self._let_go_at = self._latest + _STEPS_KEPT
        past = [key for key, held in self._held.items() if held.last_step < self._latest - _STEPS_KEPT]
        for key in past:
            self._held.pop(key).part.give_up()

    def _tables(self) -> Iterator[PartTable]:
        return (table for source in self._sources for table in source.tables)


def _uses(units: NDArray[np.int64], steps: NDArray[np.int64]) -> Iterable[tuple[int, int, int]]:
    """Each unit, and the first and the last step that needs it."""
    order = np.argsort(units, kind="stable")
    by_unit = units[order]
    begins = np.flatnonzero(np.concatenate([[True], by_unit[1:] != by_unit[:-1]])[: len(units)])
    ends = np.concatenate([begins[1:], [len(units)]])[: len(begins)]
    ordered = steps[order]
    return zip(by_unit[begins].tolist(), ordered[begins].tolist(), ordered[ends - 1].tolist(), strict=True)


def _give_up(held: dict[tuple[int, int], _Held]) -> None:
    for each in list(held.values()):
        each.part.give_up()


class _FetchingAhead:
    def __init__(self, make: Any, lookahead: Lookahead) -> None:
        self._make, self._lookahead = make, lookahead
        if hasattr(make, "many"):
            self.many = self._many
        if hasattr(make, "ahead"):
            self.ahead = make.ahead

    def __call__(self, step: int) -> dict[str, Any]:
        self._lookahead.making(step)
        made: dict[str, Any] = self._make(step)
        self._lookahead.made(step)
        return made

    def _many(self, steps: range) -> list[dict[str, Any]]:
        self._lookahead.making(steps.start)
        made: list[dict[str, Any]] = self._make.many(steps)
        self._lookahead.made(steps.stop - 1)
        return made
