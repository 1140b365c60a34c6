"""What `dataloader.py` runs: the datasets, and one run of a loader over them."""

import multiprocessing
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import headrace
from headrace.torch import DataLoader as HeadraceLoader

IMAGE = (3, 224, 224)
ROW = 2049


def loaders() -> dict[str, Callable[..., Any]]:
    """The classes that are compared; torchdata's if it is installed."""
    found: dict[str, Callable[..., Any]] = {"torch": DataLoader, "headrace": HeadraceLoader}
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return found
    return {"torch": DataLoader, "torchdata": StatefulDataLoader, "headrace": HeadraceLoader}


class Mapped(Dataset[Any]):
    """Rows of a memory-mapped array, as tensors; `length` of them, over and over."""

    def __init__(self, path: Path, length: int) -> None:
        self.rows, self.length = torch.from_numpy(np.load(path, mmap_mode="r+")), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.rows[index % len(self.rows)]


class Repeated(Dataset[Any]):
    """A Headrace dataset over and over, with its batched fetch."""

    def __init__(self, path: Path, length: int) -> None:
        self.data, self.length = headrace.open(path), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.data[index % len(self.data)]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.data[[index % len(self.data) for index in indices]]


def as_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of Headrace's is columns already."""
    return {name: torch.from_numpy(values) for name, values in batch.items()}


class Sleeping(Dataset[Any]):
    """Each sample takes so long to load, and nothing of a core."""

    def __init__(self, seconds: float, length: int) -> None:
        self.seconds, self.length = seconds, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class Paths(Dataset[Any]):
    """A list of names, as of many image datasets: about 100 bytes each when pickled."""

    def __init__(self, megabytes: int) -> None:
        self.names = [f"{number:090d}" for number in range(megabytes * 10_000)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        return len(self.names[index])


class Arrays(Dataset[Any]):
    """One array in memory."""

    def __init__(self, megabytes: int) -> None:
        self.rows = np.zeros((megabytes * 125, 1000))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Nothing(Dataset[Any]):
    """What is left is the loader."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        return index


class Counting(IterableDataset[Any]):
    """An iterable that keeps state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        while True:
            self.at += 1
            yield torch.full((100,), self.at * 8 + (info.id if info else 0))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "files": ["a name of a file"] * 10}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def write_rows(folder: Path, rows: int) -> dict[str, Path]:
    """The same numbers as .npy files for everybody, and as Headrace datasets."""
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 256, (rows, *IMAGE), dtype=np.uint8),
        "tokens": rng.integers(0, 50_000, (8 * rows, ROW), dtype=np.int64),
    }
    notations = {"images": f"uint8[{','.join(map(str, IMAGE))}]", "tokens": f"int64[{ROW}]"}
    paths = {}
    for name, array in arrays.items():
        paths[name] = folder / f"{name}.npy"
        np.save(paths[name], array)
        paths[f"{name} dataset"] = folder / name
        with headrace.Writer(folder / name, {"x": notations[name]}) as writer:
            writer.write_columns({"x": array})
    return paths


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def throughput(make: Callable[..., Any], dataset: Any, batches: int, **options: Any) -> dict[str, float]:
    """Batches a second once it runs, and the processor's time for one, all processes counted."""
    before = cpu_seconds()
    iterator = iter(make(dataset, batch_size=32, **options))
    for _ in range(5):
        _touch(next(iterator))
    started = time.perf_counter()
    for _ in range(batches):
        _touch(next(iterator))
    seconds = time.perf_counter() - started
    del iterator
    for child in multiprocessing.active_children():
        child.join(10)
    return {
        "batches_per_second": batches / seconds,
        "cpu_ms": (cpu_seconds() - before) / (batches + 5) * 1000,
    }


def copying(path: Path, batches: int) -> dict[str, float]:
    """What no loader in one thread can pass: rows of the map copied into one and the same batch."""
    rows = np.load(path, mmap_mode="r")
    batch = np.empty((32, *rows.shape[1:]), rows.dtype)
    before, started = cpu_seconds(), time.perf_counter()
    for number in range(batches):
        for row in range(32):
            batch[row] = rows[(32 * number + row) % len(rows)]
        _touch(torch.from_numpy(batch))
    seconds = time.perf_counter() - started
    return {"batches_per_second": batches / seconds, "cpu_ms": (cpu_seconds() - before) / batches * 1000}


def _touch(batch: Any) -> None:
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch
    first[0].sum()


def step_seconds(make: Callable[..., Any], load: float, compute: float, steps: int, **options: Any) -> float:
    """The mean step of a loop that sleeps for its compute, once the first batch is there."""
    iterator = iter(make(Sleeping(load, steps + 1), batch_size=1, **options))
    next(iterator)
    started = time.perf_counter()
    for _ in range(steps):
        next(iterator)
        time.sleep(compute)
    return (time.perf_counter() - started) / steps


def overhead_seconds(make: Callable[..., Any], batches: int) -> float:
    """Of a loop in one process, for each batch of 32 numbers."""
    iterator = iter(make(Nothing(), batch_size=32))
    next(iterator)
    started = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    return (time.perf_counter() - started) / batches


def snapshot_seconds(make: Callable[..., Any], every: int, ask: bool, steps: int, step: float) -> float:
    """What the loop pays for each batch beside a step that keeps the core busy."""
    loader = make(Counting(), batch_size=8, num_workers=2, snapshot_every_n_steps=every)
    iterator = iter(loader)
    next(iterator)
    waited = 0.0
    for _ in range(steps):
        started = time.perf_counter()
        next(iterator)
        if ask:
            loader.state_dict()
        ended = time.perf_counter()
        waited += ended - started
        while time.perf_counter() < ended + step:
            pass
    return waited / steps
