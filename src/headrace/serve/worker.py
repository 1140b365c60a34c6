"""A worker process of a server: it makes the Loader, and then the rows that it is asked for.

Each worker makes the Loader itself, so nothing but names and settings, or a pickled Loader, comes to it. Several
threads may work in it, for functions that wait more than they compute.

    server                                   worker
    start, what to serve                ->
                                        <-   ready, description
    task 3, free segments, rows         ->
                                        <-   done 3, where the body is, spent; head; body, if it is small
"""

import json
import pickle
import sys
import threading
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from multiprocessing.spawn import prepare
from typing import Any, NoReturn

import msgspec
import numpy as np

from headrace.errors import HeadraceError, StageError
from headrace.load.loader import Loader
from headrace.load.lookahead import fetching_ahead
from headrace.load.target import make_loader
from headrace.observe.counting import Counters, working_for
from headrace.order.mixture import Stages
from headrace.order.steps import Steps
from headrace.order.world import World
from headrace.rows.buffers import BufferPool
from headrace.rows.choices import is_remote
from headrace.rows.fields import UsedFields
from headrace.rows.recipe import Make, Recipe
from headrace.serve.description import describe, encode
from headrace.serve.messages import Path, Rows
from headrace.serve.packed import Packed, pack
from headrace.serve.segments import INLINE_BYTES, WorkerSegments
from headrace.workers import wire
from headrace.workers.crew_worker import import_script, trace_of
from headrace.workers.worker import Link, attach, flush_output

CODEC = wire.Codec(msgspec.msgpack.encode, msgspec.msgpack.decode)
"""For heads, which are plain data."""
SERVING_VARIABLE = "HEADRACE_SERVING"
"""Set in worker processes of servers."""
_PATHS_KEPT = 8


@dataclass(frozen=True)
class Served:
    """What a server serves: a name with settings (`load/target.py`), or a Loader of its own program."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    loader: Loader | None = None

    def make(self) -> Loader:
        return make_loader(self.name, self.settings) if self.loader is None else self.loader


class Task(msgspec.Struct, frozen=True, array_like=True):
    """What a worker is asked for."""

    rows: Rows
    fields: tuple[str, ...] | None
    stages: bytes | None


class Evaluator:
    """The rows of a Loader, for any of its positions, fields and weights."""

    def __init__(self, loader: Loader, threads: int) -> None:
        self._recipe, self._settings = loader.rows.recipe, loader.settings
        self._fetches_ahead = any(map(is_remote, self._recipe.data))
        self._pool = BufferPool(keep=2 * threads + 2)
        self._variant = lru_cache(maxsize=16)(self._make_variant)
        self._maker = lru_cache(maxsize=_PATHS_KEPT)(self._make_maker)

    def __call__(self, task: Task) -> dict[str, Any]:
        path = task.rows.path
        if path is None:
            positions = np.array(task.rows.positions or (), dtype=np.int64)
            return self._variant(task.fields, task.stages).evaluate(positions, self._pool)
        if self._fetches_ahead:
            # The units of the next batches are fetched before those are asked for.
            return dict(self._maker(path, task.fields, task.stages)(task.rows.step))
        recipe = self._variant(task.fields, task.stages)
        return recipe.evaluate(self._steps(recipe, path).positions(task.rows.step), self._pool)

    def _make_variant(self, fields: tuple[str, ...] | None, stages: bytes | None) -> Recipe:
        return variant_of(self._recipe, fields, stages)

    def _make_maker(self, path: Path, fields: tuple[str, ...] | None, stages: bytes | None) -> Make:
        recipe = self._variant(fields, stages)
        steps = self._steps(recipe, path)
        used = UsedFields(recipe.settings.token_fields, ahead=recipe.settings.token_fields)
        return fetching_ahead(recipe.maker(steps, self._pool, used), recipe, steps)

    def _steps(self, recipe: Recipe, path: Path) -> Steps:
        return steps_of(recipe, path, self._settings.batch_size, self._settings.drop_last)


def variant_of(recipe: Recipe, fields: tuple[str, ...] | None, stages: bytes | None) -> Recipe:
    """The same recipe with fewer fields of token rows, and with other weights."""
    changes: dict[str, Any] = {}
    if fields is not None:
        changes["settings"] = replace(recipe.settings, fields=fields)
    if stages is not None:
        changes["stages"] = Stages.from_part(json.loads(stages))
    return recipe.changed(**changes) if changes else recipe


def steps_of(recipe: Recipe, path: Path, batch_size: int, drop_last: bool) -> Steps:
    return Steps(
        start=path.start,
        stop=path.stop,
        batch_size=batch_size,
        world=World(path.rank, path.world_size),
        drop_last=drop_last,
        by_lane=recipe.by_lane,
    )


class _Worker:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._segments = WorkerSegments()

    def run(self) -> NoReturn:
        """Make the Loader, and answer tasks until the server hangs up."""
        message = self._link.messages.get()
        preparation, main, threads = message.head
        try:
            prepare(preparation)
            if main and b"__main__" in message.body:
                import_script(main)
            loader = pickle.loads(message.body).make()
            described = encode(describe(loader))
            evaluate = Evaluator(loader, threads)
        except BaseException as error:
            self._fail(0, error)
            while True:
                self._link.messages.get()
        self._link.send(["ready"], described)
        for number in range(1, threads):
            name = f"headrace-serve-{number}"
            threading.Thread(target=self._work, args=(loader, evaluate), name=name, daemon=True).start()
        self._work(loader, evaluate)

    def _work(self, loader: Loader, evaluate: Evaluator) -> NoReturn:
        counters = Counters()
        while True:
            message = self._link.messages.get()
            number, freed, *task = message.head
            self._segments.give_back(freed)
            if number is None:
                continue
            try:
                if task:
                    with working_for(counters):
                        packed = pack(evaluate(msgspec.convert(task, Task)))
                    self._answer(number, packed, counters)
                else:
                    report = json.dumps(_reports(loader)).encode()
                    self._link.send(["done", number, None, [], []], report)
            except BaseException as error:
                self._fail(number, error)

    def _answer(self, number: int, packed: Packed, counters: Counters) -> None:
        spent = counters.take()[0]
        if packed.body_bytes <= INLINE_BYTES:
            body = np.empty(packed.body_bytes, np.uint8)
            packed.write(body)
            flush_output()
            self._link.send(["done", number, None, spent, []], packed.head, body.data)
            return
        placed = self._segments.put(packed)
        flush_output()
        descriptors = [] if placed.descriptor is None else [placed.descriptor]
        place = [placed.number, placed.size, packed.body_bytes]
        dropped = self._segments.take_dropped()
        self._link.send(["done", number, place, spent, dropped], packed.head, None, descriptors)

    def _fail(self, number: int, error: BaseException) -> None:
        flush_output()
        kind = type(error).__name__ if isinstance(error, HeadraceError) else StageError.__name__
        said = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
        self._link.send(["failed", number, kind, said, trace_of(error)])


def _reports(loader: Loader) -> dict[str, Any]:
    """How the rows are packed, by source."""
    return {name: asdict(report) for name, report in loader.rows.recipe.reports().items()}


def main() -> NoReturn:
    _Worker(attach(sys.argv[1:], CODEC)).run()


if __name__ == "__main__":
    # Import this module under its own name, because `__main__` will become the user's script.
    from headrace.serve import worker

    worker.main()
