"""Who takes the batches that have arrived: a loop that waits for one, or the thread that has received them.

Waking up a thread costs more than what there is to do for a batch, and the thread of a connection has enough to do with
receiving. So it leaves what it has received to a loop that waits, which takes everything, also what others wait for.
"""

from collections import deque
from collections.abc import Callable, Sequence

from headrace.serve.connection import Bytes
from headrace.serve.messages import Answer
from headrace.serve.peers import Batch, Peer
from headrace.workers.prefetch import wait

Arrival = tuple[Peer, Answer, Bytes | None, float]
"""A batch, the server that has sent it, and when it came."""


class Arrivals:
    def __init__(self, take: "Callable[[deque[Arrival]], None]") -> None:
        self._take = take
        """Takes all from a queue, and may be called in any thread."""
        self._arrived: deque[Arrival] = deque()
        self._waiting: list[Batch] = []
        """What threads of loops wait for."""

    def put(self, arrivals: Sequence[Arrival]) -> None:
        self._arrived.extend(arrivals)
        waiting = self._waiting[:1]
        if waiting:
            waiting[0].came.put(None)
        else:
            self.take_all()

    def wait_for(self, batch: Batch, seconds: float) -> None:
        """Wait until the batch may be there."""
        self._waiting.append(batch)
        try:
            self.take_all()
            if batch.outcome is None:
                wait(batch.came, seconds)
        finally:
            self._waiting.remove(batch)
            # What has arrived before that was left to this thread.
            self.take_all()

    def take_all(self) -> None:
        if self._arrived:
            self._take(self._arrived)
