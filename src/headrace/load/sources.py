"""Where a Loader's batches come from: created on request, ahead of time by threads, or by worker processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.load.fetched import fetched_from
from headrace.load.lookahead import fetching_ahead
from headrace.load.settings import LoaderSettings
from headrace.observe.counting import NOTHING_FETCHED, Counters, Spent, working_for
from headrace.observe.stats import FetchStats
from headrace.order.steps import Steps
from headrace.rows.buffers import BufferPool
from headrace.rows.fields import UsedFields
from headrace.rows.recipe import Make, Recipe
from headrace.workers.crew import Crew
from headrace.workers.prefetch import Prefetch
from headrace.workers.thread_count import ThreadCount

_PREFETCH_BYTES = 16 * 2**20
_PREFETCH_LEAST, _PREFETCH_MOST = 2, 32
_PREFETCH_UNKNOWN = 4
_SPANS = 256
"""How many of its latest spans a worker process keeps until it sends them, for timelines."""
_GROUP_BYTES = 2**23
"""Small batches are made in groups, because handing one over to another thread costs as much as copying it."""
_GROUP_BYTES_HERE = 2**21
"""The size of a group where nothing is handed over to another thread."""


class Batches(Protocol):
    """The batches of one iteration, as dicts of arrays, in the order of the steps."""

    def __next__(self) -> dict[str, Any]: ...

    def is_ready(self) -> bool:
        """Whether `next` would return or raise without waiting."""
        ...

    def close(self) -> None:
        """Stop. No batch comes after that."""
        ...


@dataclass(frozen=True)
class Order:
    """What an iteration asks of a source: which batches, from which data, and in what memory."""

    recipe: Recipe
    settings: LoaderSettings
    steps: Steps
    used: UsedFields
    """Which fields the loop has used so far."""
    allocate: Callable[[int], NDArray[np.uint8]] | None
    """Allocates the memory of batches; None lets NumPy do it."""
    counters: Counters


class BatchSource(Protocol):
    """Where a Loader's batches come from. To add a source, write a class with these methods."""

    @property
    def processes(self) -> int:
        """How many worker processes it starts."""
        ...

    def start(self, order: Order) -> Batches: ...


class FromThreads:
    """Batches created in this process: ahead of time by threads, or on request with `prefetch=0`."""

    processes = 0

    def __init__(self) -> None:
        self._threads = ThreadCount()
        """What is known so far about how many threads help."""

    def start(self, order: Order) -> Batches:
        recipe, settings, steps, counters = order.recipe, order.settings, order.steps, order.counters
        size = batch_bytes(recipe, settings)
        depth = choose_depth(size, settings)
        # Batches that wait, that are being made, the one handed out and the one the user still holds.
        keep = 2 * (depth + (settings.workers or self._threads.most)) + 2
        pool = BufferPool(keep=keep, allocate=order.allocate)
        make = fetching_ahead(recipe.maker(steps, pool, order.used), recipe, steps)
        if not depth:
            counters.workers = 0
            return WhenAsked(make, steps.count)
        return Prefetch(
            make,
            count=steps.count,
            depth=depth,
            threads=settings.workers or self._threads,
            may_rest=settings.workers is None and not recipe.runs_user_code,
            timeout_seconds=settings.timeout_seconds,
            stage=recipe.stage,
            counters=counters,
            at_once=max(1, _GROUP_BYTES // (size or _GROUP_BYTES)),
            at_once_here=min(depth, max(1, _GROUP_BYTES_HERE // (size or _GROUP_BYTES_HERE))),
            describe=steps.described,
        )


class FromProcesses:
    """Batches created by worker processes."""

    def __init__(self, processes: int) -> None:
        self.processes = processes

    def start(self, order: Order) -> Batches:
        order.counters.workers = self.processes
        size = batch_bytes(order.recipe, order.settings)
        depth = max(choose_depth(size, order.settings), self.processes)
        return InProcesses(order, self.processes, depth)


def batch_bytes(recipe: Recipe, settings: LoaderSettings) -> int | None:
    """The approximate size of a batch; None if only the user's own code knows it."""
    return None if recipe.row_bytes is None else settings.batch_size * recipe.row_bytes


def choose_depth(size: int | None, settings: LoaderSettings) -> int:
    """`prefetch` if it is given, else as many batches as fit into 16 MB, from 2 to 32; 4 if their size is unknown.

    More batches would not fit the processor's cache, and each would cost twice as much.
    """
    if settings.prefetch is not None:
        return settings.prefetch
    if size is None:
        return _PREFETCH_UNKNOWN
    return min(max(_PREFETCH_BYTES // max(1, size), _PREFETCH_LEAST), _PREFETCH_MOST)


class WhenAsked:
    """Creates each batch when it is asked for."""

    def __init__(self, make: Make, count: int | None) -> None:
        self._make, self._count, self._next = make, count, 0

    def __next__(self) -> dict[str, Any]:
        if self._next == self._count:
            raise StopIteration
        batch = self._make(self._next)
        self._next += 1
        return batch

    def is_ready(self) -> bool:
        return False

    def close(self) -> None:
        self._count = self._next


class _Work:
    """What a worker process does: it creates batches from the recipe that it was sent."""

    def __init__(self, recipe: Recipe, steps: Steps) -> None:
        self._recipe, self._steps = recipe, steps
        self._make: Make | None = None
        self._counted: Counters | None = None
        self._fetched = FetchStats()
        """What was fetched until `take_spent` was last called."""

    def __call__(self, step: int) -> dict[str, Any]:
        if self._make is None or self._counted is None:
            plain = self._recipe.maker(self._steps, BufferPool(keep=4))
            self._make = fetching_ahead(plain, self._recipe, self._steps)
            self._counted = Counters(_SPANS)
        with working_for(self._counted):
            return self._make(step)

    def __repr__(self) -> str:
        return self._recipe.stage

    def take_spent(self) -> Spent:
        """The cost of the batches since the last call, to be sent along with one of them."""
        if self._counted is None:
            return [], [], NOTHING_FETCHED
        fetched = fetched_from(self._recipe.data)
        self._counted.fetched = fetched.since(self._fetched)
        self._fetched = fetched
        return self._counted.take()


class InProcesses:
    """Batches created by worker processes, in order: `depth` of them while the loop is busy with another."""

    def __init__(self, order: Order, processes: int, depth: int) -> None:
        self._crew = Crew(
            _Work(order.recipe, order.steps),
            workers=processes,
            timeout_seconds=order.settings.timeout_seconds,
            stage=order.recipe.stage,
            # As many tasks as there can be at once: the batch that is due, and those that are made ahead.
            ahead=-(-(depth + 1) // processes),
            counters=order.counters,
            describe=order.steps.described,
        )
        self._counters = order.counters
        self._count, self._depth, self._next, self._asked = order.steps.count, depth, 0, 0

    def __next__(self) -> dict[str, Any]:
        if self._next == self._count:
            self.close()
            raise StopIteration
        while self._asked <= self._next + self._depth and self._asked != self._count:
            self._crew.put(self._asked, self._asked)
            self._asked += 1
        self._counters.see_queue("ready", self._crew.done, self._depth)
        batch = self._crew.get(self._next)
        self._next += 1
        return batch

    def is_ready(self) -> bool:
        return self._next < self._asked and self._crew.is_done(self._next)

    def close(self) -> None:
        self._count = self._next
        self._crew.close()
