"""Records shuffled with those near them: windows of `buffer` consecutive records, each in an order of its own.

    as read, windows of 4     a b c d | e f g h | i j
    handed out, seed 3        b a c d | g e h f | j i

There is no reservoir: which record comes next depends only on where its window began, and on nothing that was read
before, so a resumed stream reads one window again and has exactly the same order.
"""

from typing import Any

import numpy as np

from headrace.order.keys import derive
from headrace.order.permutation import permute
from headrace.streams.cursor import State
from headrace.streams.records import RecordCursor

_WINDOWS = 3
"""What keys are derived for."""


class ShuffleWindows:
    """Groups of records, each shuffled."""

    def __init__(self, records: RecordCursor, buffer: int, seed: int, epoch: int) -> None:
        self._records, self._buffer = records, buffer
        self._key = derive(seed, _WINDOWS, epoch)

    def state(self) -> State:
        return self._records.state()

    def make(self) -> list[Any]:
        key = derive(self._key, *self._records.place())
        window = self._records.take(self._buffer)
        return [window[place] for place in permute(np.arange(len(window)), len(window), key).tolist()]
