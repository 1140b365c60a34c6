"""How many threads help: found out while the loop runs, and never part of what it gets.

    1 thread     100 batches a second, the loop waits half of its time    -> try one more
    2 threads    190                                                      -> keep it, try one more
    3 threads    195                                                      -> no help: back to 2, and stay for a while

A function that holds the interpreter's lock gains nothing from a second thread, one that waits for a disk gains from
many: nobody can tell beforehand.
"""

from typing import NamedTuple

_WAITS = 0.1
"""The part of its time that a loop waits before another thread is tried."""
_WORTH = 0.25
"""A thread is kept if it brings at least this part of what each of the others does."""
_LEAST_BATCHES = 8
_LEAST_NANOSECONDS = 200_000_000
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 256


class Stretch(NamedTuple):
    """Some batches that followed each other: how long they took on the whole, and how long the loop waited for them."""

    batches: int
    nanoseconds: int
    waited: int

    @property
    def rate(self) -> float:
        return self.batches / max(1, self.nanoseconds)

    @property
    def tells(self) -> bool:
        """Whether it is long enough to judge by."""
        return self.batches >= _LEAST_BATCHES and self.nanoseconds >= _LEAST_NANOSECONDS


class ThreadCount:
    """`count` threads, from 1 to `most`. It outlives an iteration: what was found out holds for the next."""

    def __init__(self, most: int) -> None:
        self.count = 1
        self.most = most
        self._alone: float | None = None
        """The rate before the latest thread, while that one is on trial."""
        self._pause = 0
        self._next_pause = _FIRST_PAUSE

    def judge(self, stretch: Stretch) -> None:
        """Look at what the present number of threads has achieved, and change it if that may help."""
        if self._alone is not None:
            if stretch.rate < self._alone * (1 + _WORTH / (self.count - 1)):
                self.count -= 1
                self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
            self._alone = None
        elif self._pause:
            self._pause -= 1
        elif self.count < self.most and stretch.waited > _WAITS * stretch.nanoseconds:
            self._alone = stretch.rate
            self.count += 1
