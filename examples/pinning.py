"""Copies to a GPU from pageable and from pinned memory: how fast they are, and whether the host waits for them.

This needs a CUDA device; without one, it says so and measures nothing. First it measures a copy alone, by size: how
long the call blocks the host, and how long the copy takes on the device. The figures here are estimates for PCIe 4.0,
because there was no device to measure:

    | copy of 64 MB                     | host blocked, ms | GB/s |
    | pageable                          |              9.0 |    7 |     the driver copies it to its own memory first
    | pageable, non_blocking            |              9.0 |    7 |     the flag does not make it asynchronous
    | pinned, non_blocking              |             0.02 |   25 |     the call returns; the device fetches the bytes
    | pinned first, then non_blocking   |             30.0 |    2 |     pinning each time costs more than it saves

Then it starts a copy of the next batch on a side stream, and queues a step after that. The pinned copy returns at once,
so the device does both in max(copy, compute). The pageable copy blocks the host, so the step begins later:

    | beside 10 ms of work   | both, ms |
    | pageable               |       19 |
    | pageable, non_blocking |       19 |
    | pinned, non_blocking   |       10 |

Times are measured by events on the device (`torch.cuda.Event`), since the host does not know when a copy has finished.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from classroom import BLUE, GREY, ORANGE, RED, arguments, medians, print_machine, print_table, save_plot
from torch import Tensor

SIZES = {"64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24, "64 MB": 2**26, "256 MB": 2**28}
REPEATS = 10

Found = dict[tuple[str, str], dict[str, float]]


def pageable(host: Tensor, device: Tensor) -> None:
    device.copy_(host)


def pageable_not_blocking(host: Tensor, device: Tensor) -> None:
    device.copy_(host, non_blocking=True)


def pinned_before(host: Tensor, device: Tensor) -> None:
    device.copy_(host, non_blocking=True)


def pinned_each_time(host: Tensor, device: Tensor) -> None:
    device.copy_(host.pin_memory(), non_blocking=True)


WAYS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "pageable": pageable,
    "pageable, non_blocking": pageable_not_blocking,
    "pinned, non_blocking": pinned_before,
    "pinned first, then non_blocking": pinned_each_time,
}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    if not torch.cuda.is_available():
        print(
            "there is no CUDA device here: nothing was measured, and nothing is drawn.\n"
            "With a device, this measures how long a copy of 64 KB to 256 MB blocks the host, and its GB/s, from\n"
            "pageable and from pinned memory; and how long a copy and a computation take side by side."
        )
        return
    print_machine()
    print(torch.cuda.get_device_name())
    sizes = dict(list(SIZES.items())[:3]) if options.quick else SIZES
    copies = medians(
        {(label, way): partial(copy_alone, way, size) for label, size in sizes.items() for way in WAYS},
        options.rounds,
    )
    largest = list(sizes)[-1]
    beside = medians(
        {way: partial(copy_beside_work, way, sizes[largest]) for way in list(WAYS)[:3]},
        options.rounds,
    )
    show(options, sizes, copies, largest, beside)


def host_tensor(way: str, size: int) -> Tensor:
    # Write to it once: the first touch of new memory is a page fault, which is not part of a copy.
    return torch.ones(size, dtype=torch.uint8, pin_memory=way == "pinned, non_blocking")


def copy_alone(way: str, size: int) -> dict[str, float]:
    """How long the call blocks the host, and how long the copy takes, from the call to its end on the device."""
    host, device = host_tensor(way, size), torch.empty(size, dtype=torch.uint8, device="cuda")
    kept, taken = [], []
    for repeat in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        WAYS[way](host, device)
        returned = time.perf_counter()
        end.record()
        end.synchronize()
        if repeat >= 2:  # the first two set up the driver
            kept.append(returned - began)
            taken.append(start.elapsed_time(end) / 1e3)
    return {"kept": statistics.median(kept), "GB/s": size / statistics.median(taken) / 1e9}


def copy_beside_work(way: str, size: int) -> dict[str, float]:
    """The copy alone, the work alone, and both: a copy of the next batch on a side stream, then the work of a step.

    The host queues the work as soon as the call for the copy returns. If that is at once, the device does both side by
    side.
    """
    host, device = host_tensor(way, size), torch.empty(size, dtype=torch.uint8, device="cuda")
    matrix = torch.randn(2048, 2048, device="cuda")
    result = torch.empty_like(matrix)
    side, main_stream = torch.cuda.Stream(), torch.cuda.current_stream()

    def work() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix, out=result)

    def copy() -> None:
        # A loader would first make the side stream wait until nothing reads `device` any more; here nothing does.
        with torch.cuda.stream(side):
            WAYS[way](host, device)

    def both() -> None:
        copy()
        work()

    return {
        name: time_on_device(run, side, main_stream)
        for name, run in (("copy", copy), ("work", work), ("both", both))
    }


def time_on_device(run: Callable[[], None], side: Any, main_stream: Any) -> float:
    """Seconds until both streams have finished the work that `run` gives them."""
    taken: list[float] = []
    for repeat in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record(main_stream)
        side.wait_event(start)
        run()
        main_stream.wait_stream(side)
        end.record(main_stream)
        end.synchronize()
        if repeat >= 2:
            taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def show(
    options: argparse.Namespace,
    sizes: dict[str, int],
    copies: Found,
    largest: str,
    beside: dict[str, dict[str, float]],
) -> None:
    print_table(
        f"copies to the device, median of {REPEATS}",
        ["way", "size", "host blocked, ms", "GB/s"],
        [
            [way, label, copies[label, way]["kept"] * 1e3, copies[label, way]["GB/s"]]
            for way in WAYS
            for label in sizes
        ],
    )
    print_table(
        f"a copy of {largest} on a side stream, during other work",
        ["way", "copy alone, ms", "work alone, ms", "both, ms"],
        [[way, *(each[name] * 1e3 for name in ("copy", "work", "both"))] for way, each in beside.items()],
    )
    save_plot(options, "pinning", (9, 3.6), lambda figure: paint(figure, sizes, copies, largest, beside))


def paint(
    figure: Any,
    sizes: dict[str, int],
    copies: Found,
    largest: str,
    beside: dict[str, dict[str, float]],
) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    for way, colour in zip(WAYS, (GREY, ORANGE, BLUE, RED), strict=True):
        speeds = [copies[label, way]["GB/s"] for label in sizes]
        left.plot(list(sizes.values()), speeds, "o-", color=colour, label=way)
    left.set(xscale="log", title="A copy alone", ylabel="GB/s", ylim=(0, None))
    left.set_xticks(list(sizes.values()), list(sizes))
    left.minorticks_off()
    left.legend(loc="upper left", fontsize=8)
    for place, each in enumerate(beside.values()):
        bars = [each[name] * 1e3 for name in ("copy", "work", "both")]
        shown = right.bar(
            [place + shift for shift in (-0.26, 0, 0.26)], bars, 0.24, color=(ORANGE, BLUE, GREY)
        )
    right.set(title=f"A copy of {largest} during other work", ylabel="ms")
    right.set_xticks(range(len(beside)), [way.replace(", ", ",\n") for way in beside])
    right.legend(shown, ("copy alone", "work alone", "both"), loc="upper right", fontsize=8)
    right.margins(y=0.3)
    right.grid(axis="x", visible=False)


if __name__ == "__main__":
    main()
