"""Batches of token rows: find where the tokens lie, for many batches at once, then copy them, batch by batch.

Planning is NumPy over thousands of documents, so one call for several batches costs little more than for one. The
first call plans a single batch, so that it is ready soon, and later calls plan more and more.
"""

import itertools
import threading
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.observe.counting import counted_as, now, spent
from headrace.order.distinct import distinct
from headrace.order.steps import Steps
from headrace.order.stream import RowStream
from headrace.rows.buffers import BufferPool, Spec
from headrace.rows.fields import Fields, UsedFields
from headrace.rows.kernel import loops
from headrace.rows.settings import TOKEN_FIELDS, CuSeqlens, Labels, RowSettings
from headrace.rows.token_rows import Stretches, TokenRows

_ROWS_PLANNED_AT_ONCE = 4096
_BATCHES_PLANNED_AT_ONCE = 128
_STRETCHES_PLANNED_AT_ONCE = 2**14
_BOUNDS = ("cu_seqlens", "max_seqlen")


class BatchPlan(NamedTuple):
    """Stretches `begin` to `end` make up the `rows` rows of the batch, which are numbered from `first_row` on."""

    stretches: Stretches
    begin: int
    end: int
    first_row: int
    rows: int


class Planner:
    """Plans any batch. Threads may share it: while some copy tokens, another plans the next batches."""

    def __init__(self, stream: RowStream, sources: list[TokenRows], steps: Steps) -> None:
        self._stream, self._sources, self._steps = stream, sources, steps
        self._changed = threading.Condition()
        self._planned: dict[int, BatchPlan] = {}
        self._underway = range(0)
        self._allowed = max(1, min(_ROWS_PLANNED_AT_ONCE // steps.batch_size, _BATCHES_PLANNED_AT_ONCE))
        self._most = self._allowed
        self._next = range(1)
        self._asked = 0

    def batch(self, step: int) -> BatchPlan:
        return self.batches(range(step, step + 1))[0]

    def batches(self, steps: range) -> list[BatchPlan]:
        """The plans of several batches, under one lock if they all exist already, as they mostly do."""
        with self._changed:
            self._asked = max(self._asked, steps.stop - 1)
            found = [self._planned.get(step) for step in steps]
        return [self._due(step) if plan is None else plan for step, plan in zip(steps, found, strict=True)]

    def _due(self, step: int) -> BatchPlan:
        with self._changed:
            while step in self._underway:
                self._changed.wait()
            if step in self._planned:
                return self._planned[step]
            if self._underway:
                # Another thread is far ahead, or this one goes back: plan only this batch.
                stretch = range(step, step + 1)
            else:
                stretch = self._begin(step)
        try:
            return self._plan(stretch)[step]
        except Exception:
            if len(stretch) == 1:
                raise
            # Perhaps only a later batch is damaged; its error belongs to its own turn.
            return self._plan(range(step, step + 1))[step]

    def ahead(self) -> None:
        """Plan the next batches, unless that is done or another thread is doing it."""
        with self._changed:
            is_far = self._next.start - self._asked > 2 * self._most
            if self._underway or is_far or not self._planned or self._is_hurried():
                return
            stretch = self._begin(self._next.start)
        if stretch:
            self._plan(stretch)

    def _begin(self, first: int) -> range:
        """Mark the next batches as being planned, more each time, up to `_most`."""
        count = self._steps.count
        last = first + (1 if self._is_hurried() else len(self._next))
        self._underway = range(first, last if count is None else max(first, min(last, count)))
        self._next = range(last, last + min(2 * len(self._next), self._most))
        return self._underway

    def _is_hurried(self) -> bool:
        """Whether batches beyond the one that is due now had better be planned later."""
        return any(not source.table.waits for source in self._sources)

    def _plan(self, steps: range) -> dict[int, BatchPlan]:
        plans: dict[int, BatchPlan] = {}
        try:
            with counted_as("plan"):
                plans = self._plans(steps)
        finally:
            with self._changed:
                self._planned |= plans
                # A slower thread may still need those just before the latest one that was asked for.
                for old in [step for step in self._planned if step < self._asked - self._allowed]:
                    del self._planned[old]
                if steps == self._underway:
                    self._underway = range(0)
                self._changed.notify_all()
        return plans

    def _plans(self, steps: range) -> dict[int, BatchPlan]:
        positions, sizes = self._steps.positions_of(steps)
        whole = stretches_at(self._stream, self._sources, positions)
        # As many batches at once as keep the intermediate arrays in the processor's cache.
        enough = _STRETCHES_PLANNED_AT_ONCE * len(steps) // max(1, len(whole.row))
        self._most = max(1, min(enough, self._allowed))
        ends = np.searchsorted(whole.row, np.cumsum(sizes)).tolist()
        plans, begin, row = {}, 0, 0
        for step, end, size in zip(steps, ends, sizes.tolist(), strict=True):
            plans[step] = BatchPlan(whole, begin, end, row, size)
            begin, row = end, row + size
        return plans


def stretches_at(stream: RowStream, sources: list[TokenRows], positions: NDArray[np.int64]) -> Stretches:
    """The stretches of the rows at these positions of the stream."""
    places = stream.at(positions)
    keys = stream.remix_keys(places)
    parts = []
    for number in distinct(places.source):
        where = np.flatnonzero(places.source == number)
        part = sources[number].stretches(places.row[where], None if keys is None else keys[where])
        parts.append(part if len(where) == len(positions) else part.in_rows(where))
    return Stretches.join(parts) if parts else Stretches.none()


class TokenBatches:
    """Makes the arrays of one or more batches: fields that are in use at once, others on first access."""

    def __init__(
        self, planner: Planner, settings: RowSettings, pool: BufferPool, used: UsedFields | None = None
    ) -> None:
        self._planner, self._rows = planner, RowFiller(settings, pool)
        self._used = used or UsedFields(settings.token_fields, ahead=settings.token_fields)

    def __call__(self, step: int) -> dict[str, Any]:
        return self._fill([self._planner.batch(step)])[0]

    def many(self, steps: range) -> list[dict[str, Any]]:
        """Several batches; those that were planned together are copied together."""
        plans = self._planner.batches(steps)
        batches: list[dict[str, Any]] = []
        for _, group in itertools.groupby(plans, key=lambda plan: (id(plan.stretches), plan.rows)):
            batches += self._fill(list(group))
        return batches

    def _fill(self, plans: list[BatchPlan]) -> list[dict[str, Any]]:
        batches = self._rows.fill(plans, self._used.ahead)
        return [
            Fields(self._used.names, partial(self._make_late, plan), made)
            for plan, made in zip(plans, batches, strict=True)
        ]

    def _make_late(self, plan: BatchPlan, name: str) -> Any:
        """Make a field that was not in use when the batch was made."""
        self._used.add(name)
        return self._rows.fill([plan], frozenset({name}))[0][name]

    def ahead(self) -> None:
        """Do work that can be done before the next batch is asked for."""
        self._planner.ahead()


class RowFiller:
    """Copies planned stretches into rows, and fills the other fields."""

    def __init__(self, settings: RowSettings, pool: BufferPool) -> None:
        self._settings, self._pool = settings, pool
        self._shapes: dict[tuple[int, frozenset[str]], tuple[Spec, ...]] = {}

    def rows_of(self, stretches: Stretches, rows: int) -> dict[str, Any]:
        """The arrays of rows that were not planned as a batch, with all fields of the settings."""
        plan = BatchPlan(stretches, 0, len(stretches.row), 0, rows)
        return self.fill([plan], frozenset(self._settings.token_fields))[0]

    def fill(self, plans: list[BatchPlan], names: frozenset[str]) -> list[dict[str, Any]]:
        """These fields, of consecutive batches of one plan that have the same number of rows."""
        rows, each = sum(plan.rows for plan in plans), plans[0].rows
        arrays = self._arrays(rows, names)
        begun = now()
        room = plans[-1].end - plans[0].begin + rows + 1
        bounds = np.empty(room, dtype=np.int32) if not names.isdisjoint(_BOUNDS) else None
        try:
            count, longest = self._copy(plans, rows, arrays, bounds)
        except OverflowError as error:
            raise SettingsError(f"dtype={self._settings.dtype!r}: {error}; use dtype='int64'") from None
        batches = [arrays]
        if len(plans) > 1:
            cuts = range(0, rows, each)
            batches = [{name: array[cut : cut + each] for name, array in arrays.items()} for cut in cuts]
        if bounds is not None:
            self._add_bounds(batches, names, bounds[:count], each, longest)
        spent("gather", begun)
        return batches

    def _arrays(self, rows: int, names: frozenset[str]) -> dict[str, Any]:
        """Uninitialised arrays for these fields of so many rows."""
        specs = self._shapes.get((rows, names))
        if specs is None:
            specs = self._shapes[rows, names] = self._specs(rows, self._settings.seq_len or 0, names)
        return self._pool.arrays(specs) if specs else {}

    def _copy(
        self, plans: list[BatchPlan], rows: int, arrays: dict[str, Any], bounds: NDArray[np.int32] | None
    ) -> tuple[int, int]:
        """Copy the tokens. Returns the number of bounds, and the longest distance between two of them."""
        settings, stretches = self._settings, plans[0].stretches
        done: tuple[int, int] = loops.fill(
            rows,
            settings.seq_len,
            plans[0].first_row,
            plans[0].begin,
            plans[-1].end,
            stretches.row,
            stretches.length,
            stretches.address,
            stretches.type,
            stretches.more,
            settings.labels is Labels.SHIFTED,
            settings.pad_id,
            settings.ignore_index,
            arrays.get("tokens"),
            arrays.get("labels"),
            arrays.get("position_ids"),
            arrays.get("segment_ids"),
            arrays.get("loss_mask"),
            bounds,
        )
        return done

    def _add_bounds(
        self,
        batches: list[dict[str, Any]],
        names: frozenset[str],
        bounds: NDArray[np.int32],
        rows: int,
        longest: int,
    ) -> None:
        seq_len = self._settings.seq_len or 0
        places = rows * seq_len
        ends = np.searchsorted(bounds, np.arange(len(batches) + 1) * places).tolist()
        for number, batch in enumerate(batches):
            own = bounds[ends[number] : ends[number + 1] + 1]
            if number:
                own = own - np.int32(number * places)
            if "cu_seqlens" in names:
                batch["cu_seqlens"] = self._cu_seqlens(own, rows, seq_len)
            if "max_seqlen" in names:
                batch["max_seqlen"] = longest if len(batches) == 1 else int(np.diff(own).max(initial=0))

    def _specs(self, rows: int, seq_len: int, names: frozenset[str]) -> tuple[Spec, ...]:
        dtypes = {"segment_ids": "int32", "loss_mask": "bool"}
        return tuple(
            (name, dtypes.get(name, self._settings.dtype), (rows, seq_len))
            for name in TOKEN_FIELDS
            if name in names and name not in _BOUNDS
        )

    def _cu_seqlens(self, bounds: NDArray[np.int32], rows: int, seq_len: int) -> NDArray[np.int32]:
        most = self._settings.max_documents
        if self._settings.cu_seqlens is CuSeqlens.BATCH:
            return bounds if most is None else _padded(bounds[None], [len(bounds)], most)[0]
        ends = np.searchsorted(bounds, np.arange(rows + 1) * seq_len)
        counts = np.diff(ends) + 1
        width = int(counts.max(initial=1)) if most is None else most + 1
        columns = ends[:-1, None] + np.arange(int(counts.max(initial=1)))
        starts = (np.arange(rows) * seq_len)[:, None]
        each = np.minimum(bounds[np.minimum(columns, len(bounds) - 1)] - starts, seq_len).astype(np.int32)
        return _padded(each, counts.tolist(), width - 1)


def _padded(bounds: NDArray[np.int32], counts: list[int], documents: int) -> NDArray[np.int32]:
    """Bounds with room for this many documents: the rest repeats the end, as sequences of length 0."""
    most = max(counts, default=1) - 1
    if most > documents:
        raise SettingsError(
            f"max_documents={documents}: a batch has {most} segments (documents and padding); "
            "give a larger max_documents"
        )
    out = np.empty((len(bounds), documents + 1), dtype=np.int32)
    out[:, : bounds.shape[1]] = bounds[:, : documents + 1]
    out[:, bounds.shape[1] :] = bounds[:, -1:]
    return out
