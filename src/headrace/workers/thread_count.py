"""How many threads help: found out while the loop runs, without any effect on the batches.

    1 thread     100 batches a second, the loop waits most of its time    -> try one more
    2 threads    190                                                      -> keep it, try two more
    4 threads    200                                                      -> no help: back to 2, try one more
    3 threads    195                                                      -> no help: back to 2, and stay for a while

A function that holds the interpreter's lock gains nothing from a second thread, while one that waits for a disk gains
from many. This cannot be known beforehand.
"""

from typing import NamedTuple

_WAITS = 0.1
"""Another thread is tried if the loop waits for more than this share of its time."""
_WORTH = 0.25
"""A thread is kept if it adds at least this share of what each of the others does."""
_LEAST_BATCHES = 8
_LEAST_NANOSECONDS = 200_000_000
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 256


class Stretch(NamedTuple):
    """Some consecutive batches: how long they took in total, and how long the loop waited for them."""

    batches: int
    nanoseconds: int
    waited: int

    @property
    def rate(self) -> float:
        return self.batches / max(1, self.nanoseconds)

    @property
    def tells(self) -> bool:
        """Whether it is long enough to be judged by."""
        return self.batches >= _LEAST_BATCHES and self.nanoseconds >= _LEAST_NANOSECONDS


class ThreadCount:
    """`count` threads, from 1 to `most`. It outlives an iteration, so that the next one knows what was found out."""

    def __init__(self, most: int = 16) -> None:
        """`most` may exceed the number of cores, since a function may wait for something other than a processor."""
        self.count = 1
        self.most = most
        self._before: tuple[int, float] | None = None
        """The number of threads and the rate before the latest ones were added, while those are on trial."""
        self._step = 1
        """How many more threads are tried next: twice as many after each success."""
        self._pause = 0
        self._next_pause = _FIRST_PAUSE

    def judge(self, stretch: Stretch) -> None:
        """Judge the current number of threads by a stretch, and change it if that may help."""
        # Two iterations of one Loader may judge at the same time.
        trial, self._before = self._before, None
        if trial is not None:
            before, rate = trial
            more = max(1, self.count - before)
            if stretch.rate >= rate * (1 + _WORTH * more / before):
                self._step = 2 * more
            else:
                self.count, self._step = before, 1
                if more > 1:
                    self._try_more(rate)
                else:
                    self._pause, self._next_pause = (
                        self._next_pause,
                        min(2 * self._next_pause, _LONGEST_PAUSE),
                    )
                return
        if self._pause:
            self._pause -= 1
        elif stretch.waited > _WAITS * stretch.nanoseconds:
            self._try_more(stretch.rate)

    def _try_more(self, rate: float) -> None:
        if self.count < self.most:
            self._before = (self.count, rate)
            self.count = min(self.count + self._step, self.most)
