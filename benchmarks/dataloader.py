"""Is the drop-in DataLoader faster than the one it takes the place of?

Against PyTorch's DataLoader and torchdata's StatefulDataLoader, in turns:

throughput   batches of 32 images (uint8, 4.8 MB) and of 32 rows of 2,049 tokens (int64, 0.5 MB) from memory maps,
             with 2 workers: processes and threads, and the processor's time for a batch; beside them the limit of
             one thread that only copies
steps        a sample takes 50 ms to load and a step 15 ms, both asleep: a step should take max(15, 50 / workers)
start        a dataset that pickles to 200 MB, 8 spawned workers: until the first batch, and the memory of a worker
overhead     without workers, what a batch of 32 numbers costs beside the numbers
snapshots    an iterable that keeps state, a step of 1 ms: what each batch costs the loop
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dataloader_rivals as rivals
from machine import arguments, describe, interleave, memory_of, print_table, ratio, spread, write_results

QUESTIONS = ("throughput", "steps", "start", "overhead", "snapshots")
LOAD, COMPUTE = 0.05, 0.015
TARGETS = {
    "throughput, processes, to torch": "at least 2, with less cpu",
    "throughput, threads, to torch": "at least 5",
    "steps, to the limit": "at most 1.05, and not behind torch",
    "start, to torch": "at most 0.5, memory not higher",
    "overhead, to torch": "at most 1",
    "snapshots, share of a step": "under 0.05",
}


def main() -> None:
    parser = arguments(__doc__ or "", "dataloader")
    parser.add_argument("--rounds", type=int, help="rounds (7)")
    parser.add_argument("--only", choices=QUESTIONS, action="append", help="one question; may be repeated")
    parser.add_argument("--start-one", nargs=4, help="internal: one start, in a process of its own")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.start_one:
        start_one(*options.start_one)
        return
    rounds = options.rounds or (1 if options.quick else 7)
    body: dict[str, Any] = {"machine": describe(), "versions": versions(), "targets": TARGETS}
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        for question in options.only or QUESTIONS:
            body[question] = globals()[question](Path(folder), options.quick, rounds)
    write_results(options, "dataloader", body)


def versions() -> dict[str, str]:
    import importlib.metadata

    return {
        name: importlib.metadata.version(name)
        for name in ("torch", *(["torchdata"] if "torchdata" in rivals.loaders() else []))
    }


def throughput(folder: Path, quick: bool, rounds: int) -> dict[str, Any]:
    paths = rivals.write_rows(folder, 16 if quick else 384)
    batches = {"images": 5 if quick else 250, "tokens": 5 if quick else 600}
    answer: dict[str, Any] = {}
    for kind in ("images", "tokens"):
        runs: dict[str, list[dict[str, float]]] = {}
        candidates: dict[str, Callable[[], float]] = {}
        for name, make in _throughput_candidates(kind, paths).items():
            candidates[name] = _recorded(runs, name, make, batches[kind])
        figures = interleave(candidates, rounds)
        cpu = {name: [run["cpu_ms"] for run in each] for name, each in runs.items()}
        answer[kind] = {
            name: {
                "batches_per_second": spread(figures[name]),
                "cpu_ms_per_batch": spread(cpu[name]),
                "to_torch": ratio(figures[name], figures["torch"]),
                "cpu_to_torch": ratio(cpu[name], cpu["torch"]),
            }
            for name in figures
        }
        print_table(
            f"{kind}, 2 workers",
            ["loader", "batches/s", "to torch", "lowest", "highest", "cpu ms/batch"],
            [
                [
                    name,
                    each["batches_per_second"]["median"],
                    *(each["to_torch"][which] for which in ("median", "lowest", "highest")),
                    each["cpu_ms_per_batch"]["median"],
                ]
                for name, each in answer[kind].items()
            ],
        )
    return answer


def _throughput_candidates(kind: str, paths: dict[str, Path]) -> dict[str, Callable[[int], dict[str, float]]]:
    def on_map(make: Callable[..., Any], **options: Any) -> Callable[[int], dict[str, float]]:
        def run(batches: int) -> dict[str, float]:
            dataset = rivals.Mapped(paths[kind], 32 * (batches + 50))
            return rivals.throughput(make, dataset, batches, num_workers=2, **options)

        return run

    def on_dataset(make: Callable[..., Any], **options: Any) -> Callable[[int], dict[str, float]]:
        def run(batches: int) -> dict[str, float]:
            dataset = rivals.Repeated(paths[f"{kind} dataset"], 32 * (batches + 50))
            return rivals.throughput(
                make, dataset, batches, num_workers=2, collate_fn=rivals.as_tensors, **options
            )

        return run

    made = rivals.loaders()
    candidates = {name: on_map(make) for name, make in made.items()}
    candidates["headrace threads"] = on_map(made["headrace"], worker_kind="thread")
    candidates["one copy, the limit of a thread"] = partial(rivals.copying, paths[kind])
    candidates["torch on a Headrace dataset"] = on_dataset(made["torch"])
    candidates["headrace on a Headrace dataset"] = on_dataset(made["headrace"])
    candidates["headrace threads on a Headrace dataset"] = on_dataset(made["headrace"], worker_kind="thread")
    return candidates


def _recorded(
    runs: dict[str, list[dict[str, float]]], name: str, run: Callable[[int], dict[str, float]], batches: int
) -> Callable[[], float]:
    def once() -> float:
        figures = run(batches)
        runs.setdefault(name, []).append(figures)
        return figures["batches_per_second"]

    return once


def steps(folder: Path, quick: bool, rounds: int) -> dict[str, Any]:
    count = 5 if quick else 100
    answer, rows = {}, []
    for workers in (2,) if quick else (1, 2, 4, 8):
        figures = interleave(_step_candidates(workers, count), min(rounds, 5))
        limit = max(COMPUTE, LOAD / workers)
        found = {
            name: {
                "seconds": spread(taken),
                "to_limit": statistics.median(taken) / limit,
                "to_torch": ratio(taken, figures["torch"]),
            }
            for name, taken in figures.items()
        }
        answer[str(workers)] = found
        for name, each in found.items():
            shown = [each["seconds"]["median"] * 1000, each["to_limit"], each["to_torch"]["median"]]
            rows.append([f"{workers} workers, {name}", *shown])
    title = f"mean step of {count}, load 50 ms, compute 15 ms"
    print_table(title, ["loader", "ms", "to the limit", "to torch"], rows)
    return answer


def _step_candidates(workers: int, count: int) -> dict[str, Callable[[], float]]:
    made = rivals.loaders()
    run = partial(rivals.step_seconds, load=LOAD, compute=COMPUTE, steps=count, num_workers=workers)
    candidates: dict[str, Callable[[], float]] = {name: partial(run, make) for name, make in made.items()}
    candidates["headrace threads"] = partial(run, made["headrace"], worker_kind="thread")
    return candidates


def start(folder: Path, quick: bool, rounds: int) -> dict[str, Any]:
    """Each start in a process of its own: what one leaves behind does not help the next."""
    megabytes, answer, rows = 5 if quick else 200, {}, []
    for kind in ("paths",) if quick else ("paths", "arrays"):
        for workers in (1,) if quick else (1, 8):
            reports: dict[str, list[dict[str, float]]] = {}
            candidates = {
                name: _started(reports, name, kind, workers, megabytes) for name in ("torch", "headrace")
            }
            figures = interleave(candidates, min(rounds, 3))
            key = f"{kind}, {workers} workers"
            answer[key] = {
                name: {
                    "first_batch_seconds": spread(taken),
                    "worker_mb": {
                        which: statistics.median(report[which] for report in reports[name])
                        for which in ("uss", "pss")
                    },
                    "to_torch": ratio(taken, figures["torch"]),
                }
                for name, taken in figures.items()
            }
            rows += [
                [
                    f"{key}, {name}",
                    each["first_batch_seconds"]["median"],
                    each["to_torch"]["median"],
                    *each["worker_mb"].values(),
                ]
                for name, each in answer[key].items()
            ]
    print_table(
        f"spawned workers, a dataset of {megabytes} MB",
        ["loader", "first batch, s", "to torch", "USS of a worker, MB", "PSS"],
        rows,
    )
    return answer


def _started(
    reports: dict[str, list[dict[str, float]]], name: str, kind: str, workers: int, megabytes: int
) -> Callable[[], float]:
    def once() -> float:
        command = [sys.executable, __file__, "--start-one", name, kind, str(workers), str(megabytes)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        report = json.loads(ran.stdout.splitlines()[-1])
        reports.setdefault(name, []).append(report)
        seconds: float = report["seconds"]
        return seconds

    return once


def start_one(name: str, kind: str, workers: str, megabytes: str) -> None:
    dataset = {"paths": rivals.Paths, "arrays": rivals.Arrays}[kind](int(megabytes))
    started = time.perf_counter()
    loader = rivals.loaders()[name](
        dataset, batch_size=4, num_workers=int(workers), multiprocessing_context="spawn"
    )
    iterator = iter(loader)
    next(iterator)
    seconds = time.perf_counter() - started
    # Until all are up: memory that is still being filled does not count.
    for _ in range(4 * int(workers)):
        next(iterator)
    largest = [memory_of(pid) for pid in _workers(os.getpid())]
    worst = {which: max(each[which] for each in largest) for which in ("uss", "pss")}
    print(json.dumps({"seconds": seconds, **worst}))


def _workers(pid: int) -> list[int]:
    import psutil

    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def overhead(folder: Path, quick: bool, rounds: int) -> dict[str, Any]:
    batches = 50 if quick else 3000
    candidates = {
        name: lambda make=make: rivals.overhead_seconds(make, batches)
        for name, make in rivals.loaders().items()
    }
    figures = interleave(candidates, 3 * rounds)
    answer = {
        name: {"seconds": spread(taken), "to_torch": ratio(taken, figures["torch"])}
        for name, taken in figures.items()
    }
    rows = [
        [name, each["seconds"]["median"] * 1e6, each["to_torch"]["median"]] for name, each in answer.items()
    ]
    print_table("no workers, batches of 32 numbers", ["loader", "microseconds", "to torch"], rows)
    return answer


def snapshots(folder: Path, quick: bool, rounds: int) -> dict[str, Any]:
    count, step = (20 if quick else 1500), 0.001
    candidates: dict[str, Callable[[], float]] = {}
    for name, make in rivals.loaders().items():
        if name == "torch":
            continue
        for every, ask in ((0, False), (1, False), (1, True)):
            shown = (
                "no snapshots" if not every else "state_dict() each step" if ask else "a snapshot each step"
            )
            candidates[f"{name}, {shown}"] = lambda make=make, every=every, ask=ask: rivals.snapshot_seconds(
                make, every, ask, count, step
            )
    figures = interleave(candidates, min(rounds, 5))
    answer = {}
    for name, taken in figures.items():
        without = figures[f"{name.split(',')[0]}, no snapshots"]
        extra = [a - b for a, b in zip(taken, without, strict=True)]
        answer[name] = {"loop_waits_seconds": spread(taken), "share_of_step": statistics.median(extra) / step}
    rows = [
        [name, each["loop_waits_seconds"]["median"] * 1e6, each["share_of_step"]]
        for name, each in answer.items()
    ]
    print_table(
        "a step of 1 ms, 2 processes", ["loader", "microseconds", "more than without, of a step"], rows
    )
    return answer


if __name__ == "__main__":
    main()
