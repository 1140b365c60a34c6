"""What does it cost to be measured?

counting   a stage that is counted, and a loop that is watched, in microseconds
loaders    rows of 2,048 tokens with headrace.Loader, and batches of 32 small samples with the drop-in DataLoader, with
           counting and with counting taken out, in turns: the time of a batch with, to the time without
agreement  a simulated machine (a sample loads in 4 ms, asleep, in up to 4 workers at once; a step computes 2 ms): does
           `headrace.tune` give the same answer each time?
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from machine import arguments, describe, interleave, print_table, ratio, spread, write_results

import headrace
from headrace.observe.counting import Counters, Watch, now, spent, working_for

TARGETS = {"with counting, to without": "at most 1.02", "settings found": "one"}


def main() -> None:
    parser = arguments(__doc__ or "", "measuring")
    parser.add_argument("--rounds", type=int, help="rounds (15)")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 15)
    body: dict[str, Any] = {"machine": describe(), "targets": TARGETS}
    body["counting"] = counting_cost(1000 if options.quick else 100_000)
    body["loaders"] = loaders(options.quick, rounds)
    body["agreement"] = agreement(1 if options.quick else 5, 2 if options.quick else 20)
    write_results(options, "measuring", body)


def counting_cost(times: int) -> dict[str, float]:
    counters = Counters()
    watch = Watch(counters)
    begun = time.perf_counter()
    for _ in range(times):
        with watch:
            pass
    watched = time.perf_counter() - begun
    begun = time.perf_counter()
    with working_for(counters):
        for _ in range(times):
            spent("gather", now())
    counted = time.perf_counter() - begun
    found = {"stage_microseconds": 1e6 * counted / times, "loop_microseconds": 1e6 * watched / times}
    print_table("Counting", ["what", "us"], [[name, value] for name, value in found.items()])
    return found


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """The same loaders with counting taken out."""
    add, receive = Counters.add, Counters.receive
    enter, leave = Watch.__enter__, Watch.__exit__
    Counters.add = Counters.receive = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    Watch.__enter__ = Watch.__exit__ = lambda *_: None  # type: ignore[method-assign,assignment]
    queue, Counters.see_queue = Counters.see_queue, lambda *_: None  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Counters.add, Counters.receive, Counters.see_queue = add, receive, queue  # type: ignore[method-assign]
        Watch.__enter__, Watch.__exit__ = enter, leave  # type: ignore[method-assign]


def loaders(quick: bool, rounds: int) -> dict[str, Any]:
    from headrace.torch import DataLoader

    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6, 1, 500 if quick else 20_000).astype(int) + 1
    dataset = headrace.from_arrays({"tokens": [rng.integers(0, 99, n).astype(np.uint16) for n in lengths]})
    batches = 5 if quick else 400
    kinds: dict[str, Callable[[], Any]] = {
        "Loader": lambda: headrace.Loader(dataset, seq_len=2048, batch_size=32, epochs=None),
        "DataLoader, in the loop": lambda: DataLoader(list(range(32 * 2000)), batch_size=32),
        "DataLoader, 2 threads": lambda: DataLoader(
            list(range(32 * 2000)), batch_size=32, num_workers=2, worker_kind="thread"
        ),
        "DataLoader, 2 processes": lambda: DataLoader(list(range(32 * 2000)), batch_size=32, num_workers=2),
    }
    answer, rows = {}, []
    for name, make in kinds.items():
        figures = interleave(
            {
                "with": lambda make=make: timed(make, batches),
                "without": lambda make=make: without(make, batches),
            },
            rounds,
        )
        to = ratio(figures["with"], figures["without"])
        answer[name] = {
            "microseconds": {
                each: spread([1e6 * value for value in values]) for each, values in figures.items()
            },
            "with_to_without": to,
        }
        rows.append([name, 1e6 * min(figures["with"]), 1e6 * min(figures["without"]), to["median"]])
    print_table("A batch, us (best)", ["loader", "with counting", "without", "with / without"], rows)
    return answer


def timed(make: Callable[[], Any], batches: int) -> float:
    """Seconds of a batch, after the first ones."""
    iterator = iter(make())
    for _ in range(5):
        next(iterator)
    begun = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    return (time.perf_counter() - begun) / batches


def without(make: Callable[[], Any], batches: int) -> float:
    with uncounted():
        return timed(make, batches)


def simulated(num_workers: int = 0, batch_size: int = 4) -> Iterator[Any]:
    batch = np.zeros((batch_size, 8))
    while True:
        time.sleep(batch_size * 4e-3 / max(1, min(num_workers, 4)))
        yield batch


def agreement(times: int, budget_seconds: float) -> dict[str, Any]:
    found = [headrace.tune(simulated, compute_ms=2, budget_seconds=budget_seconds) for _ in range(times)]
    settings = [str(each.recommended) for each in found]
    print_table(
        "Tuning the same machine",
        ["setting", "times"],
        [[each, settings.count(each)] for each in sorted(set(settings))],
    )
    return {
        "settings": settings,
        "gains": [each.gain and each.gain["median"] for each in found],
        "measurements": [len(each.trials) for each in found],
        "seconds": [each.seconds for each in found],
    }


if __name__ == "__main__":
    main()
