"""Proof, on a user's own data, that a job can stop anywhere and resume elsewhere: every row once, in its place.

A trial walks through the stream like a job that is stopped again and again. With ten rows per epoch:

    2 ranks, batches of 2      0 1 2 3           stop; the state says position 4
    3 ranks, batches of 1      4 5 6 | 7 8 9     stop; position 10, the end of the epoch
    1 rank,  batches of 3      10 11 12 | ...    the next epoch

The row at each position is worked out once, by a run on one rank that is never stopped. A trial is right if the
batches of all ranks, step after step, lie end to end, with no row left out or repeated, and every row has the
content of its position. States are passed on as JSON, and after every stop there are new Loaders.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import SettingsError
from headrace.load.settings import LoaderSettings
from headrace.measure.proving.reference import Problem, Reference, repeated_rows
from headrace.measure.proving.stretches import choose_stretches, default_rows
from headrace.measure.proving.trial import Leg, ResumeTrial
from headrace.rows.mix import Mixture
from headrace.rows.recipe import make_recipe, open_data

DEFAULT_TRIALS = 5
_HASHED = ("tokens", "labels", "segment_ids")


@dataclass(frozen=True, kw_only=True)
class Proof:
    rows_per_epoch: int
    rows: int
    """How many positions of the stream each trial covers."""
    stretches: tuple[tuple[int, int], ...]
    """Where they are: the first position, and the one after the last."""
    whole: bool
    """Whether they are all rows of a pass; otherwise they are stretches of it."""
    trials: int
    stops: int
    """How often a job was stopped and resumed, over all trials."""
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

    `rows` limits the work: a longer pass is checked in stretches with about this many rows in total, among them its
    beginning, its end and the step into the next epoch. `progress` is called once for the reference and once
    for each trial. `drop_last` is set to False, since rows that a run leaves out cannot be checked.
    """
    _check_at_least_one("trials", trials)
    _check_at_least_one("rows", rows)
    began = time.monotonic()
    advance = progress or _no_progress
    data = data if isinstance(data, Mixture) else open_data(data)
    settings = _checkable(settings)
    recipe = make_recipe(data, settings)
    limit = default_rows(recipe) if rows is None else rows
    stretches, whole = choose_stretches(recipe.rows_per_epoch, settings.epochs or 1, limit, seed)
    references = [Reference(recipe, first, last) for first, last in stretches]
    problems = list(repeated_rows(recipe, stretches))
    advance()
    legs: list[Leg] = []
    for number in range(1, trials + 1):
        trial = ResumeTrial(data, settings, np.random.default_rng([seed, number]))
        problems += trial.run(number, references)
        legs += trial.legs
        advance()
    return Proof(
        rows_per_epoch=recipe.rows_per_epoch,
        rows=sum(last - first for first, last in stretches),
        stretches=tuple(stretches),
        whole=whole,
        trials=trials,
        stops=sum(leg.resumed for leg in legs),
        world_sizes=_distinct(legs, "world_size"),
        batch_sizes=_distinct(legs, "batch_size"),
        workers=_distinct(legs, "workers"),
        seconds=time.monotonic() - began,
        problems=tuple(problems),
    )


def _check_at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise SettingsError(f"{name}={value}: must be at least 1")


def _no_progress() -> None:
    pass


def _checkable(settings: LoaderSettings) -> LoaderSettings:
    """The same settings without dropped rows, and with the fields that tell rows of tokens apart."""
    fields = settings.fields if settings.seq_len is None else _HASHED
    return dataclasses.replace(settings, drop_last=False, fields=fields)


def _distinct(legs: Sequence[Leg], name: str) -> tuple[int, ...]:
    """The values that an attribute had in any of the legs, in ascending order."""
    return tuple(sorted({getattr(leg, name) for leg in legs}))
