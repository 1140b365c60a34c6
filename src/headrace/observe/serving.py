"""Where the time of batches that servers make goes: waiting for a worker, being made, or on their way.

sent    | received                            | made ...       | here
'-- network --' '-- queue, until a worker has time --' '-- making --' '-- network --'
"""

from collections.abc import Mapping
from typing import NamedTuple

from headrace.observe.stats import LOOP, SERVER_QUEUE, StageStats

QUEUE, NETWORK = SERVER_QUEUE, "network"
"""What every batch of a server counts. What its making takes there has names like 'server transform'."""
_MAKING = "server "


class ServingTimes(NamedTuple):
    """Of a batch, on average, in seconds."""

    queue: float
    """Until a worker of a server has time for it."""
    making: float
    """In which it is made while it is waited for; nothing if that was done before it was asked for."""
    network: float
    """On its way: the request, the answer, and what both ends do with them."""
    here: float
    """Other stages, in the process of the loop."""
    made: float
    """What it takes to make one, whether somebody waits for it or not."""

    @property
    def on_servers(self) -> float:
        return self.queue + self.making

    @property
    def is_mostly_servers(self) -> bool:
        return self.on_servers >= max(self.network, self.here)

    @property
    def is_mostly_network(self) -> bool:
        return not self.is_mostly_servers and self.network >= self.here


def serving_times(stages: Mapping[str, StageStats]) -> ServingTimes | None:
    """None if no batch came from a server."""
    network = stages.get(NETWORK)
    if network is None or not network.count:
        return None
    answers = network.count
    made_there = [each for name, each in stages.items() if name.startswith(_MAKING) and name != QUEUE]
    made_seconds = sum(each.seconds for each in made_there)
    # A batch that somebody else has asked for before is made once, and counted there.
    made = max((each.count for each in made_there), default=0)
    others = [
        each.seconds
        for name, each in stages.items()
        if name not in (*LOOP, NETWORK) and not name.startswith(_MAKING)
    ]
    queue = stages.get(QUEUE)
    return ServingTimes(
        queue=queue.seconds / answers if queue else 0.0,
        making=made_seconds / answers,
        network=network.seconds / answers,
        here=sum(others) / answers,
        made=made_seconds / made if made else 0.0,
    )
