"""Map a dataset, or read it into memory? What each costs to open, to read twice, and to hold in two processes.

A dataset of 256 MB is opened as a memory map (`headrace.open(path)`) and in memory (`in_memory=True`), each time by a
new process and with a cold page cache. Then all of it is read twice. This is what you will see:

    |                      | map    | in memory |
    | open, ms             | 3      | 211       |     a map reads nothing yet; in memory, everything is read now
    | first pass, MB/s     | 1,905  | 15,177    |     the map reads now, as pages are touched
    | second pass, MB/s    | 14,436 | 15,042    |     the page cache is memory too
    | USS, alone, MB       | 268    | 268       |     alone, both look the same
    | USS, one of two, MB  | 0      | 268       |     the pages of a map exist once, for all processes
    | PSS, one of two, MB  | 134    | 268       |

RSS counts all pages that a process has mapped, PSS divides each page by the number of processes that share it, and USS
counts only the pages of this process alone. The sum of the PSS is the memory in use; the sum of the RSS counts shared
pages twice.
"""

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from classroom import BLUE, ORANGE, arguments, medians, need_linux, print_machine, print_table, save_plot
from page_cache import drop, resident_share

import headrace

KINDS = {"map": False, "in memory": True}
ROW_BYTES = 8192
TIMEOUT_SECONDS = 120

Figures = dict[str, float]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    need_linux("/proc/self/smaps_rollup and the page cache")
    print_machine()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        path = Path(folder) / "data"
        write(Path(folder) / "small", 1)
        megabytes = write(path, 16 if options.quick else 256)
        left = cool(path)
        if left > 0.05:
            print(
                f"the page cache kept {left:.0%} of the data (a file system in memory?): first passes are not cold"
            )
        found = medians({kind: partial(measure, path, kind, megabytes) for kind in KINDS}, options.rounds)
    show(options, megabytes, found)


def write(path: Path, megabytes: int) -> float:
    rng = np.random.default_rng(0)
    with headrace.Writer(path, {"row": f"uint64[{ROW_BYTES // 8}]"}) as writer:
        for _ in range(megabytes):
            block = rng.integers(0, 2**63, (2**20 // ROW_BYTES, ROW_BYTES // 8), dtype=np.uint64)
            writer.write_columns({"row": block})
    return megabytes * 2**20 / 1e6


def cool(path: Path) -> float:
    """Drop the files of a dataset from the page cache; returns the share of the largest file that is still there."""
    files = [each for each in path.rglob("*") if each.is_file()]
    for each in files:
        drop(each)
    return resident_share(max(files, key=lambda each: each.stat().st_size))


def measure(path: Path, kind: str, megabytes: float) -> Figures:
    """One process alone, then two side by side."""
    cool(path)
    (alone,) = side_by_side(path, kind, 1)
    two = side_by_side(path, kind, 2)[0]
    figures = {name: megabytes / alone[name] for name in ("first pass", "second pass")}
    figures |= {name: alone[name] for name in ("open", "first record", "major", "minor open", "minor pass")}
    figures |= {f"{name}, alone": alone[name] for name in ("RSS", "PSS", "USS")}
    return figures | {f"{name}, one of two": two[name] for name in ("RSS", "PSS", "USS")}


def side_by_side(path: Path, kind: str, count: int) -> list[Figures]:
    """New processes that open, read and hold the dataset; memory is measured while all of them hold it."""
    context = multiprocessing.get_context("spawn")
    all_hold = context.Barrier(count)
    pipes = [context.Pipe() for _ in range(count)]
    crew = [
        context.Process(target=hold, args=(str(path), KINDS[kind], theirs, all_hold)) for _, theirs in pipes
    ]
    for worker in crew:
        worker.start()
    reports = []
    for mine, theirs in pipes:
        theirs.close()  # so that the end of the pipe shows when a worker has died
        if not mine.poll(TIMEOUT_SECONDS):
            raise TimeoutError(f"{kind}: no report within {TIMEOUT_SECONDS} s")
        reports.append(mine.recv())
    for worker in crew:
        worker.join(TIMEOUT_SECONDS)
    return reports


def hold(path: str, in_memory: bool, report: Any, all_hold: Any) -> None:
    read_through(
        headrace.open(Path(path).with_name("small"), in_memory=in_memory)
    )  # so that everything is imported before the measurement
    before, faults = memory(), [page_faults()]
    started = time.perf_counter()
    dataset = headrace.open(path, in_memory=in_memory)
    times = [time.perf_counter() - started]
    _ = dataset[len(dataset) * 3 // 4]["row"][0]  # far from the parts that opening has read
    times.append(time.perf_counter() - started)
    faults.append(page_faults())
    for _ in range(2):
        started = time.perf_counter()
        read_through(dataset)
        times.append(time.perf_counter() - started)
        faults.append(page_faults())
    all_hold.wait(TIMEOUT_SECONDS)
    after = memory()
    all_hold.wait(TIMEOUT_SECONDS)
    figures = {name: after[name] - before[name] for name in after}
    figures |= dict(zip(("open", "first record", "first pass", "second pass"), times, strict=True))
    figures["major"] = faults[3][1] - faults[0][1]
    figures["minor open"], figures["minor pass"] = faults[1][0] - faults[0][0], faults[2][0] - faults[1][0]
    report.send(figures)


def read_through(dataset: headrace.Dataset) -> None:
    for first in range(0, len(dataset), 128):
        np.bitwise_xor.reduce(dataset[first : first + 128]["row"], axis=None)


def page_faults() -> tuple[int, int]:
    """The minor and major page faults of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_majflt


def memory() -> Figures:
    """The memory of this process in MB, from the totals that the kernel keeps over its maps."""
    kilobytes = {}
    for line in Path(f"/proc/{os.getpid()}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        kilobytes[name] = int(rest.split()[0])
    sizes = {"RSS": kilobytes["Rss"], "PSS": kilobytes["Pss"]}
    sizes["USS"] = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {name: size * 1024 / 1e6 for name, size in sizes.items()}


def show(options: argparse.Namespace, megabytes: float, found: dict[str, Figures]) -> None:
    rows: list[list[Any]] = [
        [f"{label}, ms", *(found[kind][name] * 1e3 for kind in KINDS)]
        for label, name in (("open", "open"), ("open and first record", "first record"))
    ]
    rows += [
        [f"{name}, MB/s", *(found[kind][name] for kind in KINDS)] for name in ("first pass", "second pass")
    ]
    rows += [
        [label, *(int(found[kind][name]) for kind in KINDS)]
        for label, name in (
            ("major page faults", "major"),
            ("minor page faults, opening", "minor open"),
            ("minor page faults, first pass", "minor pass"),
        )
    ]
    for which in ("alone", "one of two"):
        names = [f"{name}, {which}" for name in ("RSS", "PSS", "USS")]
        # Differences below half a megabyte come from the interpreter itself.
        rows += [[f"{name}, MB", *(round(found[kind][name]) for kind in KINDS)] for name in names]
    print_table(f"a dataset of {megabytes:.0f} MB, from a cold page cache", ["", *KINDS], rows)
    save_plot(options, "mmap_or_ram", (8.5, 3.6), lambda figure: paint(figure, megabytes, found))


def paint(figure: Any, megabytes: float, found: dict[str, Figures]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
    colours = dict(zip(KINDS, (BLUE, ORANGE), strict=True))
    for place, kind in enumerate(KINDS):
        each = found[kind]
        seconds = [each["open"], *(megabytes / each[name] for name in ("first pass", "second pass"))]
        begun = 0.0
        for shade, length in zip((1, 0.6, 0.3), seconds, strict=True):
            left.barh(-place, length * 1e3, 0.55, left=begun * 1e3, color=colours[kind], alpha=shade)
            begun += length
        words = f"open {seconds[0] * 1e3:.0f} + first pass {seconds[1] * 1e3:.0f} + second {seconds[2] * 1e3:.0f} ms"
        left.text(0, -place + 0.33, words, fontsize=8)
    left.set(title="Time, from a cold page cache", xlabel="ms", yticks=[0, -1], ylim=(-1.5, 0.6))
    left.set_yticklabels(list(KINDS))
    left.grid(axis="y", visible=False)
    names = [f"{name}, {which}" for which in ("alone", "one of two") for name in ("RSS", "PSS", "USS")]
    for shift, kind in zip((-0.2, 0.2), KINDS, strict=True):
        places = [place + shift + (place > 2) * 0.5 for place in range(6)]
        right.bar(places, [found[kind][name] for name in names], 0.38, color=colours[kind], label=kind)
    right.set(title="Memory of one process", ylabel="MB", ylim=(0, megabytes * 1.4))
    right.set_xticks(
        [0, 1, 2, 3.5, 4.5, 5.5], ["RSS\n", "PSS\nalone", "USS\n", "RSS\n", "PSS\none of two", "USS\n"]
    )
    right.grid(axis="x", visible=False)
    right.legend(loc="upper right", ncols=2)


if __name__ == "__main__":
    main()
