"""One iteration over a Loader: it takes batches from their source, in order, and moves the Loader's place."""

import weakref
from typing import TYPE_CHECKING

import numpy as np

from headrace.fork_lock import fork_lock
from headrace.load.batch import Batch, BatchInfo
from headrace.observe.advice import LOOK_EVERY, watch_cpu
from headrace.observe.counting import Watch
from headrace.rows.buffers import BufferPool

if TYPE_CHECKING:
    from headrace.load.loader import Loader


class Iteration:
    """One pass. Its threads or processes stop when the last reference to it is gone.

    The Loader stands where the iteration does that has handed out the last batch.
    """

    def __init__(self, loader: "Loader") -> None:
        self._loader, self._place, self._jumps = loader, loader._place, loader._jumps
        self._me = weakref.ref(self)
        self._step = 0
        self._info = (str(loader.settings.labels), loader.settings.ignore_index)
        self._convert = loader.delivery.convert
        self._watch = Watch(loader.counters)
        self._turn = fork_lock()
        """Several threads may take batches from one iteration, one at a time."""
        self.is_running = True
        self._begin()

    def _begin(self) -> None:
        self._steps = self._loader._steps_from(self._place.position)
        self._batches = self._loader._start(self._steps)
        self._handed = 0

    def check_batch_functions(self) -> None:
        """If some rank gets no rows in the last step, see now and on every rank that batch functions can do with that.

        Otherwise a function would fail at the end of an epoch, on some ranks only, and the others would wait for them.
        """
        recipe, last_step = self._loader._recipe, self._steps.rows_in_last_step
        if recipe.has_batch_functions and last_step < self._loader.world.size:
            recipe.evaluate(np.empty(0, dtype=np.int64), BufferPool(keep=0))

    @property
    def count(self) -> int | None:
        """How many batches it has, from its first to its last."""
        count = self._steps.count
        return None if count is None else self._step - self._handed + count

    def __iter__(self) -> "Iteration":
        return self

    def __next__(self) -> Batch:
        with self._turn:
            return self._take()

    def _take(self) -> Batch:
        before = self._place.position
        try:
            with self._watch:
                arrays = next(self._batches)
            info = self._describe(self._handed)
            batch = Batch(arrays, info, self._convert)
            self._handed, self._step = self._handed + 1, self._step + 1
            if not self._step % LOOK_EVERY:
                watch_cpu.look()
            self._watch.counters.rows += info.rows
            self._place.position = self._steps.position_after(self._handed)
            if self._jumps == self._loader._jumps:
                self._loader._place, self._loader._latest = self._place, self._me
        except StopIteration:
            self.is_running = False
            raise
        except BaseException:
            # Ctrl-C may have lost a batch on its way here, and the next one would be taken for it.
            self.close()
            self._place.position = before
            raise
        return batch

    def _describe(self, handed: int) -> BatchInfo:
        """The place of a batch, by its number since the iteration began, or went on from another place."""
        first, last = self._steps.extent(handed)
        if self._steps.are_contiguous:
            return BatchInfo(self._step, first, last - first, *self._info)
        dealt = tuple(self._steps.positions(handed).tolist())
        return BatchInfo(self._step, dealt[0] if dealt else first, last - first, *self._info, dealt)

    def go_on_from_here(self) -> None:
        """Make the next batches again after the stream has changed."""
        self._jumps = self._loader._jumps
        if self._handed != self._steps.count:
            self._batches.close()
            self._begin()

    def close(self) -> None:
        """Stop making batches. A closed iteration gives no more of them."""
        self.is_running = False
        self._batches.close()
