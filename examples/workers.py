"""How many workers? As many as it takes until the step no longer waits, or until all cores are in use.

First, loading is waiting: a sample takes 50 ms (asleep), and a step computes for 15 ms. Without workers, a step takes
the sum of the two. n workers load n samples at a time, so a step takes max(compute, load / n):

    | workers | theory, ms | torch, processes | headrace, processes | headrace, threads |
    | 0       |         65 |             66.0 |                65.9 |              66.0 |
    | 1       |         50 |             51.5 |                51.6 |              51.5 |
    | 2       |         25 |             26.0 |                26.0 |              25.8 |
    | 4       |         15 |             17.0 |                15.7 |              15.6 |     more do not help
    | 8       |         15 |             16.9 |                15.6 |              15.5 |

Then loading is arithmetic in Python, which takes about 20 ms of one core, and a step takes 5 ms of the accelerator and
no core. On two cores, a step takes max(compute, load / min(n, 2)): the third worker only takes turns with the other
two. Threads do not help at all here, since a loop in Python holds the interpreter's lock:

    | 2       |       11.6 |             14.2 |                15.9 |              24.3 |
    | 8       |       11.6 |             17.4 |                14.2 |              33.3 |
"""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from classroom import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    arguments,
    cores,
    medians,
    print_machine,
    print_table,
    save_plot,
)

from headrace.torch import DataLoader

LOADERS: dict[str, Callable[..., Any]] = {
    "torch, processes": torch.utils.data.DataLoader,
    "headrace, processes": DataLoader,
    "headrace, threads": partial(DataLoader, worker_kind="thread"),
}
COLOURS = dict(zip(LOADERS, (GREY, BLUE, GREEN), strict=True))
MARKERS = dict(zip(LOADERS, ("s", "o", "^"), strict=True))

Found = dict[tuple[int, str], dict[str, float]]


class Waiting:
    """A sample comes from far away: it takes time, but no core."""

    def __init__(self, seconds: float, length: int) -> None:
        self.seconds, self.length = seconds, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class Counting:
    """A sample is made by Python code: `turns` turns of a loop, on a core, with the interpreter's lock held."""

    def __init__(self, turns: int, length: int) -> None:
        self.turns, self.length = turns, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        count(self.turns)
        return index


def count(turns: int) -> int:
    total = 0
    for number in range(turns):
        total += number
    return total


def turns_in(seconds: float) -> int:
    """How many turns of the loop fit into this time on this machine now: the best of several tries."""
    turns, best = 100_000, float("inf")
    for _ in range(50):
        started = time.perf_counter()
        count(turns)
        best = min(best, time.perf_counter() - started)
    return int(turns * seconds / best)


def step_time(
    dataset: Any, make: Callable[..., Any], workers: int, compute: float, steps: int
) -> dict[str, float]:
    """The mean step of a loop that simulates its compute by sleeping, after the first batches have arrived."""
    batches = iter(make(dataset, batch_size=1, num_workers=workers))
    for _ in range(workers + 1):
        next(batches)
    started = time.perf_counter()
    for _ in range(steps):
        next(batches)
        time.sleep(compute)
    return {"step": (time.perf_counter() - started) / steps}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores, on purpose
    print_machine()
    steps = 4 if options.quick else 24
    length = steps + 40  # the loop never comes near the end, where workers would be less busy

    numbers: Sequence[int] = (0, 2) if options.quick else (0, 1, 2, 3, 4, 8)
    load, compute = 0.050, 0.015
    waiting = measure(Waiting(load, length), numbers, compute, steps, options.rounds)
    waiting_theory = {n: max(compute, load / n) if n else load + compute for n in numbers}
    show(
        f"loading waits for {load * 1e3:.0f} ms, a step computes for {compute * 1e3:.0f} ms",
        waiting,
        waiting_theory,
    )

    numbers = (0, 2) if options.quick else (0, 1, 2, 4, 8)
    load, compute = 0.020, 0.005
    counting = measure(Counting(turns_in(load), length), numbers, compute, steps, options.rounds)
    # A step without workers shows how long the work really takes, which depends on what else the machine does.
    load = statistics.median(counting[0, name]["step"] for name in LOADERS) - compute
    counting_theory = {n: max(compute, load / min(n, cores())) if n else load + compute for n in numbers}
    show(
        f"loading computes for {load * 1e3:.1f} ms (as measured without workers) on one of {cores()} cores, "
        f"a step takes {compute * 1e3:.0f} ms",
        counting,
        counting_theory,
    )

    panels = [
        ("Loading waits 50 ms, a step computes 15 ms", waiting, waiting_theory),
        (f"Loading is Python: {load * 1e3:.0f} ms of a core, step 5 ms", counting, counting_theory),
    ]
    save_plot(options, "workers", (9, 3.7), lambda figure: paint(figure, panels))


def measure(dataset: Any, numbers: Sequence[int], compute: float, steps: int, rounds: int) -> Found:
    candidates = {
        (n, name): partial(step_time, dataset, make, n, compute, steps)
        for n in numbers
        for name, make in LOADERS.items()
    }
    return medians(candidates, rounds)


def show(title: str, found: Found, theory: dict[int, float]) -> None:
    rows = [
        [str(n), limit * 1e3, *(found[n, name]["step"] * 1e3 for name in LOADERS)]
        for n, limit in theory.items()
    ]
    print_table(f"{title}; mean step in ms", ["workers", "theory", *LOADERS], rows)


def paint(figure: Any, panels: list[tuple[str, Found, dict[int, float]]]) -> None:
    for axes, (title, found, theory) in zip(figure.subplots(1, 2), panels, strict=True):
        numbers = list(theory)
        limits = [each * 1e3 for each in theory.values()]
        axes.plot(numbers, limits, color=ORANGE, linewidth=5, alpha=0.35, label="theory")
        for name in LOADERS:
            steps = [found[n, name]["step"] * 1e3 for n in numbers]
            axes.plot(numbers, steps, color=COLOURS[name], marker=MARKERS[name], linewidth=1, label=name)
        axes.set(title=title, xlabel="workers", ylabel="step, ms", ylim=(0, None), xticks=numbers)
    axes.axvline(cores(), color=GREY, linestyle=":", linewidth=1)
    axes.text(cores() + 0.1, 1, f"{cores()} cores", color=GREY)
    figure.axes[0].legend(loc="upper right")


if __name__ == "__main__":
    main()
