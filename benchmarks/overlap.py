"""Does the training step wait for data?

A simulated step of 16 ms on data that takes 8 ms to make, and the other way round. A loader that works ahead gives
steps of max(load, compute), or less than load where two threads make batches side by side; one that does not, their
sum. The load is once a wait (as of a disk or a network) and once arithmetic (as of a decoder, without the
interpreter's lock).
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from machine import arguments, describe, interleave, print_table, spread, write_results

import headrace

CASES = {"load 8 ms, compute 16 ms": (0.008, 0.016), "load 16 ms, compute 8 ms": (0.016, 0.008)}

Work = Callable[[dict[str, Any]], dict[str, Any]]


def main() -> None:
    parser = arguments(__doc__ or "", "overlap")
    parser.add_argument("--steps", type=int, help="steps of a run (100)")
    parser.add_argument("--rounds", type=int, help="rounds (5)")
    options = parser.parse_args()
    steps = options.steps or (5 if options.quick else 100)
    rounds = options.rounds or (1 if options.quick else 5)
    machine = describe()
    candidates: dict[str, Callable[[], float]] = {}
    for case, (load, compute) in CASES.items():
        for kind, work in (("waiting", waiting(load)), ("arithmetic", arithmetic(load))):
            for workers, prefetch in ((1, 4), (2, 4), (1, 0)):
                name = f"{case}; {kind}; {f'{workers} threads' if prefetch else 'no prefetch'}"
                candidates[name] = lambda c=compute, w=work, n=workers, p=prefetch: run(w, c, n, p, steps)
    figures = interleave(candidates, rounds)
    body: dict[str, Any] = {"machine": machine, "steps": steps, "step_seconds": {}, "to_longer_of_both": {}}
    for name, seconds in figures.items():
        longer = max(CASES[name.split(";")[0]])
        body["step_seconds"][name] = spread(seconds)
        body["to_longer_of_both"][name] = round(statistics.median(seconds) / longer, 4)
    body["targets"] = {"load 8 ms, compute 16 ms; ...; to_longer_of_both": "at most 1.05"}
    write_results(options, "overlap", body)
    print_table(
        f"median step of {steps}",
        ["case", "ms", "to the longer of both"],
        [[n, statistics.median(s) * 1000, body["to_longer_of_both"][n]] for n, s in figures.items()],
    )


def run(work: Work, compute: float, workers: int, prefetch: int, steps: int) -> float:
    """The median step, the first few left out."""
    data = headrace.from_arrays({"x": np.zeros((64, 8), dtype=np.float32)})
    loader = headrace.Loader(
        data, batch_size=8, epochs=None, workers=workers, prefetch=prefetch, rank=0, world_size=1
    ).map(work, per="batch")
    batches = iter(loader)
    next(batches)
    taken = []
    for _ in range(steps):
        started = time.perf_counter()
        next(batches)
        time.sleep(compute)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[len(taken) // 5 :])


def waiting(seconds: float) -> Work:
    def work(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(seconds)
        return batch

    return work


def arithmetic(seconds: float) -> Work:
    values = np.random.default_rng(0).random(50_000)

    def work(batch: dict[str, Any]) -> dict[str, Any]:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            np.sqrt(values)
        return batch

    return work


if __name__ == "__main__":
    main()
