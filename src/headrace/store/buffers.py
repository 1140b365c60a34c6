"""Memory for units that arrive over the network, used again when nobody looks at it any more.

New memory costs as much processor time as receiving into it: the kernel hands out every page with zeros in it. Units
have nearly the same size, and as many are let go of as arrive.
"""

import mmap
import weakref

import numpy as np
from numpy.typing import NDArray

_CAPACITY = (1 << 22) + (1 << 16)
"""A unit, and the blocks that it shares with its neighbours."""
_LEAST = _CAPACITY // 2
"""Less is not worth it."""
_MOST_IDLE = 16


class Buffers:
    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []

    def take(self, count: int) -> NDArray[np.uint8]:
        """Memory for so many bytes, with anything in it."""
        if not _LEAST <= count <= _CAPACITY:
            return np.empty(count, dtype=np.uint8)
        try:
            memory = self._idle.pop()
        except IndexError:
            memory = mmap.mmap(-1, _CAPACITY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(memory, dtype=np.uint8)
        # Views of the array hold the array, so its end is the end of all of them.
        weakref.finalize(whole, self._give_back, memory).atexit = False
        return whole[:count]

    def _give_back(self, memory: mmap.mmap) -> None:
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(memory)
