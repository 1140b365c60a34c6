"""The pure function behind a Loader: positions of the stream -> rows.

    loader = headrace.Loader("data", seq_len=2048, batch_size=8)
    loader.rows([0, 1, 2])["tokens"]         the first three rows of the first epoch, whichever rank gets them
    loader.rows([loader.rows_per_epoch])     the first row of the second epoch

It has no threads, position or rank, so it can be pickled and called anywhere, any number of times and in any order: a
server can hand out its rows, and a test can compare a run with them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.errors import SettingsError
from headrace.public import public
from headrace.rows.buffers import BufferPool
from headrace.rows.recipe import Recipe

_BUFFERS_KEPT = 4
_MOST_POSITION = 2**62


@dataclass(frozen=True)
class Rows:
    """`rows(positions)` returns the rows at these positions of the global stream."""

    recipe: Recipe
    batch_size: int
    """How many rows a function given to `map(fn, per="batch")` gets at a time."""

    world_size: int = 1
    """How many ranks share the last, shorter batches of a pass."""

    @property
    def rows_per_epoch(self) -> int:
        return self.recipe.rows_per_epoch

    @public
    def __call__(self, positions: Sequence[int] | ArrayLike) -> dict[str, Any]:
        """A dict of NumPy arrays, in the order of the positions.

        Positions count the rows of the whole stream, over all ranks and epochs, and may come in any order. Functions
        given to `map` are applied. If one of them takes whole batches, the positions must be those of one or more whole
        batches, each with `batch_size` consecutive positions. Only the last batches of an epoch may be shorter, and
        must then be asked for one at a time.
        """
        checked = check_positions(positions)
        if not self.recipe.has_batch_functions:
            return self.recipe.evaluate(checked, self._pool)
        batches = [self.recipe.evaluate(batch, self._pool) for batch in self._whole_batches(checked)]
        return _joined(batches) if len(batches) > 1 else batches[0]

    def _whole_batches(self, positions: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        batches = [
            positions[first : first + self.batch_size] for first in range(0, len(positions), self.batch_size)
        ]
        for batch in batches:
            are_consecutive = bool((np.diff(batch) == 1).all())
            is_whole = len(batch) == self.batch_size or self._is_among_the_last(batch)
            if not are_consecutive or not is_whole:
                raise SettingsError(
                    f"positions {_shown(batch)}: a function given to map takes whole batches, so give the positions of "
                    f"whole batches: {self.batch_size} consecutive positions each"
                )
        return batches or [positions]

    def _is_among_the_last(self, batch: NDArray[np.int64]) -> bool:
        """Whether the batch is in the last rows of an epoch, of which the ranks may get fewer than a whole batch."""
        end_of_epoch = (int(batch[0]) // self.rows_per_epoch + 1) * self.rows_per_epoch
        first_of_last = end_of_epoch - self.batch_size * self.world_size + 1
        return first_of_last <= int(batch[0]) and int(batch[-1]) < end_of_epoch

    @cached_property
    def _pool(self) -> BufferPool:
        return BufferPool(keep=_BUFFERS_KEPT)

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "batch_size": self.batch_size, "world_size": self.world_size}


def check_positions(positions: Any) -> NDArray[np.int64]:
    """The positions as an array, once they are known to be whole numbers of at least 0."""
    try:
        array = np.asarray(positions)
    except ValueError:
        # Lists of different lengths.
        raise SettingsError(f"positions={_shown(positions)}: must be a list of whole numbers") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise SettingsError(f"positions={_shown(positions)}: must be a list of whole numbers")
    if array.size and (int(array.min()) < 0 or int(array.max()) >= _MOST_POSITION):
        raise SettingsError(f"positions={_shown(positions)}: must be 0 to 2^62 - 1")
    return array.astype(np.int64)


def _joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Several batches as one: their columns end to end."""
    names = list(batches[0])
    if any(list(batch) != names for batch in batches):
        raise SettingsError("the batches have different fields; ask for one batch at a time")
    return {name: _joined_column(name, [batch[name] for batch in batches]) for name in names}


def _joined_column(name: str, columns: list[Any]) -> Any:
    if isinstance(columns[0], list):
        return list(itertools.chain.from_iterable(columns))
    if name == "max_seqlen":
        return max(columns)
    if np.ndim(columns[0]) == 0:
        raise SettingsError(
            f"field {name!r} describes a single batch; ask for the positions of one batch at a time"
        )
    if name.endswith("_offsets") or (name == "cu_seqlens" and np.ndim(columns[0]) == 1):
        return _joined_bounds(columns)
    try:
        return np.concatenate(columns)
    except ValueError as error:
        raise SettingsError(
            f"field {name!r} cannot be joined ({error}); ask for one batch at a time"
        ) from None


def _joined_bounds(columns: list[NDArray[Any]]) -> NDArray[Any]:
    """[0, 3, 5] and [0, 4] -> [0, 3, 5, 9]: where things end in columns that are joined."""
    ends, before = [columns[0][:1]], 0
    for column in columns:
        ends.append(column[1:] + before)
        before += int(column[-1])
    return np.concatenate(ends).astype(columns[0].dtype)


def _shown(positions: Any) -> str:
    text = repr(positions.tolist() if isinstance(positions, np.ndarray) else positions)
    return text if len(text) <= 80 else f"{text[:77]}..."
