"""The results of a server: kept for others who ask for the same, until their memory is needed.

Their memory is bounded, and so are the shared segments that they are in, since each takes a descriptor.
"""

import resource
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from headrace.serve.messages import Key
from headrace.serve.result import Result

_LEAST_SEGMENTS, _MOST_SEGMENTS = 8, 4096
"""Clients map those that they have read from, and a process may have some 65,000 maps."""
_OTHER_DESCRIPTORS = 128
"""Those of workers and files."""
_MANY = 2**20


class KeptResults:
    def __init__(self, memory_bytes: int, clients: int, freed: Callable[[], None]) -> None:
        """`freed` is called whenever a result is gone."""
        self._memory_bytes, self._freed = memory_bytes, freed
        self._results: OrderedDict[Key, Result] = OrderedDict()
        """The longest unused first."""
        self.held_bytes = self.held_segments = 0
        """What all results take that are kept, or that clients have not taken yet."""
        self._most_segments = _most_segments(clients)
        self.usual_bytes = 0
        """How large a result is: the largest of the latest ones, nearly."""

    def __contains__(self, key: Key) -> bool:
        return key in self._results

    def find(self, key: Key) -> Result | None:
        found = self._results.get(key)
        if found is not None:
            self._results.move_to_end(key)
        return found

    def keep(self, key: Key, result: Result) -> None:
        size, segments = result.held_bytes, int(result.segment is not None)
        self.held_bytes += size
        self.held_segments += segments
        self.usual_bytes = max(size, self.usual_bytes - self.usual_bytes // 16)
        result.when_freed = partial(self._when_freed, size, segments)
        self._results[key] = result

    def _when_freed(self, size: int, segments: int) -> None:
        self.held_bytes -= size
        self.held_segments -= segments
        self._freed()

    def make_room(self, running: int) -> bool:
        """Drop results until there is memory for another one beside those that are being made; whether there is."""
        while self._results and not self._fits_another(running):
            _, oldest = self._results.popitem(last=False)
            oldest.let_go()
        # If nothing is held or made, there is room for one, however large it is.
        return self._fits_another(running) or not (self.held_bytes or running)

    def _fits_another(self, running: int) -> bool:
        if not self.usual_bytes and running:
            # The first result shows how large they are.
            return False
        has_memory = self.held_bytes + (running + 1) * self.usual_bytes <= self._memory_bytes
        return has_memory and self.held_segments + running < self._most_segments

    def close(self) -> None:
        while self._results:
            self._results.popitem()[1].let_go()


def most_connections() -> int:
    """How many clients there may be, if the system permits few open files."""
    return max(1, _descriptors() // 4)


def _most_segments(clients: int) -> int:
    """How many segments may be held: each takes a descriptor, and another one while it is passed to a client."""
    left = _descriptors() - _OTHER_DESCRIPTORS - clients
    return min(_MOST_SEGMENTS, max(_LEAST_SEGMENTS, left // 2))


def _descriptors() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if allowed == resource.RLIM_INFINITY else allowed
