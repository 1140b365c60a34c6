"""Batches that servers make: asked for ahead of need, and handed over in order."""

import itertools
import math
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.load.sources import Batches, Order, choose_depth
from headrace.rows.buffers import BufferPool
from headrace.rows.fields import Fields
from headrace.serve.dispatch import Server
from headrace.serve.fleet import Fleet
from headrace.serve.messages import Path, Rows
from headrace.serve.peers import Batch
from headrace.serve.served_recipe import ServedRecipe
from headrace.workers.prefetch import Prefetch

_AHEAD_BYTES = 256 * 2**20
"""How much memory batches may take that are asked for and not handed over."""
_LEAST_AHEAD, _MOST_AHEAD = 2, 64
_TELL_NANOSECONDS = 500_000_000
"""Of how much of the loop's time servers are told how much of it was waiting."""
_COMING_FOR_EACH_SLOT = 2
_ASKED_TOGETHER = 4
"""Batches are asked for again when one in so many of those ahead is taken, since every message costs."""


class FromServers:
    """Batches that servers make."""

    processes = 0

    def start(self, order: Order) -> Batches:
        recipe = order.recipe
        assert isinstance(recipe, ServedRecipe)
        window = Window(order, recipe, recipe.servers.fleet())
        order.counters.workers = 0
        if not recipe.transforms:
            return window
        return Prefetch(
            window.finished,
            count=order.steps.count,
            depth=max(1, choose_depth(None, order.settings)),
            threads=order.settings.workers or 1,
            timeout_seconds=order.settings.timeout_seconds,
            stage=recipe.stage,
            counters=order.counters,
            describe=order.steps.described,
        )


@dataclass
class _AskingFor:
    """How far requests have come, and how far the next ones will go. Requests refer to it, and not to the window."""

    next: int = 0
    end: int = 0


def _coming(fleet: Fleet, asked: _AskingFor, server: Server) -> tuple[int, ...]:
    """What the server will be asked for next: it may begin with that when it has nothing else to do."""
    return fleet.planned(server, range(asked.next, asked.end))[: _COMING_FOR_EACH_SLOT * server.slots]


class Window:
    """The batches of one iteration. Threads may take different steps at the same time."""

    def __init__(self, order: Order, recipe: ServedRecipe, fleet: Fleet) -> None:
        self._order, self._recipe, self._fleet = order, recipe, fleet
        steps = order.steps
        self._path = Path(steps.start, steps.stop, steps.world.rank, steps.world.size)
        self._pool = BufferPool(keep=2 * _MOST_AHEAD, allocate=order.allocate)
        self._count, self._next = steps.count, 0
        self._asking_for = _AskingFor()
        self._batches: dict[int, Batch] = {}
        self._asking = threading.Lock()
        self._depth = 0
        """How many batches are asked for before they are due."""
        self._size: int | None = None
        """How many bytes a batch has, as far as is known."""
        self._told = (0, 0)
        self._end = weakref.finalize(self, _forget_all, fleet, self._batches)
        self._end.atexit = False

    def __next__(self) -> dict[str, Any]:
        if self._next == self._count:
            self.close()
            raise StopIteration
        batch = self.take(self._next)
        self._next += 1
        return batch

    def is_ready(self) -> bool:
        due = self._batches.get(self._next)
        return due is not None and due.outcome is not None

    def close(self) -> None:
        self._count = self._next
        self._end()

    def finished(self, step: int) -> dict[str, Any]:
        """The batch of a step, after the functions of this process."""
        columns = dict(self.take(step))
        return self._recipe.finish(columns, self._order.steps.positions(step), self._pool)

    def take(self, step: int) -> dict[str, Any]:
        """The batch of a step, as the servers have made it."""
        self._fleet.check_process()
        self._ask_ahead(step)
        settings, steps = self._order.settings, self._order.steps
        batch = self._batches[step]
        made = self._fleet.result(batch, settings.timeout_seconds, lambda: steps.described(step))
        self._size = batch.body_bytes
        del self._batches[step]
        if not self._recipe.names_fields:
            return made
        names = self._recipe.settings.token_fields
        return Fields(names, partial(self._make_late, step), made)

    def _make_late(self, step: int, name: str) -> Any:
        """Fetch a field that was not in use when the batch was asked for."""
        self._order.used.add(name)
        what = f"the field {name!r} of {self._order.steps.described(step)}"
        rows, stages = Rows(self._path, step), self._sent_stages(step)
        return self._recipe.fetch(rows, (name,), stages, self._pool, what)[name]

    def _sent_stages(self, step: int) -> bytes | None:
        steps = self._order.steps
        first = steps.start + step * steps.global_batch
        return self._recipe.sent_stages(first, first + steps.global_batch)

    def _ask_ahead(self, step: int) -> None:
        with self._asking:
            ready = sum(1 for _ in itertools.takewhile(_is_ready, self._batches.values()))
            self._order.counters.see_queue("ready", ready, max(1, self._depth))
            self._tell_waiting()
            asked = self._asking_for
            missing = step + self._depth + 1 - asked.next
            if asked.next > step and missing < max(1, self._depth // _ASKED_TOGETHER):
                return
            self._depth = self._choose_depth()
            count = math.inf if self._count is None else self._count
            end = int(min(step + self._depth + 1, count))
            # As far again as requests go.
            asked.end = int(min(end + self._depth, count))
            new = {number: self._request(number) for number in range(asked.next, end)}
            if new:
                self._batches |= new
                asked.next = end
                self._fleet.ask(list(new.values()))

    def _request(self, step: int) -> Batch:
        recipe = self._recipe
        return Batch(
            step,
            rows=Rows(self._path, step),
            fields=tuple(sorted(self._order.used.ahead)) if recipe.names_fields else None,
            stages=self._sent_stages(step),
            pool=self._pool,
            counters=self._order.counters,
            ahead=partial(_coming, self._fleet, self._asking_for),
        )

    def _choose_depth(self) -> int:
        """How many batches are asked for before they are due: twice what this rank's share of the servers can make, and
        at least as many as a Loader would make ahead."""
        settings = self._order.settings
        if settings.prefetch is not None:
            return settings.prefetch
        depth = math.ceil(2 * self._fleet.slots / self._order.steps.world.size)
        size = self._size or (self._recipe.row_bytes or 0) * settings.batch_size
        if size:
            depth = min(max(depth, choose_depth(size, settings)), max(2, _AHEAD_BYTES // size))
        return min(max(depth, _LEAST_AHEAD), _MOST_AHEAD)

    def _tell_waiting(self) -> None:
        """Let servers know how much the loop waits."""
        loop = self._order.counters.loop
        waited, stepped = loop.entry("wait")[1], loop.entry("step")[1]
        new_waited, new_stepped = waited - self._told[0], stepped - self._told[1]
        if new_waited + new_stepped > _TELL_NANOSECONDS:
            self._told = (waited, stepped)
            self._fleet.note_waiting(new_waited / (new_waited + new_stepped))


def _is_ready(batch: Batch) -> bool:
    return batch.outcome is not None


def _forget_all(fleet: Fleet, batches: dict[int, Batch]) -> None:
    waiting = list(batches.values())
    batches.clear()
    fleet.forget(waiting)
