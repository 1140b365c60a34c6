"""A noisy neighbour: another program keeps all cores busy. Batches made in advance keep the loop from waiting.

A batch takes a few ms of arithmetic to make, and a step takes 12 ms of the accelerator (simulated by sleeping). On a
quiet machine, batches are always in time. With a neighbour on every core, the thread that makes them has to take turns,
and now and then a batch is late. Measured on two cores:

    | machine   | batches ready | wait, p50 | wait, p99 | step, p50 | step, p99 |
    | quiet     |             0 |      2.89 |      3.99 |      15.1 |      16.1 |
    | quiet     |             1 |      0.10 |      0.19 |      12.3 |      12.5 |
    | neighbour |             0 |      2.94 |      7.96 |      15.1 |      20.8 |   each step pays for its batch
    | neighbour |             1 |      0.08 |      0.22 |      12.2 |      16.0 |   one batch ready is enough here
    | neighbour |            16 |      0.08 |      2.22 |      12.2 |      16.1 |   and more gain nothing

A queue hides delays that are shorter than the steps it holds; here, batches are late by less than one step. What
remains in the p99 of the step is not caused by the data: the loop itself has to get a core back after it has slept. And
a queue does not create time: if the neighbour leaves less of a core than the batches need, any queue runs empty.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from classroom import BLUE, GREY, ORANGE, arguments, cores, medians, print_machine, print_table, save_plot

import headrace

LOAD, COMPUTE = 0.002, 0.012
READY = (0, 1, 4, 16)
NEIGHBOURS = {"quiet": 0, "neighbour": 1}
"""The number of busy processes for each core."""
START_SECONDS = 60

Work = Callable[[dict[str, Any]], dict[str, Any]]
Found = dict[tuple[str, int], dict[str, float]]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    print_machine()
    steps, depths = (8, READY[::2]) if options.quick else (240, READY)
    work = arithmetic(LOAD)
    found = medians(
        {
            (name, ready): partial(step_times, work, ready, each * cores(), steps)
            for name, each in NEIGHBOURS.items()
            for ready in depths
        },
        options.rounds,
    )
    show(options, steps, depths, found)


def arithmetic(seconds: float) -> Work:
    """As much work as takes this long alone on a core: the same work each time, however long it then takes."""
    values = np.random.default_rng(0).random(200_000)
    result, best = np.empty_like(values), float("inf")
    for _ in range(100):
        started = time.perf_counter()
        np.sqrt(values, out=result)
        best = min(best, time.perf_counter() - started)
    turns = max(1, round(seconds / best))

    def work(batch: dict[str, Any]) -> dict[str, Any]:
        for _ in range(turns):
            np.sqrt(values, out=result)  # releases the interpreter's lock, as a decoder would
        return batch

    return work


def burn(all_started: Any) -> None:
    all_started.wait(START_SECONDS)
    while True:
        sum(range(10_000))


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    all_started = context.Barrier(count + 1)
    crew = [context.Process(target=burn, args=(all_started,), daemon=True) for _ in range(count)]
    try:
        for each in crew:
            each.start()
        all_started.wait(START_SECONDS)
        yield
    finally:
        for each in crew:
            each.kill()
            each.join()


def step_times(work: Work, ready: int, burning: int, steps: int) -> dict[str, float]:
    """The p50 and p99 of one run, in ms: of the waits for a batch, and of the whole steps."""
    data = headrace.from_arrays({"x": np.zeros((64, 8), dtype=np.float32)})
    loader = headrace.Loader(data, batch_size=8, epochs=None, workers=1, prefetch=ready, rank=0, world_size=1)
    waits, whole = np.zeros(steps), np.zeros(steps)
    with neighbours(burning):
        batches = iter(loader.map(work, per="batch"))
        next(batches)
        time.sleep(ready * LOAD * 4)  # until the queue is full
        for step in range(steps):
            started = time.perf_counter()
            next(batches)
            waits[step] = time.perf_counter() - started
            time.sleep(COMPUTE)
            whole[step] = time.perf_counter() - started
        del batches
    return {
        f"{name}, p{quantile}": float(np.percentile(times, quantile)) * 1e3
        for name, times in (("wait", waits), ("step", whole))
        for quantile in (50, 99)
    }


def show(options: argparse.Namespace, steps: int, depths: tuple[int, ...], found: Found) -> None:
    columns = [f"{what}, p{quantile}" for what in ("wait", "step") for quantile in (50, 99)]
    print_table(
        f"ms, for {steps} steps of {COMPUTE * 1e3:.0f} ms; a batch takes {LOAD * 1e3:.0f} ms or more of a core",
        ["machine", "batches ready", *columns],
        [
            [name, ready, *(found[name, ready][column] for column in columns)]
            for name in NEIGHBOURS
            for ready in depths
        ],
    )
    save_plot(options, "noisy_neighbour", (8.5, 3.6), lambda figure: paint(figure, depths, found))


def paint(figure: Any, depths: tuple[int, ...], found: Found) -> None:
    titles = {"wait": "The loop waits for a batch", "step": "The whole step"}
    for axes, (what, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for name, colour in zip(NEIGHBOURS, (BLUE, ORANGE), strict=True):
            for quantile, line, filled in (("p50", "--", "white"), ("p99", "-", colour)):
                times = [found[name, ready][f"{what}, {quantile}"] for ready in depths]
                style = {"color": colour, "linestyle": line, "marker": "o", "markerfacecolor": filled}
                axes.plot(range(len(depths)), times, label=f"{name}, {quantile}", **style)
        axes.set(title=title, xlabel="batches that wait ready", ylabel="ms", ylim=(0, None))
        axes.set_xticks(range(len(depths)), [str(ready) for ready in depths])
    axes.axhline(COMPUTE * 1e3, color=GREY, linestyle=":", linewidth=1)
    axes.text(0, COMPUTE * 1e3 - 0.3, "compute", color=GREY, va="top")
    figure.axes[0].legend(loc="upper right")


if __name__ == "__main__":
    main()
