"""The batches of one iteration: which positions of the stream each holds on this rank."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.order.ranks import count_steps, rows_of_step
from headrace.order.world import World

_FOREVER = 2**62


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Batches over the positions from `start` to `stop`; if `stop` is None, they never end."""

    start: int
    stop: int | None
    batch_size: int
    world: World
    drop_last: bool

    @cached_property
    def count(self) -> int | None:
        if self.stop is None:
            return None
        return count_steps(self.stop - self.start, self.batch_size, self.world.size, self.drop_last)

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world.size

    @cached_property
    def _whole(self) -> int:
        """How many batches are complete on every rank."""
        return _FOREVER if self.stop is None else (self.stop - self.start) // self.global_batch

    @property
    def rows_in_last_step(self) -> int:
        """How many rows the last step has, over all ranks."""
        if self.stop is None or self.drop_last:
            return self.global_batch
        return (self.stop - self.start) % self.global_batch or self.global_batch

    def extent(self, step: int) -> tuple[int, int]:
        """The first position of this rank's batch, and the one after its last."""
        if 0 <= step < self._whole:
            first = self.start + (step * self.world.size + self.world.rank) * self.batch_size
            return first, first + self.batch_size
        rows = _FOREVER if self.stop is None else self.stop - self.start
        first, last = rows_of_step(step, rows, self.batch_size, self.world.rank, self.world.size)
        return self.start + first, self.start + last

    def extents(self, steps: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first positions of several batches, and their numbers of rows."""
        starts = np.arange(steps.start, steps.stop) * self.global_batch
        starts += self.start + self.world.rank * self.batch_size
        sizes = np.full(len(steps), self.batch_size)
        for step in range(max(self._whole, steps.start), steps.stop):
            first, last = self.extent(step)
            starts[step - steps.start], sizes[step - steps.start] = first, last - first
        return starts, sizes

    def position_after(self, steps: int) -> int:
        """The next position of the whole stream after every rank has had this many batches.

        After the last batch this is `stop`, although rows that are too few for a batch may lie before it.
        """
        if self.stop is not None and steps == self.count:
            return self.stop
        return self.start + steps * self.global_batch
