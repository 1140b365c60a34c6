"""What is measured of remote reading. Each function runs in a process of its own, and returns its figures.

Raw reads are requests for ranges of 4 MB, eight at a time, of the same bytes that an epoch needs: by Headrace's own
HTTP client, and by obstore, the client library. The clock begins when the dataset or the store is opened; importing
counts nowhere, and processor time is that of the process with all its threads.
"""

import importlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from remote_data import FIELD, ranges_of
from remote_server import BUCKET

from headrace import Loader
from headrace import open as open_dataset
from headrace.store.address import open_store
from headrace.store.fetching import fetching

# They are imported when the first address is opened, which would count.
importlib.import_module("headrace.store.remote")
importlib.import_module("obstore")

RANGE_BYTES = 4 * 2**20
AT_ONCE = 8
UNITS_AHEAD = 16
SETTINGS: dict[str, Any] = {
    "seq_len": 2048,
    "batch_size": 32,
    "fields": ("tokens", "labels"),
    "rank": 0,
    "world_size": 1,
}
BY_UNITS: dict[str, Any] = {"shuffle": "units", "pack_within": "units"}
"""What remote data is loaded with by default, for local data."""
STEPS_BATCH_SIZE = 256
LONG_WAIT_SECONDS = 0.001

_KEPT: list[Any] = []
"""Iterations that were left early. The process ends without closing them, which would wait for what they have begun."""

Report = dict[str, Any]


class Clock:
    """Seconds of the clock and of the processor since it was made."""

    def __init__(self) -> None:
        self._cpu, self._began = time.process_time(), time.perf_counter()

    def read(self) -> Report:
        return {
            "seconds": time.perf_counter() - self._began,
            "cpu_seconds": time.process_time() - self._cpu,
        }


# Raw reads


@dataclass(frozen=True)
class Ranges:
    """The same bytes as an epoch's, of a dataset in a bucket."""

    place: str
    each: Sequence[tuple[str, int, int]]

    @classmethod
    def of(cls, local: Path, place: str) -> "Ranges":
        return cls(place, list(ranges_of(open_dataset(local, verify="reads"), RANGE_BYTES)))


Fetch = Callable[[str, int, int], Any]


def raw(ranges: Ranges) -> Report:
    """By Headrace's own client."""
    return _read_all(ranges, open_store(ranges.place).fetch)


def raw_by_obstore(ranges: Ranges) -> Report:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        prefix=ranges.place.removeprefix(f"s3://{BUCKET}/"),
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        client_options={"allow_http": True},
    )

    def fetch(file: str, start: int, stop: int) -> Any:
        return obstore.get_range(store, file, start=start, end=stop)

    return _read_all(ranges, fetch)


def raw_and_write(ranges: Ranges, folder: Path) -> Report:
    """Each range goes into a file of its own, as into a cache."""
    folder.mkdir()
    return _read_all(ranges, open_store(ranges.place).fetch, folder)


def _read_all(ranges: Ranges, fetch: Fetch, folder: Path | None = None) -> Report:
    def one(number: int) -> int:
        content = fetch(*ranges.each[number])
        if folder is not None:
            (folder / str(number)).write_bytes(content)
        return len(content)

    clock = Clock()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        count = sum(threads.map(one, range(len(ranges.each))))
    return {**clock.read(), "bytes": count}


# Headrace


def fetch_and_check(place: str) -> Report:
    """All units as a Loader fetches them, compared with their checksums, and no batches."""
    clock = Clock()
    dataset = open_dataset(place)
    units, reads = dataset.source.units, dataset.source.reads
    under_way: deque[Any] = deque()
    for number in range(units.count):
        pieces = [units.data_piece(number, FIELD), units.offsets_piece(number, FIELD)]
        under_way.append(fetching().ahead(partial(reads.pieces, pieces)))
        if len(under_way) == UNITS_AHEAD:
            under_way.popleft().result()
    for future in under_way:
        future.result()
    return {**clock.read(), "bytes": reads.traffic.bytes}


def epoch(place: str | Path, cache: Path | None = None) -> Report:
    """All batches of an epoch, by a loop that only asks for them."""
    clock = Clock()
    dataset = _opened(place, cache)
    more = {} if dataset.source.store.is_remote else BY_UNITS
    loader = Loader(dataset, **SETTINGS, **more)
    batches = 0
    for batch in loader:
        _touch(batch)
        batches += 1
    fetched = loader.stats().fetched
    return {**clock.read(), "bytes": fetched.bytes, "cached_bytes": fetched.cached_bytes, "batches": batches}


def _opened(place: str | Path, cache: Path | None) -> Any:
    if cache is None:
        return open_dataset(place)
    return open_dataset(place, cache=cache, cache_bytes="1TB")


def _touch(batch: Any) -> None:
    batch.tokens[-1, -1]
    batch.labels[-1, -1]


def steps(place: str, bytes_per_second: float, most_seconds: float) -> Report:
    """A training loop whose steps take as long as the network needs for a batch, if it gives so many bytes a second."""
    step_seconds = STEPS_BATCH_SIZE * SETTINGS["seq_len"] * 2 / bytes_per_second
    loader = Loader(place, **{**SETTINGS, "batch_size": STEPS_BATCH_SIZE})
    waits: list[float] = []
    ends: list[float] = []
    batches = iter(loader)
    _KEPT.append(batches)
    began = time.perf_counter()
    for wait in _waits(batches, step_seconds):
        waits.append(wait)
        ends.append(time.perf_counter() - began)
        if ends[-1] > most_seconds:
            break
    later = list(zip(waits[1:], ends[1:], strict=True))
    long = [(wait, end) for wait, end in later if wait > LONG_WAIT_SECONDS]
    return {
        "step_seconds": step_seconds,
        "steps": len(waits),
        "seconds": ends[-1],
        "first_batch_seconds": waits[0],
        "steps_that_waited": len(long) / max(1, len(later)),
        "waited_seconds": sum(wait for wait, _ in later),
        "longest_wait_seconds": max((wait for wait, _ in later), default=0.0),
        "last_wait_at_seconds": max((end for _, end in long), default=0.0),
    }


def _waits(batches: Iterator[Any], step_seconds: float) -> Iterator[float]:
    while True:
        asked = time.perf_counter()
        try:
            _touch(next(batches))
        except StopIteration:
            return
        yield time.perf_counter() - asked
        time.sleep(step_seconds)


# Starting


def states(place: str, shares: Sequence[float]) -> list[dict[str, Any]]:
    """The states of a Loader that has gone so far, without going there: a state is a position."""
    loader = Loader(place, **SETTINGS)
    batch_size = SETTINGS["batch_size"]
    positions = [int(loader.rows_per_epoch * share) // batch_size * batch_size for share in shares]
    return [{**loader.state_dict(), "position": position} for position in positions]


def first_batch(place: str, state: dict[str, Any]) -> Report:
    """From nothing to the first batch, in a process that has made no request yet."""
    began = time.perf_counter()
    dataset = open_dataset(place)
    opened = time.perf_counter()
    loader = Loader(dataset, **SETTINGS)
    loader.load_state_dict(state)
    batches = iter(loader)
    _touch(next(batches))
    ended = time.perf_counter()
    requests = dataset.source.reads.traffic.requests
    _KEPT.append(batches)
    return {
        "requests": requests,
        "open_seconds": opened - began,
        "batch_seconds": ended - opened,
        "seconds": ended - began,
    }


def open_only(place: str) -> Report:
    began = time.perf_counter()
    open_dataset(place)
    return {"seconds": time.perf_counter() - began}
