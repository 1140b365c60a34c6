"""Loading and computing at the same time: a step takes the longer of the two, not their sum.

A batch takes 10 ms to load, and a step takes some time to compute. Both are simulated by sleeping, like a processor
that waits for a disk and for an accelerator. First each batch is made when it is asked for, then a thread makes batches
ahead:

    | compute, ms | sum | longer | made when asked, ms | made ahead, ms |
    |           5 |  15 |     10 |                15.9 |           10.7 |     the data is the bottleneck
    |          10 |  20 |     10 |                21.0 |           10.6 |     twice as fast
    |          20 |  30 |     20 |                31.1 |           20.3 |     loading costs nothing

The plot shows the same as two curves. Above them are timelines of one short run of each kind:

    made when asked   load    ██      ██      ██            made ahead   load    ██████████████
                      compute   ██████  ██████                           compute   ██████████████████
"""

import time
from functools import partial
from typing import Any

import numpy as np
from classroom import BLUE, GREY, ORANGE, arguments, medians, print_machine, print_table, save_plot

import headrace

LOAD = 0.010
COMPUTE = (0.002, 0.005, 0.008, 0.010, 0.012, 0.016, 0.020)
AHEAD = {"made when asked": 0, "made ahead": 4}
"""How many batches may be ready in advance."""
SHOWN_COMPUTE, SHOWN_STEPS = 0.014, 6

Spans = list[tuple[float, float]]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    print_machine()
    compute_times = COMPUTE[1::2] if options.quick else COMPUTE
    steps = 5 if options.quick else 20
    found = medians(
        {
            (how, compute): partial(step_time, prefetch, compute, steps)
            for how, prefetch in AHEAD.items()
            for compute in compute_times
        },
        options.rounds,
    )
    steps_ms = {key: each["step"] * 1e3 for key, each in found.items()}
    print_table(
        f"median of {steps} steps; a batch loads in {LOAD * 1e3:.0f} ms",
        ["compute, ms", "sum", "longer", "made when asked, ms", "made ahead, ms"],
        [
            [f"{compute * 1e3:.0f}", f"{(LOAD + compute) * 1e3:.0f}", f"{max(LOAD, compute) * 1e3:.0f}"]
            + [steps_ms[how, compute] for how in AHEAD]
            for compute in compute_times
        ],
    )
    timelines = {how: run(prefetch, SHOWN_COMPUTE, SHOWN_STEPS) for how, prefetch in AHEAD.items()}
    save_plot(options, "overlap", (8, 5.2), lambda figure: paint(figure, steps_ms, timelines))


def run(prefetch: int, compute: float, steps: int) -> dict[str, Spans]:
    """When batches were loaded and steps computed, in seconds from the start."""
    spans: dict[str, Spans] = {"load": [], "compute": []}
    data = headrace.from_arrays({"x": np.zeros((64, 8), dtype=np.float32)})
    loader = headrace.Loader(
        data, batch_size=8, epochs=None, workers=1, prefetch=prefetch, rank=0, world_size=1
    )

    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        begun = time.perf_counter()
        time.sleep(LOAD)
        spans["load"].append((begun - started, time.perf_counter() - started))
        return batch

    started = time.perf_counter()
    batches = iter(loader.map(slow, per="batch"))
    for _ in range(steps):
        next(batches)
        begun = time.perf_counter()
        time.sleep(compute)  # an accelerator would be busy now, and this processor idle
        spans["compute"].append((begun - started, time.perf_counter() - started))
    return spans


def step_time(prefetch: int, compute: float, steps: int) -> dict[str, float]:
    """The time from the end of one step to the end of the next, without the first two, during which the queue fills."""
    ends = np.array([end for _, end in run(prefetch, compute, steps + 2)["compute"]])
    return {"step": float(np.median(np.diff(ends)[1:]))}


def paint(
    figure: Any, steps_ms: dict[tuple[str, float], float], timelines: dict[str, dict[str, Spans]]
) -> None:
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.35])
    last = max(end for spans in timelines.values() for _, end in spans["compute"]) * 1e3
    for axes, (how, spans) in zip(
        above.subplots(1, 2, sharex=True, sharey=True), timelines.items(), strict=True
    ):
        for lane, (name, colour) in enumerate((("compute", BLUE), ("load", ORANGE))):
            inside = [(a * 1e3, (b - a) * 1e3) for a, b in spans[name] if a * 1e3 < last]
            axes.broken_barh(inside, (lane - 0.36, 0.72), facecolor=colour, edgecolor="white", linewidth=0.8)
        axes.set(
            title=f"{SHOWN_STEPS} steps, batches {how}", yticks=[0, 1], xlabel="ms", xlim=(0, last * 1.02)
        )
        axes.set_yticklabels(["compute", "load"])
        axes.grid(axis="y", visible=False)
    axes = below.subplots()
    compute = sorted({each * 1e3 for _, each in steps_ms})
    fine = np.linspace(0, max(compute) * 1.03, 200)
    axes.plot(fine, fine + LOAD * 1e3, color=GREY, linestyle="--", linewidth=1, label="load + compute")
    axes.plot(fine, np.maximum(fine, LOAD * 1e3), color=GREY, linewidth=1, label="max(load, compute)")
    for how, colour in zip(AHEAD, (ORANGE, BLUE), strict=True):
        axes.plot(compute, [steps_ms[how, each / 1e3] for each in compute], "o", color=colour, label=how)
    axes.set(
        title=f"A step, where a batch loads in {LOAD * 1e3:.0f} ms", xlabel="compute, ms", ylabel="step, ms"
    )
    axes.set(xlim=(0, None), ylim=(0, None), xticks=[0, *(round(each) for each in compute)])
    axes.legend(loc="lower right", ncols=2)


if __name__ == "__main__":
    main()
