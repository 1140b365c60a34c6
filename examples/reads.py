"""Reading in order and at random, from a cold page cache: what read-ahead gains, and what it wastes.

First come plain reads of 4 KB to 4 MB, in order or anywhere in the file. In order, the kernel reads ahead, and small
reads find their pages in memory. At random, each read waits for the disk, and small reads reach little of its speed:

    | read   | in order, MB/s | at random, MB/s | in order, us | at random, us |
    | 4 KB   |          1,356 |            72.2 |         1.70 |          51.2 |
    | 64 KB  |          1,722 |             545 |         5.55 |           119 |
    | 4 MB   |          2,174 |             855 |          608 |         4,963 |

Then one byte in each of several pages of a memory map is touched: many pages in order, or a few anywhere. How much is
read depends on read-ahead, which depends on the advice given. Without advice, the kernel reads far around each fault,
in case the surrounding data is needed too. With MADV_RANDOM it reads only what was touched, and waits for each page:

    | touched              | advice     | us a touch | major | minor | touched, MB | read, MB |
    | 4,096 pages in order | normal     |       4.51 |     1 |   262 |        16.8 |     25.2 |
    | 4,096 pages in order | random     |       61.6 | 4,096 |     0 |        16.8 |     16.8 |
    | 256 pages at random  | normal     |      1,061 |    40 |   208 |        1.05 |      256 |
    | 256 pages at random  | random     |       54.8 |   256 |     0 |        1.05 |     1.05 |

(A fault is major if it had to start a read, and minor if the page was in memory and only had to be added to the map.)
"""

import argparse
import mmap
import os
import resource
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from classroom import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    arguments,
    medians,
    need_linux,
    print_machine,
    print_table,
    save_plot,
)
from page_cache import drop, resident_bytes, resident_share

SIZES = {"4 KB": 2**12, "16 KB": 2**14, "64 KB": 2**16, "256 KB": 2**18, "1 MB": 2**20, "4 MB": 2**22}
ORDERS = ("in order", "at random")
ADVICE = {"normal": "MADV_NORMAL", "sequential": "MADV_SEQUENTIAL", "random": "MADV_RANDOM"}
SECONDS = 0.5
"""How long one series of reads may take."""

Found = dict[tuple[str, str], dict[str, float]]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    need_linux("the page cache (posix_fadvise, mincore)")
    print_machine()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        path = Path(folder) / "file"
        write(path, 16 if options.quick else 256)
        drop(path)
        left = resident_share(path)
        print(
            f"dropped from the page cache: {1 - left:.0%} of the file"
            + (
                ""
                if left < 0.05
                else "; the rest stayed (is this a file system in memory?), so nothing here is cold"
            )
        )
        sizes = dict(list(SIZES.items())[::3]) if options.quick else SIZES
        reads = medians(
            {
                (label, order): partial(read, path, size, order)
                for label, size in sizes.items()
                for order in ORDERS
            },
            options.rounds,
        )
        counts = {"in order": 512 if options.quick else 4096, "at random": 64 if options.quick else 256}
        touches = medians(
            {
                (order, advice): partial(touch, path, count, order, advice)
                for order, count in counts.items()
                for advice in ADVICE
            },
            options.rounds,
        )
    show(options, sizes, reads, counts, touches)


def write(path: Path, megabytes: int) -> None:
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(rng.bytes(2**20))


def places(path: Path, size: int, order: str) -> list[int]:
    """The offsets at which the reads of a file begin, each of them once."""
    count = path.stat().st_size // size
    numbers = np.arange(count) if order == "in order" else np.random.default_rng(1).permutation(count)
    return [int(number) * size for number in numbers]


def read(path: Path, size: int, order: str) -> dict[str, float]:
    """Megabytes per second, and the median wait for one read, over the reads that fit into half a second."""
    drop(path)
    buffer, taken = bytearray(size), []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        begun = now = time.perf_counter()
        for place in places(path, size, order):
            os.preadv(descriptor, [buffer], place)
            before, now = now, time.perf_counter()
            taken.append(now - before)
            if now - begun > SECONDS:
                break
    finally:
        os.close(descriptor)
    return {"MB/s": len(taken) * size / (now - begun) / 1e6, "us": statistics.median(taken) * 1e6}


def touch(path: Path, count: int, order: str, advice: str) -> dict[str, float]:
    """Read one byte in each of `count` pages of a map, and count what the kernel did for it."""
    drop(path)
    chosen = places(path, mmap.PAGESIZE, order)[:count]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(getattr(mmap, ADVICE[advice]))
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for place in chosen:
            mapped[place]
        seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "us": seconds / count * 1e6,
        "major": after.ru_majflt - before.ru_majflt,
        "minor": after.ru_minflt - before.ru_minflt,
        "read": resident_bytes(path) / 1e6,
    }


def show(
    options: argparse.Namespace, sizes: dict[str, int], reads: Found, counts: dict[str, int], touches: Found
) -> None:
    print_table(
        "reads, from a cold page cache",
        ["read", *(f"{order}, {unit}" for unit in ("MB/s", "us") for order in ORDERS)],
        [
            [label, *(reads[label, order][unit] for unit in ("MB/s", "us") for order in ORDERS)]
            for label in sizes
        ],
    )
    print_table(
        "touches of a memory map, from a cold page cache",
        ["touched", "advice", "us a touch", "major", "minor", "touched, MB", "read, MB"],
        [
            [
                *(f"{counts[order]:,} pages {order}", advice, each["us"]),
                *(int(each["major"]), int(each["minor"])),
                *(counts[order] * mmap.PAGESIZE / 1e6, each["read"]),
            ]
            for (order, advice), each in touches.items()
        ],
    )
    save_plot(options, "reads", (9, 3.7), lambda figure: paint(figure, sizes, reads, counts, touches))


def paint(figure: Any, sizes: dict[str, int], reads: Found, counts: dict[str, int], touches: Found) -> None:
    left, right = figure.subplots(1, 2)
    for order, colour in zip(ORDERS, (BLUE, ORANGE), strict=True):
        speeds = [reads[label, order]["MB/s"] for label in sizes]
        left.plot(list(sizes.values()), speeds, "o-", color=colour, label=order)
    left.set(xscale="log", yscale="log", title="Plain reads, from a cold page cache", xlabel="size of a read")
    left.set_ylabel("MB/s")
    left.set_xticks(list(sizes.values()), list(sizes))
    left.minorticks_off()
    left.legend(loc="lower right")

    labels = [f"{counts[order]:,} pages\n{order}" for order in ORDERS]
    for place, (advice, colour) in enumerate(zip(ADVICE, (GREY, BLUE, GREEN), strict=True)):
        amounts = [touches[order, advice]["read"] for order in ORDERS]
        at = [group + (place - 1) * 0.26 for group in range(2)]
        bars = right.bar(at, amounts, 0.24, color=colour, label=advice)
        right.bar_label(bars, [f"{amount:.0f}" for amount in amounts], fontsize=8)
    for group, order in enumerate(ORDERS):
        wanted = counts[order] * mmap.PAGESIZE / 1e6
        right.plot([group - 0.4, group + 0.4], [wanted, wanted], color=ORANGE, linewidth=1.5)
    right.plot([], [], color=ORANGE, linewidth=1.5, label="touched")
    right.set(title="A memory map: what was read, by advice", ylabel="MB", yscale="log", ylim=(0.5, 3000))
    right.set_xticks(range(2), labels)
    right.grid(axis="x", visible=False)
    right.legend(loc="upper left", ncols=2)


if __name__ == "__main__":
    main()
