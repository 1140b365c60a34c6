"""Proof, on a user's own data, that a job can stop anywhere and go on elsewhere: every row once, in its place.

A trial walks through the stream as a job does that is stopped again and again. Ten rows an epoch:

    2 ranks, batches of 2      0 1 2 3           stop; the state says position 4
    3 ranks, batches of 1      4 5 6 | 7 8 9     stop; position 10, the end of the epoch
    1 rank,  batches of 3      10 11 12 | ...    the next epoch

What stands at each position is worked out once, as a run on one rank that is never stopped. A trial is right if the
batches of all ranks, step after step, lie end to end, with no row left out or repeated, and every row has the
content of its position. States go through JSON, and after every stop there are new Loaders.
"""

import dataclasses
import json
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.errors import SettingsError, StateError
from headrace.load.batch import Batch
from headrace.load.loader import Loader
from headrace.load.settings import LoaderSettings
from headrace.order.world import World
from headrace.rows.mix import Mixture
from headrace.rows.recipe import Recipe, make_recipe, open_data
from headrace.rows.rows import Rows
from headrace.rows.sample_rows import RecordRows

MOST_RANKS, MOST_WORKERS = 8, 4
DEFAULT_TRIALS = 5
_MOST_ROWS, _LEAST_ROWS = 20_000, 512
_BYTES_A_TRIAL, _BYTES_OF_UNKNOWN_ROW = 2**27, 2**16
_STRETCHES, _REFERENCE_BATCH = 5, 64
_HASHED = ("tokens", "labels", "segment_ids")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The first wrong row of a trial; trial 0 is the run that is never stopped."""

    trial: int
    position: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Proof:
    rows_per_epoch: int
    rows: int
    """Positions of the stream that every trial goes through."""
    stretches: tuple[tuple[int, int], ...]
    """Where they lie: first position, and the one after the last."""
    whole: bool
    """Whether those are all rows of a pass; else they are stretches of it."""
    trials: int
    stops: int
    """How often a job was stopped and went on, in all trials."""
    world_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    workers: tuple[int, ...]
    seconds: float
    problems: tuple[Problem, ...]

    @property
    def exact(self) -> bool:
        return not self.problems


def prove_resume(
    data: Any,
    settings: LoaderSettings,
    *,
    trials: int = DEFAULT_TRIALS,
    rows: int | None = None,
    seed: int = 0,
    progress: Callable[[], None] | None = None,
) -> Proof:
    """Stop and resume at random steps, on 1 to 8 ranks, with random batch sizes and numbers of workers.

    `rows` limits the work: a pass of more rows is checked in stretches of so many in all, among them its beginning, its
    end and the step into the next epoch. `progress` is called once for the reference and once for each trial.
    `drop_last` is taken as False, since rows that a run leaves out cannot be looked for.
    """
    for name, value in (("trials", trials), ("rows", 1 if rows is None else rows)):
        if value < 1:
            raise SettingsError(f"{name}={value}: must be at least 1")
    began = time.monotonic()
    data = data if isinstance(data, Mixture) else open_data(data)
    settings = dataclasses.replace(
        settings, drop_last=False, fields=settings.fields if settings.seq_len is None else _HASHED
    )
    recipe = make_recipe(data, settings)
    limit = _default_rows(recipe) if rows is None else rows
    stretches, whole = _choose_stretches(recipe.rows_per_epoch, settings.epochs or 1, limit, seed)
    step = progress or (lambda: None)
    references = [_Reference(recipe, first, last) for first, last in stretches]
    problems = list(_repeated_rows(recipe, stretches))
    step()
    legs: list[_Leg] = []
    for number in range(1, trials + 1):
        trial = _ResumeTrial(data, settings, np.random.default_rng([seed, number]))
        problems += trial.run(number, references)
        legs += trial.legs
        step()
    return Proof(
        rows_per_epoch=recipe.rows_per_epoch,
        rows=sum(last - first for first, last in stretches),
        stretches=tuple(stretches),
        whole=whole,
        trials=trials,
        stops=sum(leg.resumed for leg in legs),
        world_sizes=tuple(sorted({leg.world_size for leg in legs})),
        batch_sizes=tuple(sorted({leg.batch_size for leg in legs})),
        workers=tuple(sorted({leg.workers for leg in legs})),
        seconds=time.monotonic() - began,
        problems=tuple(problems),
    )


# Which positions are checked


def _default_rows(recipe: Recipe) -> int:
    """So many that a trial takes a second or so, whatever the size of a row."""
    source, size = recipe.sources[0], _BYTES_OF_UNKNOWN_ROW
    if recipe.settings.seq_len is not None:
        size = recipe.settings.seq_len * np.dtype(recipe.settings.dtype).itemsize
    elif isinstance(source, RecordRows):
        size = sum(table.elements * table.item_bytes for table in source.tables.values()) // source.rows
    return int(np.clip(_BYTES_A_TRIAL // max(size, 1), _LEAST_ROWS, _MOST_ROWS))


def _choose_stretches(
    rows_per_epoch: int, epochs: int, limit: int, seed: int
) -> tuple[list[tuple[int, int]], bool]:
    """The whole pass and some of the next one, if the limit allows, else stretches of it; and which of the two."""
    total = rows_per_epoch * epochs
    if total <= limit:
        return [(0, total + max(1, min(rows_per_epoch, limit // 8)))], True
    each = max(2, limit // _STRETCHES)
    half = each // 2
    # The first step into another epoch, and the one that ends the pass: the same, if that is one epoch.
    crossings = {rows_per_epoch, total}
    chosen = [(0, each), *((max(0, place - half), place + each - half) for place in crossings)]
    between = max(1, _STRETCHES - len(chosen))
    starts = np.sort(np.random.default_rng([seed, 0]).integers(0, max(1, total - each), between))
    chosen += [(start, start + each) for start in starts.tolist()]
    return _joined(sorted(chosen)), False


def _joined(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that overlap or touch as one."""
    joined = stretches[:1]
    for first, last in stretches[1:]:
        if first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


# What stands there


class _Reference:
    """The content of the rows of one stretch, as a run on one rank without a stop has them."""

    def __init__(self, recipe: Recipe, first: int, last: int) -> None:
        self.first, self.last, self.rows_per_epoch = first, last, recipe.rows_per_epoch
        rows = Rows(recipe, batch_size=_REFERENCE_BATCH)
        starts = range(first, last, _REFERENCE_BATCH)
        blocks = [np.arange(start, min(start + _REFERENCE_BATCH, last)) for start in starts]
        self.digests = np.concatenate([row_digests(rows(block), len(block)) for block in blocks])

    def check(self, position: int, digests: NDArray[np.uint64]) -> None:
        """Raise what is wrong with rows that were handed out as those from `position` on."""
        wrong = np.flatnonzero(digests != self.digests[position - self.first :][: len(digests)])
        if not len(wrong):
            return
        same = np.flatnonzero(self.digests == digests[wrong[0]])
        what = "its content was not that of the run without a stop"
        if len(same):
            what = f"it held what belongs to {self.place(int(same[0]) + self.first)}"
        raise _Wrong(position + int(wrong[0]), what)

    def place(self, position: int) -> str:
        return f"position {position:,} (epoch {position // self.rows_per_epoch:,})"


def row_digests(columns: Mapping[str, Any], rows: int) -> NDArray[np.uint64]:
    """A hash of each row of a batch, over all its fields."""
    digests = [0] * rows
    for name, column in columns.items():
        for row, content in enumerate(_row_contents(columns, name, column, rows)):
            digests[row] = xxhash.xxh3_64_intdigest(content, seed=digests[row])
    return np.array(digests, dtype=np.uint64)


def _row_contents(columns: Mapping[str, Any], name: str, column: Any, rows: int) -> Iterator[Any]:
    """What each row has in one column, as something to hash."""
    ends = columns.get(f"{name}_offsets")
    if isinstance(ends, np.ndarray) and len(ends) == rows + 1:
        column = [column[begin:end] for begin, end in pairwise(ends.tolist())]
    elif len(column) != rows:
        return  # the offsets themselves, which depend on the rows before
    elif isinstance(column, np.ndarray) and column.size:
        yield from np.ascontiguousarray(column).reshape(rows, -1).view(np.uint8)
        return
    for value in column:
        plain = value.tobytes() if isinstance(value, np.ndarray) else value
        yield plain if isinstance(plain, bytes) else pickle.dumps(plain)


def _repeated_rows(recipe: Recipe, stretches: list[tuple[int, int]]) -> Iterator[Problem]:
    """The run without a stop must itself have every row of a source's epoch once."""
    positions = np.concatenate([np.arange(first, last) for first, last in stretches])
    places = recipe.stream.at(positions)
    order = np.lexsort((positions, places.row, places.epoch, places.source))
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for column in (places.source, places.epoch, places.row):
        same &= np.diff(column[order]) == 0
    again = order[1:][same]
    if len(again):
        where = again[np.argmin(positions[again])]
        what = f"row {places.row[where]:,} of epoch {places.epoch[where]:,} stands at two positions"
        yield Problem(trial=0, position=int(positions[where]), what=what)


# Trials


class _Wrong(Exception):
    def __init__(self, position: int, what: str) -> None:
        super().__init__(what)
        self.position, self.what = position, what


@dataclass(frozen=True, kw_only=True)
class _Leg:
    """What a job does between two stops."""

    world_size: int
    batch_size: int
    workers: int
    prefetch: int
    steps: int
    resumed: bool

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks}, batches of {self.batch_size}, {self.workers} workers, prefetch {self.prefetch}"


class _ResumeTrial:
    """One walk through all stretches. `legs` are those it took."""

    def __init__(self, data: Any, settings: LoaderSettings, rng: np.random.Generator) -> None:
        self._settings, self._rng = settings, rng
        options: Any = {each.name: getattr(settings, each.name) for each in dataclasses.fields(settings)}
        self._loader = Loader(data, rank=0, world_size=1, **options)
        self.legs: list[_Leg] = []

    def run(self, number: int, references: list[_Reference]) -> Iterator[Problem]:
        for reference in references:
            try:
                self._walk(reference)
            except _Wrong as wrong:
                yield Problem(trial=number, position=wrong.position, what=self._story(reference, wrong))
                return

    def _story(self, reference: _Reference, wrong: _Wrong) -> str:
        before = f", before that {self.legs[-2]}" if self.legs[-1].resumed else ""
        return (
            f"{reference.place(wrong.position)}: {wrong.what}; the job had gone on at position {self._resumed_at:,} "
            f"with {self.legs[-1]}{before}"
        )

    def _walk(self, reference: _Reference) -> None:
        state: dict[str, Any] | None = None
        position = reference.first
        while position < reference.last:
            leg = self._choose(reference.last - position, reference.last - reference.first, state is not None)
            self.legs.append(leg)
            self._resumed_at = position
            loaders = self._start(leg, state, position)
            position = self._take(loaders, leg.steps, position, reference)
            state = _saved(loaders, position)

    def _choose(self, room: int, span: int, resumed: bool) -> _Leg:
        """Random, but never past the end of the stretch, and small enough for several stops in it."""
        rng = self._rng
        world = int(rng.integers(1, min(MOST_RANKS, room) + 1))
        most = max(1, min(2 * self._settings.batch_size, span // (4 * world), room // world))
        own = min(self._settings.batch_size, most)
        batch = own if rng.random() < 0.4 else int(rng.integers(1, most + 1))
        few = rng.random() < 0.25
        steps = int(rng.integers(0, 3) if few else rng.integers(1, max(2, span // (2 * world * batch))))
        return _Leg(
            world_size=world,
            batch_size=batch,
            workers=int(rng.integers(1, MOST_WORKERS + 1)),
            prefetch=int(rng.integers(0, 4)),
            steps=min(steps, room // (world * batch)),
            resumed=resumed,
        )

    def _start(self, leg: _Leg, state: dict[str, Any] | None, position: int) -> list[Loader]:
        """The Loaders of all ranks, at the state that was saved; the first of a stretch are put there."""
        changes = {name: getattr(leg, name) for name in ("batch_size", "workers", "prefetch")}
        settings = dataclasses.replace(self._settings, **changes)
        recipe = self._loader._recipe
        loaders = [self._another(settings, World(rank, leg.world_size)) for rank in range(leg.world_size)]
        if state is None and position:
            rows = recipe.rows_per_epoch * settings.epochs if settings.epochs else position + 1
            state = {**loaders[0].state_dict(), "position": position, "pass": position // rows}
        if state is not None:
            text = json.dumps(state)
            try:
                for loader in loaders:
                    loader.load_state_dict(json.loads(text))
            except StateError as error:
                raise _Wrong(position, f"the state that was saved before it is refused: {error}") from None
        return loaders

    def _take(self, loaders: list[Loader], steps: int, position: int, reference: _Reference) -> int:
        """So many steps on all ranks, checked; gives the position that comes next."""
        iterations: list[Any] = _begin(loaders, position)
        # A state of the very end of a pass has an empty rest, and then comes the next pass.
        taken, empty = 0, 0
        while taken < steps:
            found: list[Batch | None] = [next(iteration, None) for iteration in iterations]
            batches = [batch for batch in found if batch is not None]
            if len(batches) < len(found):
                if batches:
                    raise _Wrong(position, "some ranks had one more step than others")
                if empty == 2:
                    raise _Wrong(position, "the Loaders gave nothing, in three iterations")
                iterations, empty = _begin(loaders, position), empty + 1
                continue
            taken, empty = taken + 1, 0
            for rank, batch in enumerate(batches):
                position = _check_batch(batch, rank, position, reference)
        for iteration in iterations:
            iteration.close()
        return position

    def _another(self, settings: LoaderSettings, world: World) -> Loader:
        """A new Loader at the beginning. The plan of the rows takes longest to make: there is one a trial."""
        return self._loader.from_the_beginning(settings, world)


def _begin(loaders: list[Loader], position: int) -> list[Any]:
    if loaders[0].settings.epochs is not None and len({len(loader) for loader in loaders}) > 1:
        counts = ", ".join(str(len(loader)) for loader in loaders)
        raise _Wrong(position, f"ranks would take different numbers of steps: {counts}")
    return [iter(loader) for loader in loaders]


def _check_batch(batch: Batch, rank: int, position: int, reference: _Reference) -> int:
    """The batches of a step lie end to end, rank after rank; gives where this one ends."""
    first, rows = batch.info.position, batch.info.rows
    if not rows:
        return position
    if first > position:
        lost = f"it and the {first - position - 1:,} after it were" if first > position + 1 else "it was"
        raise _Wrong(position, f"{lost} never handed out: rank {rank} went on with position {first:,}")
    if first < position:
        raise _Wrong(first, f"it was handed out again, by rank {rank}, where position {position:,} was due")
    if first + rows > reference.last:
        raise _Wrong(reference.last, f"rank {rank} handed out {rows} rows where a batch has fewer")
    reference.check(first, row_digests(batch, rows))
    return position + rows


def _saved(loaders: list[Loader], position: int) -> dict[str, Any]:
    """The state that all ranks agree on."""
    states = [loader.state_dict() for loader in loaders]
    for rank, state in enumerate(states):
        if state != states[0]:
            raise _Wrong(position, f"rank {rank} saved another state than rank 0")
    if states[0]["position"] != position:
        raise _Wrong(position, f"it comes next, and the state that was saved says {states[0]['position']:,}")
    return states[0]
