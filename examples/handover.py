"""What it costs to get a batch from the worker that made it to the training loop, in four ways.

When asked, a worker makes a batch (by copying it once from another array). The loop receives the batch and reads from
every page of it.

thread            nothing is sent: both see the same memory
reused segment    the worker copies into memory that both processes have mapped, and sends a message of 8 bytes
new segment       for each batch, the worker creates new shared memory and sends its file descriptor; the loop maps it
pickle, pipe      the worker pickles the batch and writes it to a pipe; the loop reads and unpickles it

    | batch  | thread, us | reused segment, us | new segment, us | pickle, pipe, us |
    | 4 KB   |         20 |                 16 |              86 |               41 |     the cost of waking up
    | 1 MB   |         43 |                 45 |           1,209 |              692 |
    | 16 MB  |      1,163 |              1,244 |          22,521 |           48,811 |     the cost of new pages

New memory is expensive: the kernel zeroes each page, and each process takes a page fault to access it. Reused memory
has already been through that. Pickle pays for copies instead, through a pipe that holds 64 KB at a time.
"""

import mmap
import multiprocessing
import os
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from classroom import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    arguments,
    medians,
    need_linux,
    print_machine,
    print_table,
    save_plot,
)
from numpy.typing import NDArray

SIZES = {"4 KB": 2**12, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24}
ASK, STOP = b"a", b"s"

Batch = NDArray[np.uint8]


# The worker's side: for each way, a function that waits for requests and answers them


def by_reused_segment(end: socket.socket, size: int) -> None:
    source, (memory, descriptor) = np.ones(size, np.uint8), new_segment(size)
    socket.send_fds(end, [b"f"], [descriptor])
    while end.recv(1) == ASK:
        np.copyto(np.frombuffer(memory, np.uint8), source)
        end.sendall(size.to_bytes(8, "little"))


def by_new_segment(end: socket.socket, size: int) -> None:
    source = np.ones(size, np.uint8)
    while end.recv(1) == ASK:
        memory, descriptor = new_segment(size)
        np.copyto(np.frombuffer(memory, np.uint8), source)
        socket.send_fds(end, [b"f"], [descriptor])
        os.close(descriptor)


def by_pipe(asked: Any, answers: Any, size: int) -> None:
    source = np.ones(size, np.uint8)
    while asked.recv_bytes() == ASK:
        answers.send(source.copy())


def new_segment(size: int) -> tuple[mmap.mmap, int]:
    """Memory without a name, which any process that has the descriptor can map."""
    descriptor = os.memfd_create("batch")
    os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size), descriptor


# The loop's side: each of these yields a function that receives the next batch


@contextmanager
def thread(size: int) -> Iterator[Callable[[], Batch]]:
    source = np.ones(size, np.uint8)
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    made: queue.SimpleQueue[Batch] = queue.SimpleQueue()

    def work() -> None:
        while asked.get() == ASK:
            made.put(source.copy())

    def receive() -> Batch:
        asked.put(ASK)
        return made.get()

    maker = threading.Thread(target=work)
    maker.start()
    yield receive
    asked.put(STOP)
    maker.join()


@contextmanager
def segments(target: Callable[..., None], size: int) -> Iterator[Callable[[], Batch]]:
    mine, others = socket.socketpair()
    with worker(target, others, size):
        yield from_segments(mine, size, again=target is by_reused_segment)
        mine.sendall(STOP)
    mine.close()


@contextmanager
def pipe(size: int) -> Iterator[Callable[[], Batch]]:
    asked, ask = multiprocessing.Pipe(duplex=False)
    answers, answer = multiprocessing.Pipe(duplex=False)

    def receive() -> Batch:
        ask.send_bytes(ASK)
        batch: Batch = answers.recv()
        return batch

    with worker(by_pipe, asked, answer, size):
        yield receive
        ask.send_bytes(STOP)
    ask.close()
    answers.close()


@contextmanager
def worker(target: Callable[..., None], *given: Any) -> Iterator[None]:
    """Run `target` in a new process; the ends of connections passed to it are closed in this one."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=given, daemon=True)
    process.start()
    for end in given[:-1]:
        end.close()
    yield
    process.join()


def from_segments(end: socket.socket, size: int, again: bool) -> Callable[[], Batch]:
    def mapped() -> Batch:
        _, (descriptor,), _, _ = socket.recv_fds(end, 1, 1)
        memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        return np.frombuffer(memory, np.uint8)

    def receive_again() -> Batch:
        end.sendall(ASK)
        end.recv(8, socket.MSG_WAITALL)
        return kept

    def receive_new() -> Batch:
        end.sendall(ASK)
        return mapped()

    kept = mapped() if again else np.empty(0, np.uint8)
    return receive_again if again else receive_new


WAYS: dict[str, Callable[[int], Any]] = {
    "thread": thread,
    "reused segment": partial(segments, by_reused_segment),
    "new segment": partial(segments, by_new_segment),
    "pickle, pipe": pipe,
}


def cost(way: str, size: int, batches: int) -> dict[str, float]:
    """The median time from asking for a batch to having read from each of its pages."""
    taken = []
    with WAYS[way](size) as receive:
        for _ in range(batches + 5):
            started = time.perf_counter()
            batch = receive()
            looked = int(batch[:: mmap.PAGESIZE].sum())
            taken.append(time.perf_counter() - started)
            if looked != -(-size // mmap.PAGESIZE):
                raise RuntimeError(f"{way}: the batch received is not the batch sent")
    return {"microseconds": statistics.median(taken[5:]) * 1e6}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    need_linux("anonymous files (memfd_create)")
    print_machine()
    sizes = dict(list(SIZES.items())[::2]) if options.quick else SIZES
    batches = 10 if options.quick else 200
    found = medians(
        {(label, way): partial(cost, way, size, batches) for label, size in sizes.items() for way in WAYS},
        options.rounds,
    )
    rows = [[label, *(found[label, way]["microseconds"] for way in WAYS)] for label in sizes]
    header = ["batch", *(f"{way}, us" for way in WAYS)]
    print_table(
        f"time from asking for a batch to having read from each page, median of {batches}", header, rows
    )
    save_plot(options, "handover", (7.5, 3.4), lambda figure: paint(figure, sizes, found))


def paint(figure: Any, sizes: dict[str, int], found: dict[tuple[str, str], dict[str, float]]) -> None:
    axes = figure.subplots()
    for way, colour in zip(WAYS, (GREEN, BLUE, ORANGE, RED), strict=True):
        costs = [found[label, way]["microseconds"] for label in sizes]
        axes.plot(list(sizes.values()), costs, "o-", color=colour, label=way)
    axes.set(xscale="log", yscale="log", title="One batch from its worker to the loop", ylabel="microseconds")
    axes.set_xticks(list(sizes.values()), list(sizes))
    axes.minorticks_off()
    axes.set(xlabel="batch")
    axes.legend(loc="upper left")


if __name__ == "__main__":
    main()
