"""Memory for batches, which is reused once the last reference to its batch is gone, and never earlier.

A buffer is one flat array, the owner. The arrays of a batch are views of it, and so are all views that a user makes of
them: NumPy makes each of those refer to the owner itself. So the owner's reference count says whether the memory is
still in use.
"""

import math
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.fork_lock import fork_lock

ALIGNMENT = 64
Spec = tuple[str, Any, tuple[int, ...]]
"""The name, dtype and shape of one array of a batch."""


class BufferPool:
    """Hands out memory. It keeps `keep` buffers; if all are in use, it makes more, which are freed after use."""

    def __init__(self, keep: int, allocate: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        self._keep, self._allocate = keep, allocate or (lambda count: np.empty(count, dtype=np.uint8))
        self._owners: list[tuple[NDArray[np.uint8], int]] = []
        self._lock = fork_lock()
        self.allocated = 0
        """How many buffers have been allocated in total."""

    def arrays(self, specs: Iterable[Spec]) -> dict[str, NDArray[Any]]:
        """Uninitialised arrays in one buffer."""
        layout, room = _layout(tuple(specs))
        owner, first = self._take(room + ALIGNMENT)
        return {name: np.ndarray(shape, dtype, owner, first + at) for name, dtype, shape, at in layout}

    def _take(self, count: int) -> tuple[NDArray[np.uint8], int]:
        """A buffer that is not in use, and its first aligned byte."""
        with self._lock:
            # The first free one, not the one unused for longest: it may still be in the cache.
            for pair in self._owners:
                if _references(pair) == _UNUSED and len(pair[0]) >= count:
                    # This reference keeps other threads from taking it.
                    owner, first = pair
                    return owner, first
            owner = self._allocate(count)
            self.allocated += 1
            self._owners = [
                pair for pair in self._owners if len(pair[0]) >= count or _references(pair) > _UNUSED
            ]
            first = -owner.ctypes.data % ALIGNMENT
            if len(self._owners) < self._keep:
                self._owners.append((owner, first))
            return owner, first


def _references(pair: tuple[NDArray[np.uint8], int]) -> int:
    return sys.getrefcount(pair[0])


_UNUSED = _references((np.empty(0, dtype=np.uint8), 0))
"""The count for an owner that only the pool refers to; versions of Python count differently."""


@lru_cache(maxsize=64)
def _layout(specs: tuple[Spec, ...]) -> tuple[list[tuple[str, Any, tuple[int, ...], int]], int]:
    """Each array with its offset in the buffer, and the total number of bytes."""
    listed, at = [], 0
    for name, dtype, shape in specs:
        listed.append((name, np.dtype(dtype), shape, at))
        size = np.dtype(dtype).itemsize * math.prod(shape)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return listed, at
