"""Ray Data as a system: a dataset whose blocks are made by two Ray workers, and read with `streaming_split`.

Set up as its documentation advises for training: `streaming_split` runs the dataset in a coordinator of its own, blocks
are made by tasks (https://docs.ray.io/en/latest/data/performance-tips.html), and a function that waits runs in the
threads of two actors (`ActorPoolStrategy`). How many batches a task makes was chosen in favour of Ray, whose tasks cost
processor time: with 10, 25 and 50 batches each it made 68, 98 and 116 a second, on a machine with neighbours, and with
5, 10 and 20 that wait 26, 56 and 101. The price is that a task's block arrives as a whole.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from machine import processes_below
from serve_rows import BATCH_SIZE, burn, make, wait
from serve_system import AT_ONCE, WORKERS, Settings, kill_first

MOST_BATCHES_PER_TASK = {"burning": 50, "waiting": 20}
PREFETCH_BATCHES = 8
LOOK_SECONDS = 3.0


class RayData:
    def __init__(self, transform: str) -> None:
        self._transform = transform
        self.facts: dict[str, Any] = {}

    def batches(self, first: int, count: int) -> Iterator[Any]:
        import ray

        per_task = batches_per_task(count, MOST_BATCHES_PER_TASK[self._transform])
        self.facts["batches_per_task"] = per_task
        dataset = ray.data.range(count * BATCH_SIZE, override_num_blocks=count // per_task)
        dataset = dataset.map_batches(batch_size=BATCH_SIZE, **self._mapping(first * BATCH_SIZE))
        (iterator,) = dataset.streaming_split(1)
        yield from iterator.iter_batches(
            batch_size=BATCH_SIZE, batch_format="numpy", prefetch_batches=PREFETCH_BATCHES
        )

    def _mapping(self, first_row: int) -> dict[str, Any]:
        """How `map_batches` is to run the function."""
        if self._transform == "burning":
            return {"fn": burning(first_row)}
        from ray.data import ActorPoolStrategy

        threads = AT_ONCE // WORKERS
        pool = ActorPoolStrategy(
            size=WORKERS,
            max_tasks_in_flight_per_actor=2 * threads,
            max_concurrent_calls_per_actor=threads,
            enable_true_multi_threading=True,
        )
        # Two actors with a whole processor each would leave none for the tasks that read.
        return {"fn": Waiting, "fn_constructor_args": (first_row,), "compute": pool, "num_cpus": 0.5}

    def kill_worker(self) -> bool:
        """A process that runs a task at this moment. Between two tasks it has another name."""
        deadline = time.monotonic() + LOOK_SECONDS
        while not kill_first(processes_below("ray::MapBatches")):
            if time.monotonic() > deadline:
                return False
        return True


def batches_per_task(count: int, most: int) -> int:
    """The largest number that divides all batches, so that every batch is whole, and gives work to both workers."""
    most = max(1, min(most, count // WORKERS))
    return max(number for number in range(1, most + 1) if count % number == 0)


def burning(first_row: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def make_and_burn(batch: dict[str, Any]) -> dict[str, Any]:
        return burn(make(first_row + batch["id"]))

    return make_and_burn


class Waiting:
    def __init__(self, first_row: int) -> None:
        self._first_row = first_row

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return wait(make(self._first_row + batch["id"]))


@contextlib.contextmanager
def start(settings: Settings, preserve_order: bool) -> Iterator[RayData]:
    """Ray with two processors, without a dashboard. Its files are in TMPDIR, which is the run's own."""
    if not settings.is_alone:
        raise RuntimeError("needs a network namespace of its own, and none can be made here")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    import ray
    import ray.data

    ray.init(num_cpus=WORKERS, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = preserve_order
        yield RayData(settings.transform)
    finally:
        ray.shutdown()
