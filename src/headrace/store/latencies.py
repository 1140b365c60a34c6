"""How long requests take, and from when on one is so slow that a second is worth sending.

20 requests of 4 MB took 0.1 to 0.4 s, 95 % of them less than 0.35 s
patience: 3 x 0.35 s = 1.05 s; whoever has waited so long sends the request again, and takes the first answer
"""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator

from headrace.fork_lock import fork_lock

_KEPT = 100
_ENOUGH = 20
_TIMES = 3.0


class Latencies:
    def __init__(self, least_seconds: float) -> None:
        self._least_seconds = least_seconds
        self._lock = fork_lock()
        self._recent: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def add(self, count: int, seconds: float) -> None:
        with self._lock:
            self._recent[_size_class(count)].append(seconds)

    @contextlib.contextmanager
    def measured(self, count: int) -> Iterator[None]:
        """Note how long a request for so many bytes takes, if it succeeds."""
        began = time.monotonic()
        yield
        self.add(count, time.monotonic() - began)

    def patience(self, count: int) -> float | None:
        """How long to wait for an answer of so many bytes; None if too few came to tell."""
        with self._lock:
            recent = sorted(self._recent[_size_class(count)])
        if len(recent) < _ENOUGH:
            return None
        usual = recent[len(recent) * 95 // 100]
        return max(self._least_seconds, _TIMES * usual)


def _size_class(count: int) -> int:
    """Sizes up to 64 KB are alike; above that, sizes within a factor of four."""
    return max(0, count.bit_length() - 16) // 2
