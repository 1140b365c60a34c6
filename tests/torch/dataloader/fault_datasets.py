"""Datasets that go wrong, for tests of what a DataLoader does then. Worker processes import them from here."""

import os
import pickle
import resource
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


@dataclass
class Numbered(Dataset[Any]):
    """Item i is `count` times the number i; each takes `seconds`."""

    length: int = 1000
    count: int = 20_000
    seconds: float = 0.0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((self.count,), index)


class Indices(Numbered):
    """The indices of a batch, all at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Hanging(Numbered):
    """Item 6 does not come, unless a thread of the same process lets it go."""

    let_go = threading.Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 6:
            self.let_go.wait()
        return super().__getitem__(index)


class Huge(Numbered):
    """Batches that are large, of uneven sizes, and not only tensors."""

    sizes = (1, 10_000_000, 10, 3_000_000, 100_000)

    def __getitem__(self, index: int) -> Any:
        size = self.sizes[index % 5]
        return {
            "tensor": torch.full((size,), index, dtype=torch.uint8),
            "array": np.full(size // 2, index, np.uint8),
            "bytes": bytes([index]) * (size // 4),
            "meta": torch.empty(size, device="meta"),
            "strings": [str(index)] * min(size, 50_000),
        }


@dataclass
class Keeping(Numbered):
    """Holds on to every batch that it was asked to collate, as a cache in a dataset might."""

    kept: list[Any] = field(default_factory=list)

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        batch = torch.utils.data.default_collate(samples)
        # It must still be what it was, however many batches were made since.
        for number, old in self.kept:
            assert bool((old == number).all()), "a batch that the worker holds was overwritten"
        self.kept.append((int(samples[0][0]), batch))
        return batch


class Exiting(Numbered):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            os._exit(7)
        return super().__getitem__(index)


class Inner(Dataset[Any]):
    """Each item is what a DataLoader inside gives."""

    def __init__(self, loader: Any, **options: Any) -> None:
        self.loader, self.options = loader, options

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        batches = list(self.loader(Numbered(8, 4), batch_size=4, **self.options))
        return torch.cat(batches) + 100 * index


class OpensItself(Dataset[Any]):
    """Opens a file when it is unpickled: each worker must have its own, with its own place in it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.__setstate__({"path": path})

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self.file = os.open(self.path, os.O_RDONLY)

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        os.lseek(self.file, index * 4, os.SEEK_SET)
        time.sleep(0.0005)
        return int.from_bytes(os.read(self.file, 4), "little")


class Weighty(Dataset[Any]):
    """Arrays and tensors that are large, some shared by the user, and a count of how often it was pickled."""

    pickled = 0

    def __init__(self) -> None:
        self.array = np.arange(3_000_000)
        self.tensor = torch.arange(3_000_000)
        self.shared = torch.zeros(8, dtype=torch.int64).share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        type(self).pickled += 1
        return self.__dict__

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        # Own copies of what is not shared, and one of what is.
        self.array[index] += 1
        self.tensor[index] += 1
        self.shared[index] = os.getpid()
        return int(self.array[index]), int(self.tensor[index]), len(self.array)


class HoldsLock(Numbered):
    """Can only be pickled while a process is started."""

    def __init__(self, lock: Any) -> None:
        super().__init__(8, 4)
        self.lock = lock

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return super().__getitem__(index)


class Unpicklable(Numbered):
    def __getstate__(self) -> Any:
        raise pickle.PicklingError("this dataset stays at home")


class BadWhenOpened(Numbered):
    def __setstate__(self, state: Any) -> None:
        raise KeyError("not in this process")


def no_files_of_that_size(worker: int) -> None:
    """As if there were no shared memory: files, also those in memory, may not be large."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


changed_by_the_test = False


def must_be_fresh(worker: int) -> None:
    """In a process that has nothing of the one that started it."""
    assert not changed_by_the_test


def leave(worker: int) -> None:
    raise SystemExit(3)


class KeepsLock(Numbered):
    """Keeps state that cannot be copied."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class SpoilsState(KeepsLock):
    """Keeps state that can be copied until its last item was made."""

    made = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.made += 1
        return super().__getitem__(index)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.made < self.length else super().state_dict()


class LeavesChild(Numbered):
    """A worker that starts a process, which lives on, and ends."""

    def __init__(self, path: str) -> None:
        super().__init__(8, 4)
        self.path = path

    def __getitem__(self, index: int) -> torch.Tensor:
        child = os.fork()
        if not child:
            # Until the test ends it.
            time.sleep(600)
            os._exit(0)
        with open(self.path, "w") as file:
            file.write(str(child))
        os._exit(3)
