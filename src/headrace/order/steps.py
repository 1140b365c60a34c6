"""The batches of one iteration: which positions of the stream each holds on this rank.

Each step takes consecutive positions of the stream, and a rank takes a slice of them (ranks.py). In the order by units
they are put in the order of their lanes first. So a rank stays with its lanes, and the units of a lane are fetched by
one node, while the rows of a step are the same for any number of ranks. Two ranks, batches of 4, and four lanes:

    positions       0 1 2 3 4 5 6 7
    lanes           0 1 2 3 0 1 2 3
    rank 0          0 1     4 5             lanes 0 and 1
    rank 1              2 3     6 7         lanes 2 and 3
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.order.ranks import count_steps, rows_of_step
from headrace.order.world import World

ByLane = Callable[[NDArray[np.int64], int, NDArray[np.int64]], NDArray[np.int64]]
"""Like `RowStream.by_lane`."""

_FOREVER = 2**62


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Batches over the positions from `start` to `stop`; if `stop` is None, they never end."""

    start: int
    stop: int | None
    batch_size: int
    world: World
    drop_last: bool
    by_lane: ByLane | None = None
    """Puts ranges of positions in the order of their lanes, if rows are dealt out to ranks by them."""

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

    @property
    def are_contiguous(self) -> bool:
        """Whether the positions of each batch are consecutive."""
        return self.by_lane is None or self.world.size == 1

    def extent(self, step: int) -> tuple[int, int]:
        """The first position of this rank's batch, and the one after its last, if batches are contiguous.

        If not, it is this rank's slice after the positions of the step were put in the order of their lanes.
        """
        if 0 <= step < self._whole:
            first = self.start + (step * self.world.size + self.world.rank) * self.batch_size
            return first, first + self.batch_size
        rows = _FOREVER if self.stop is None else self.stop - self.start
        first, last = rows_of_step(step, rows, self.batch_size, self.world.rank, self.world.size)
        return self.start + first, self.start + last

    def positions(self, step: int) -> NDArray[np.int64]:
        """The positions of this rank's batch, in ascending order."""
        if self.are_contiguous:
            return np.arange(*self.extent(step))
        return self.positions_of(range(step, step + 1))[0]

    def positions_of(self, steps: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The positions of several batches, end to end, and how many each batch has."""
        complete = range(steps.start, max(steps.start, min(steps.stop, self._whole)))
        positions = [self._slices(complete)]
        sizes = np.full(len(steps), self.batch_size)
        for step in range(complete.stop, steps.stop):
            last = self._slices(range(step, step + 1))
            sizes[step - steps.start] = len(last)
            positions.append(last)
        return np.concatenate(positions), sizes

    def _slices(self, steps: range) -> NDArray[np.int64]:
        """This rank's positions in steps that have the same number of rows, end to end."""
        if not steps:
            return np.empty(0, dtype=np.int64)
        first, stop = self.extent(steps.start)
        begin = self.start + steps.start * self.global_batch
        begins = begin + np.arange(len(steps)) * self.global_batch
        wanted = np.arange(first - begin, stop - begin)
        if self.by_lane is None or self.world.size == 1:
            return (begins[:, None] + wanted).reshape(-1)
        rows = self.global_batch if self.stop is None else min(self.global_batch, self.stop - begin)
        return np.sort(self.by_lane(begins, rows, wanted), axis=1).reshape(-1)

    def described(self, step: int) -> str:
        """The rows of this rank's batch, as errors name them: "rows 0 to 9 of the stream"."""
        return described_rows(self.positions(step))

    def position_after(self, steps: int) -> int:
        """The next position of the whole stream after every rank has had this many batches.

        After the last batch this is `stop`, although rows that are too few for a batch may lie before it.
        """
        if self.stop is not None and steps == self.count:
            return self.stop
        return self.start + steps * self.global_batch


def described_rows(positions: Sequence[int] | NDArray[np.int64]) -> str:
    """Rows as errors name them: "rows 0 to 9 of the stream", or "4 rows from 2 to 7 of the stream"."""
    if not len(positions):
        return "a batch without rows"
    first, last = positions[0], positions[-1]
    if len(positions) == 1:
        return f"row {first} of the stream"
    if last - first + 1 == len(positions):
        return f"rows {first} to {last} of the stream"
    return f"{len(positions)} rows from {first} to {last} of the stream"
