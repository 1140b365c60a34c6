"""One trial of a proof: a job that walks through the stream and is stopped and resumed again and again."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from headrace.errors import StateError
from headrace.load.batch import Batch
from headrace.load.loader import Loader
from headrace.load.settings import LoaderSettings
from headrace.measure.proving.reference import Problem, Reference, WrongRow, row_digests
from headrace.order.world import World

MOST_RANKS, MOST_WORKERS = 8, 4


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What a job does between two stops."""

    world_size: int
    batch_size: int
    workers: int
    prefetch: int
    steps: int
    resumed: bool

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{ranks}, batches of {self.batch_size}, {workers}, prefetch {self.prefetch}"


class ResumeTrial:
    """One walk through all stretches. `legs` lists the legs that it took."""

    def __init__(self, data: Any, settings: LoaderSettings, rng: np.random.Generator) -> None:
        self._settings, self._rng = settings, rng
        options: Any = {each.name: getattr(settings, each.name) for each in dataclasses.fields(settings)}
        self._loader = Loader(data, rank=0, world_size=1, **options)
        self.legs: list[Leg] = []

    def run(self, number: int, references: list[Reference]) -> Iterator[Problem]:
        for reference in references:
            try:
                self._walk(reference)
            except WrongRow as wrong:
                yield Problem(trial=number, position=wrong.position, what=self._story(reference, wrong))
                return

    def _story(self, reference: Reference, wrong: WrongRow) -> str:
        before = f", and before that with {self.legs[-2]}" if self.legs[-1].resumed else ""
        return (
            f"{reference.place(wrong.position)}: {wrong.what}; the job had continued at position {self._resumed_at:,} "
            f"with {self.legs[-1]}{before}"
        )

    def _walk(self, reference: Reference) -> None:
        state: dict[str, Any] | None = None
        position = reference.first
        while position < reference.last:
            leg = self._choose(reference.last - position, reference.last - reference.first, state is not None)
            self.legs.append(leg)
            self._resumed_at = position
            loaders = self._start(leg, state, position)
            position = self._take(loaders, leg.steps, position, reference)
            state = _saved(loaders, position)

    def _choose(self, room: int, span: int, resumed: bool) -> Leg:
        """A random leg that ends within the stretch, and is short enough for several stops in it."""
        rng = self._rng
        world = int(rng.integers(1, min(MOST_RANKS, room) + 1))
        most = max(1, min(2 * self._settings.batch_size, span // (4 * world), room // world))
        own = min(self._settings.batch_size, most)
        batch = own if rng.random() < 0.4 else int(rng.integers(1, most + 1))
        few = rng.random() < 0.25
        steps = int(rng.integers(0, 3) if few else rng.integers(1, max(2, span // (2 * world * batch))))
        return Leg(
            world_size=world,
            batch_size=batch,
            workers=int(rng.integers(1, MOST_WORKERS + 1)),
            prefetch=int(rng.integers(0, 4)),
            steps=min(steps, room // (world * batch)),
            resumed=resumed,
        )

    def _start(self, leg: Leg, state: dict[str, Any] | None, position: int) -> list[Loader]:
        """The Loaders of all ranks, at the saved state, or at the beginning of a stretch if there is none."""
        changes = {name: getattr(leg, name) for name in ("batch_size", "workers", "prefetch")}
        settings = dataclasses.replace(self._settings, **changes)
        loaders = [self._another(settings, World(rank, leg.world_size)) for rank in range(leg.world_size)]
        if state is None and position:
            state = {**loaders[0].state_dict(), "position": position}
        if state is not None:
            text = json.dumps(state)
            try:
                for loader in loaders:
                    loader.load_state_dict(json.loads(text))
            except StateError as error:
                raise WrongRow(position, f"the saved state was refused: {error}") from None
        return loaders

    def _take(self, loaders: list[Loader], steps: int, position: int, reference: Reference) -> int:
        """Take and check `steps` steps on all ranks, and return the position that comes next."""
        iterations: list[Any] = _begin(loaders, position)
        # After a state from the very end of a pass, nothing is left of it; then the next pass begins.
        taken, empty = 0, 0
        while taken < steps:
            found: list[Batch | None] = [next(iteration, None) for iteration in iterations]
            batches = [batch for batch in found if batch is not None]
            if len(batches) < len(found):
                if batches:
                    raise WrongRow(position, "some ranks had one more step than others")
                if empty == 2:
                    raise WrongRow(position, "the Loaders returned no batch in three iterations")
                iterations, empty = _begin(loaders, position), empty + 1
                continue
            taken, empty = taken + 1, 0
            position = _check_step(batches, position, reference)
        for iteration in iterations:
            iteration.close()
        return position

    def _another(self, settings: LoaderSettings, world: World) -> Loader:
        """A new Loader at the beginning. Planning the rows takes longest, so a trial does that once."""
        return self._loader.from_the_beginning(settings, world)


def _begin(loaders: list[Loader], position: int) -> list[Any]:
    if loaders[0].settings.epochs is not None and len({len(loader) for loader in loaders}) > 1:
        counts = ", ".join(str(len(loader)) for loader in loaders)
        raise WrongRow(position, f"ranks would take different numbers of steps: {counts}")
    return [iter(loader) for loader in loaders]


def _check_step(batches: list[Batch], position: int, reference: Reference) -> int:
    """The rows of a step, of all ranks together, must be those that come next; returns the position after them."""
    taken = [batch.info.positions for batch in batches]
    ranks = np.repeat(np.arange(len(taken)), [len(each) for each in taken])
    in_order = np.argsort(np.concatenate(taken), kind="stable")
    found, ranks = np.concatenate(taken)[in_order], ranks[in_order]
    due = position + np.arange(len(found))
    for wrong in np.flatnonzero(found != due)[:1].tolist():
        _tell_apart(int(found[wrong]), int(due[wrong]), int(ranks[wrong]))
    if len(due) and due[-1] >= reference.last:
        rank = int(ranks[reference.last - position])
        rows = batches[rank].info.rows
        raise WrongRow(reference.last, f"rank {rank} handed out {rows} rows, more than its batch should have")
    for positions, batch in zip(taken, batches, strict=True):
        reference.check(positions, row_digests(batch, len(positions)))
    return position + len(found)


def _tell_apart(found: int, due: int, rank: int) -> NoReturn:
    """Raise an error for a position that was handed out when another one was due."""
    if found > due:
        lost = f"it and the {found - due - 1:,} after it were" if found > due + 1 else "it was"
        raise WrongRow(due, f"{lost} never handed out: rank {rank} continued with position {found:,}")
    raise WrongRow(found, f"it was handed out again by rank {rank}, when position {due:,} was due")


def _saved(loaders: list[Loader], position: int) -> dict[str, Any]:
    """The saved state, on which all ranks must agree."""
    states = [loader.state_dict() for loader in loaders]
    for rank, state in enumerate(states):
        if state != states[0]:
            raise WrongRow(position, f"rank {rank} saved a different state from rank 0")
    if states[0]["position"] != position:
        raise WrongRow(position, f"it comes next, but the saved state says {states[0]['position']:,}")
    return states[0]
