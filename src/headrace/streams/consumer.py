"""The reader of a stream: one worker of a torch DataLoader on one rank, among all workers of all ranks."""

import sys
from typing import NamedTuple

from headrace.order.world import World


class Consumer(NamedTuple):
    number: int
    total: int


def find_consumer(world: World) -> Consumer:
    # Only if the program has imported torch: nothing here needs it.
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None and hasattr(data, "get_worker_info") else None
    worker, workers = (0, 1) if info is None else (int(info.id), int(info.num_workers))
    return Consumer(world.rank * workers + worker, world.size * workers)
