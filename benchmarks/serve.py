"""What do servers that make batches cost, and do they keep up?

wire      batches of 0.5, 4 and 16 MB that a server has ready, fetched by a RemoteLoader over Arrow Flight and over a
          Unix socket with shared memory; beside them a bare Flight stream of the same buffers, which a program that
          does nothing else copies into memory of its own: as it is, and with an allocator that keeps freed memory, as
          the RemoteLoader's process does (serve/flight_start.py). Bytes a second, and the client's processor time a GB
feeding   a step that sleeps 10 ms, fed by two server processes: with a function of 10 ms of processor time a batch, and
          with one that waits 100 ms, twenty of them at once. The share of its time in which the accelerator works
client    the processor time of the training process for a batch, with a RemoteLoader and with a local Loader that runs
          the same function of 10 ms
first     from creating a RemoteLoader to its first batch, from a server that is warm
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import serve_targets as targets
from machine import arguments, describe, interleave, print_table, ratio, spread, write_results

import headrace
from headrace.serve.flight_start import keep_freed_memory

QUESTIONS = ("wire", "feeding", "client", "first")
MEGABYTES = (0.5, 4, 16)
STEP = 0.010
BARE, BARE_KEEPING = "a bare Flight stream", "the same, keeping memory"
TARGETS = {
    "wire, Flight, to a bare Flight stream": "at least 0.85",
    "wire, Unix socket, to a bare Flight stream": "at least 3",
    "feeding, accelerator's share": "at least 0.95",
    "client, processor time, to a local Loader": "at most 0.2",
    "first batch, seconds": "at most 0.3",
}


def main() -> None:
    parser = arguments(__doc__ or "", "serve")
    parser.add_argument("--rounds", type=int, help="rounds (5)")
    parser.add_argument("--only", choices=QUESTIONS, action="append", help="one question; may be repeated")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    body: dict[str, Any] = {"machine": describe(), "targets": TARGETS}
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        for question in options.only or QUESTIONS:
            body[question] = globals()[question](Path(folder), options.quick, rounds)
    write_results(options, "serve", body)


@contextlib.contextmanager
def server(folder: Path, target: str, *options: str) -> Iterator[dict[str, str]]:
    """`headrace serve`, and its addresses by their scheme."""
    path = str(folder / f"s{os.urandom(3).hex()}")
    command = [
        sys.executable,
        "-m",
        "headrace",
        "serve",
        f"serve_targets:{target}",
        "--socket",
        path,
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        addresses = [line.split()[-1] for line in lines]
        yield {address.partition(":")[0]: address for address in addresses}
    finally:
        process.terminate()
        process.wait()


def wire(folder: Path, quick: bool, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for megabytes in MEGABYTES[: 1 if quick else None]:
        size = int(megabytes * 2**20)
        count = 8 if quick else max(24, int(400 / megabytes))
        settings = ("--set", f"size={size}", "--set", f"rows={count}", "--workers", "1", "--memory", "2GB")
        with contextlib.ExitStack() as stack:
            addresses = stack.enter_context(server(folder, "ready", *settings))
            bare = stack.enter_context(bare_server(size, count))
            processor: dict[str, list[float]] = {}
            remote = {name: headrace.RemoteLoader(addresses[name]) for name in ("grpc", "unix")}
            for loader in remote.values():
                take_all(loader)  # so that the server has them ready
            candidates = {
                BARE: stack.enter_context(bare_client(bare, size, count, keeps=False)),
                BARE_KEEPING: stack.enter_context(bare_client(bare, size, count, keeps=True)),
                "Flight": lambda loader=remote["grpc"]: timed(lambda: take_all(loader)),
                "Unix socket": lambda loader=remote["unix"]: timed(lambda: take_all(loader)),
            }
            turns = {
                name: keeping_cpu(call, processor.setdefault(name, [])) for name, call in candidates.items()
            }
            seconds = interleave(turns, rounds)
            for loader in remote.values():
                loader.close()
        whole = size * count / 1e9
        found[f"{megabytes} MB"] = {
            name: {
                "gb_per_second": spread([whole / each for each in times]),
                "client_cpu_seconds_per_gb": spread([each / whole for each in processor[name]]),
                "to_bare_flight": ratio(seconds[BARE], times),
                "to_bare_flight_that_keeps_memory": ratio(seconds[BARE_KEEPING], times),
            }
            for name, times in seconds.items()
        }
    rows = [
        [
            size,
            name,
            each["gb_per_second"]["median"],
            each["client_cpu_seconds_per_gb"]["median"],
            each["to_bare_flight"]["median"],
            each["to_bare_flight_that_keeps_memory"]["median"],
        ]
        for size, kinds in found.items()
        for name, each in kinds.items()
    ]
    header = ["size", "way", "GB/s", "client CPU-s/GB", "to a bare stream", "to one that keeps memory"]
    print_table("Batches that are ready", header, rows)
    return found


Turn = tuple[float, float]
"""Seconds, and seconds of the client's processor time."""


def timed(call: Callable[[], None]) -> Turn:
    begun, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begun, time.process_time() - cpu


def keeping_cpu(call: Callable[[], Turn], kept: list[float]) -> Callable[[], float]:
    """The seconds of a turn; its processor time is kept."""

    def turn() -> float:
        seconds, cpu = call()
        kept.append(cpu)
        return seconds

    return turn


def take_all(loader: headrace.RemoteLoader) -> None:
    for batch in loader:
        batch["x"]
    loader.load_state_dict({**loader.state_dict(), "position": 0, "pass": 0})


class BareServer(flight.FlightServerBase):  # type: ignore[misc]
    """Sends as many buffers as the other server has ready, as one stream."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._schema = pa.schema([("body", pa.uint8())])
        block = np.random.default_rng(0).integers(0, 255, size).astype(np.uint8)
        self._batches = [self._batch(block.copy()) for _ in range(count)]

    def _batch(self, block: np.ndarray) -> Any:
        column = pa.Array.from_buffers(pa.uint8(), len(block), [None, pa.py_buffer(block)])
        return pa.record_batch([column], schema=self._schema)

    def do_get(self, context: Any, ticket: Any) -> Any:
        return flight.GeneratorStream(self._schema, iter(self._batches))


@contextlib.contextmanager
def bare_server(size: int, count: int) -> Iterator[str]:
    code = f"import serve; s = serve.BareServer({size}, {count}); print(s.port, flush=True); s.serve()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    try:
        assert process.stdout is not None
        yield f"grpc://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def bare_client(address: str, size: int, count: int, *, keeps: bool) -> Iterator[Callable[[], Turn]]:
    """A process that reads the stream whenever it is asked to."""
    code = f"import serve; serve.read_when_asked({address!r}, {size}, {count}, {keeps})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask() -> Turn:
        print("read", file=process.stdin, flush=True)
        seconds, cpu = map(float, process.stdout.readline().split())
        return seconds, cpu

    try:
        ask()  # the first time is not counted
        yield ask
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def read_when_asked(address: str, size: int, count: int, keeps: bool) -> None:
    if keeps:
        keep_freed_memory()
    for _ in sys.stdin:
        print(*timed(lambda: read_bare(address, size, count)), flush=True)


def read_bare(address: str, size: int, count: int) -> None:
    with flight.FlightClient(address) as client:
        stream = client.do_get(flight.Ticket(b""))
        memory = [np.empty(size, np.uint8) for _ in range(2)]
        for number in range(count):
            memory[number % 2][:] = stream.read_chunk().data.column(0).to_numpy()


def feeding(folder: Path, quick: bool, rounds: int) -> dict[str, Any]:
    steps, found = 20 if quick else 400, {}
    kinds = {"10 ms of processor time": ("burning", "1"), "waiting 100 ms": ("waiting", "10")}
    for name, (target, threads) in kinds.items():
        with server(folder, target, "--workers", "2", "--threads", threads) as addresses:
            for way in ("unix", "grpc"):
                shares = []
                for _ in range(rounds):
                    loader = headrace.RemoteLoader(addresses[way])
                    shares.append(accelerator_share(loader, steps))
                    loader.close()
                found[f"{name}, {way}"] = spread(shares)
    print_table(
        "The accelerator works this share of its time",
        ["function", "share"],
        [[k, v["median"]] for k, v in found.items()],
    )
    return found


def accelerator_share(loader: headrace.Loader, steps: int) -> float:
    """A loop whose step sleeps, after the first batches; the share of its time that is steps."""
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    worked, begun = 0.0, time.perf_counter()
    for _ in range(steps):
        next(iterator)
        step_begun = time.perf_counter()
        time.sleep(STEP)
        worked += time.perf_counter() - step_begun
    return worked / (time.perf_counter() - begun)


def client(folder: Path, quick: bool, rounds: int) -> dict[str, Any]:
    batches = 20 if quick else 200
    with server(folder, "burning", "--workers", "2") as addresses:

        def cpu_of(loader: headrace.Loader) -> float:
            iterator = iter(loader)
            for _ in range(5):
                next(iterator)
            begun = time.process_time()
            for _ in range(batches):
                next(iterator)
                time.sleep(STEP)
            return (time.process_time() - begun) / batches

        candidates = {
            "a local Loader": lambda: cpu_of(targets.burning()),
            "unix": lambda: cpu_of(headrace.RemoteLoader(addresses["unix"])),
            "grpc": lambda: cpu_of(headrace.RemoteLoader(addresses["grpc"])),
        }
        seconds = interleave(candidates, rounds)
    local = seconds["a local Loader"]
    found = {
        name: {"cpu_seconds": spread(each), "to_local": ratio(each, local)} for name, each in seconds.items()
    }
    rows = [
        [name, 1e3 * each["cpu_seconds"]["median"], each["to_local"]["median"]]
        for name, each in found.items()
    ]
    print_table("Processor time of the training process", ["loader", "ms a batch", "to a local Loader"], rows)
    return found


def first(folder: Path, quick: bool, rounds: int) -> dict[str, Any]:
    with server(folder, "ready", "--workers", "1") as addresses:
        next(iter(headrace.RemoteLoader(addresses["unix"])))

        def first_batch(way: str) -> float:
            begun = time.perf_counter()
            loader = headrace.RemoteLoader(addresses[way])
            next(iter(loader))
            passed = time.perf_counter() - begun
            loader.close()
            return passed

        seconds = interleave({way: lambda way=way: first_batch(way) for way in addresses}, max(rounds, 3))
    found = {way: spread(each) for way, each in seconds.items()}
    print_table("The first batch", ["way", "seconds"], [[way, each["median"]] for way, each in found.items()])
    return found


if __name__ == "__main__":
    main()
