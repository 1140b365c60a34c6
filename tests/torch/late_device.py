"""A device that does nothing until it is told to, as late as real ones may be; and batches that may be late."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import headrace
from headrace.torch import Loader
from headrace.torch.device import ToDevice


class LateEvent:
    def __init__(self, streams: "LateStreams", number: int, jobs: int) -> None:
        self._streams, self.number, self._jobs = streams, number, jobs

    def query(self) -> bool:
        return self._streams.done >= self._jobs

    def synchronize(self) -> None:
        self._streams.calls.append(f"synchronize {self.number}")
        self._streams.run_until(self._jobs)


class LateStreams:
    """A device that queues copies and makes them when the test says so, or when someone waits for them. A buffer that
    is filled again too early shows as wrong data there."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.done, self._jobs, self._marks = 0, list[tuple[Tensor, Tensor]](), 0
        self._beside = False
        self.kept: set[int] = set()
        self.allocated = 0

    def run_until(self, jobs: int) -> None:
        for place, source in self._jobs[self.done : jobs]:
            place.copy_(source)
        self.done = max(self.done, min(jobs, len(self._jobs)))

    def run(self, jobs: int) -> None:
        self.run_until(self.done + jobs)

    def allocate(self, count: int) -> NDArray[np.uint8]:
        self.allocated += 1
        return np.empty(count, dtype=np.uint8)

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.calls.append("side stream")
        self._beside = True
        yield
        self._beside = False
        self.calls.append("back")

    def copy(self, tensor: Tensor) -> Tensor:
        assert self._beside
        self.calls.append(f"copy {label_of(tensor)}")
        place = torch.full_like(tensor, 99)
        # Only the address, as a device has it: to keep the memory is the loader's part.
        source = torch.from_numpy(_without_owner(tensor.numpy()))
        self._jobs.append((place, source))
        return place

    def mark(self) -> LateEvent:
        self.calls.append(f"mark {self._marks}")
        self._marks += 1
        return LateEvent(self, self._marks - 1, len(self._jobs))

    def wait(self, event: Any) -> None:
        self.calls.append(f"wait {event.number}")

    def keep(self, tensor: Tensor) -> None:
        self.calls.append("keep")
        self.kept.add(id(tensor))


def label_of(tensor: Tensor) -> int:
    return int(tensor.flatten()[0]) if tensor.numel() else -1


def _without_owner(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory, without a reference that the pool of buffers could count."""
    kind = np.dtype(array.dtype)
    address = {"data": (array.ctypes.data, False), "shape": array.shape, "typestr": kind.str, "version": 3}
    holder = type("Holder", (), {"__array_interface__": address})()
    return np.asarray(holder)


class HostBatches:
    """Batches that are on the host in time, but for those whose numbers are `late`: until they are waited for."""

    def __init__(self, batches: Iterable[Any], late: Collection[int] = ()) -> None:
        self._batches, self.taken, self.closed = iter(batches), 0, False
        self._late = late

    def is_ready(self) -> bool:
        return self.taken not in self._late

    def __next__(self) -> dict[str, Any]:
        batch = next(self._batches)
        if isinstance(batch, BaseException):
            raise batch
        self.taken += 1
        return dict(batch)

    def close(self) -> None:
        self.closed = True


def numbered(count: int) -> list[Any]:
    return [{"x": np.full(3, number), "longest": number, "names": [str(number)]} for number in range(count)]


def dataset(documents: int = 60) -> headrace.Dataset:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, documents)
    return headrace.from_arrays({"tokens": [rng.integers(1, 99, n).astype(np.uint16) for n in lengths]})


def late_loader(streams: Any, **options: Any) -> Loader:
    loader = Loader(dataset(), **{"seq_len": 16, "batch_size": 4, **options})
    loader.delivery = ToDevice(loader.device, streams)
    return loader


def arrays(batch: Any) -> dict[str, Any]:
    return {n: np.asarray(v).copy() if isinstance(v, np.ndarray | Tensor) else v for n, v in batch.items()}


def assert_same(found: Any, wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), value, err_msg=name)
