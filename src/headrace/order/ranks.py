"""Which rows of a span each rank takes at each step: slices of the global batch, by arithmetic.

A global batch is `batch_size * world_size` consecutive rows, and each rank takes `batch_size` of them. If the last
global batch is incomplete and kept, its rows are divided as evenly as possible. Eleven rows, batches of 2, two ranks:

    step         0         1         2
    rank 0       0 1       4 5       8
    rank 1       2 3       6 7       9 10

So every rank has the same number of steps, and the rows of a step depend only on the size of the global batch.
"""

from headrace.errors import SettingsError


def count_steps(rows: int, batch_size: int, world_size: int, drop_last: bool) -> int:
    """How many steps a span of `rows` rows has on every rank; `drop_last` omits an incomplete last one."""
    _check(rows, batch_size, world_size)
    global_batch = batch_size * world_size
    return rows // global_batch if drop_last else -(-rows // global_batch)


def rows_of_step(step: int, rows: int, batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rows [start, stop) that a rank takes at a step. The last step may have none for some ranks."""
    steps = count_steps(rows, batch_size, world_size, drop_last=False)
    if not 0 <= step < steps:
        raise SettingsError(
            f"step={step}: must be 0 to {steps - 1}" if steps else f"step={step}: there are no steps"
        )
    if not 0 <= rank < world_size:
        raise SettingsError(f"rank={rank}: must be 0 to world_size - 1, {world_size - 1}")
    first = step * batch_size * world_size
    # In a whole global batch these are exactly `batch_size` rows for each rank.
    held = min(rows - first, batch_size * world_size)
    return first + held * rank // world_size, first + held * (rank + 1) // world_size


def _check(rows: int, batch_size: int, world_size: int) -> None:
    for name, value, least in (
        ("rows", rows, 0),
        ("batch_size", batch_size, 1),
        ("world_size", world_size, 1),
    ):
        if value < least:
            raise SettingsError(f"{name}={value}: must be at least {least}")
