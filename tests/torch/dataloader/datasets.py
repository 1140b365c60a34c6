"""Datasets for DataLoaders in tests: worker processes import them from here."""

import dataclasses
import itertools
import os
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info


@dataclass
class Items(Dataset[Any]):
    """Map-style: what a function makes of the index."""

    make: Callable[[Any], Any]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


@dataclass
class Stream(IterableDataset[Any]):
    """Iterable-style: what a function iterates over."""

    make: Callable[[], Iterator[Any]]
    length: int | None = None

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("a stream without a length")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return self.make()


@dataclass
class Shards(IterableDataset[Any]):
    """Iterable-style, of so many numbers in each shard: a worker has one, and without workers all are one stream."""

    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.lengths)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return (number for shard in range(len(self.lengths)) for number in self._numbers(shard))
        return iter(self._numbers(info.id))

    def _numbers(self, shard: int) -> range:
        return range(100 * shard, 100 * shard + self.lengths[shard])


class AllAtOnce(Items):
    """Has `__getitems__`, and shows that it was used."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, len(indices)) for index in indices]


class NoneAtOnce(Items):
    """Has said that it cannot do so, as PyTorch allows."""

    __getitems__ = None


class Counting(Items):
    """Each copy of it counts how often it was asked."""

    asked = 0
    name = ""

    def __getitem__(self, index: Any) -> Any:
        self.asked += 1
        self.name = self.name or str(uuid.uuid4())
        return index, self.asked, self.name


def number(index: int) -> int:
    return index


def pair(index: int) -> tuple[torch.Tensor, dict[str, Any]]:
    return torch.tensor([index, index * index], dtype=torch.float32), {
        "name": f"item {index}",
        "half": index / 2,
    }


def large(index: int) -> torch.Tensor:
    """So large that a batch does not come with its message."""
    return torch.arange(index, index + 20_000)


def uneven(index: int) -> torch.Tensor:
    return torch.full((1 + index % 7 * 3000,), index)


def as_it_came(batch: Any) -> Any:
    return batch


def first_of(batch: list[Any]) -> Any:
    return batch[0]


def total(batch: list[int]) -> dict[str, Any]:
    return {"sum": sum(batch), "of": list(batch)}


# Samples and batches that are instances of classes


class Point(NamedTuple):
    x: Any
    y: Any


class Tagged(dict[str, Any]):
    """A mapping with something of its own beside its entries."""

    tag = "none"


class Marked(torch.Tensor):
    """A tensor of another class."""


@dataclass
class Sample:
    image: torch.Tensor
    label: int
    names: list[str]


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Sample
    weight: float
    derived: int = dataclasses.field(init=False, default=7)


class Carrier:
    """A batch that knows how it is pinned, as PyTorch's documentation has it."""

    def __init__(self, samples: list[Any]) -> None:
        self.values = torch.tensor(samples)
        self.pinned_by: str | None = None

    def pin_memory(self) -> "Carrier":
        self.pinned_by = threading.current_thread().name
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Carrier) and torch.equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]


def sample(index: int) -> Sample:
    return Sample(torch.full((2,), index), index, [f"a{index}", f"b{index}"])


def outer(index: int) -> Outer:
    return Outer(sample(index), index / 2)


def in_a_dict(index: int) -> dict[str, Any]:
    return {"sample": sample(index), "pair": (index, sample(index))}


def without_a_label(index: int) -> Sample:
    return Sample(torch.zeros(2), None, [])  # type: ignore[arg-type]


def carried(index: int) -> Carrier:
    return Carrier([index])


# Ways to collate


def collate_carriers(batch: list[Any], *, collate_fn_map: Any = None) -> str:
    return f"{len(batch)} carriers"


def collate_samples(batch: list[Any], *, collate_fn_map: Any = None) -> str:
    return f"{len(batch)} samples"


def concatenated(batch: list[Any], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.cat(batch)


def with_sizes(batch: list[Any]) -> dict[str, Any]:
    return {"sizes": [len(each) for each in batch], "stacked": default_collate(batch)}


# What a worker knows of itself


def info(index: int) -> dict[str, Any]:
    """What `get_worker_info` says where the sample is made."""
    found = get_worker_info()
    if found is None:
        return {"id": None}
    return {
        "id": found.id,
        "num_workers": found.num_workers,
        "seed": found.seed,
        "dataset": (type(found.dataset).__name__, len(found.dataset)),
    }


def draws(index: int) -> tuple[Any, ...]:
    """What comes of the random generators where the sample is made, and of what they were seeded with."""
    return (
        torch.initial_seed(),
        torch.rand(2).tolist(),
        random.random(),
        np.random.randint(0, 2**31, 3).tolist(),
        torch.get_num_threads(),
    )


def draws_and_info(index: int) -> Any:
    return draws(index), info(index)


def draws_of_own_generators(index: int) -> list[Any]:
    """For threads: PyTorch has a place for generators of their own."""
    own: Any = get_worker_info()
    rng = own.rng
    tensor = torch.rand(1, generator=rng.torch_generator).item()
    return [own.seed, rng.random_generator.random(), tensor, rng.numpy_generator.random()]


def info_from_another_thread(index: int) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(info(index)))
    thread.start()
    thread.join()
    return found


def seed_torch(number: int) -> None:
    """`torch.manual_seed` also writes down its stack, for every device that may be there some day: that takes longer
    than most tests."""
    torch.default_generator.manual_seed(number)


def seed_all(worker: int) -> None:
    torch.manual_seed(77)
    random.seed(worker)
    np.random.seed(worker)


def tell(folder: str, worker: int) -> None:
    """For worker_init_fn: who was called, with what, in which process."""
    info = get_worker_info()
    assert info is not None
    name = f"{worker} {info.id} of {info.num_workers} {os.getpid()} {threading.current_thread().name}"
    with open(Path(folder) / "calls", "a") as file:
        file.write(f"{name}\n")


def change_the_copy(worker: int) -> None:
    """For worker_init_fn: the dataset that `get_worker_info` has is the one that is used."""
    info: Any = get_worker_info()
    info.dataset.length = 1000 + worker


class OfOwnLength(Items):
    def __getitem__(self, index: Any) -> Any:
        return self.length


@dataclass
class NestedInfo(Dataset[Any]):
    """Who the worker is that asks, and who those of a loader of its own are."""

    loader: Any
    options: dict[str, Any]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        inner = self.loader(Items(info, 4), batch_size=None, **self.options)
        own = info(index)
        return (own["id"], own.get("num_workers")), [(each["id"], each.get("num_workers")) for each in inner]


@dataclass
class Table(Dataset[Any]):
    """Has what is large."""

    tensor: torch.Tensor
    array: Any
    name: str

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        # Its own copy: what one worker writes, nobody else sees.
        self.tensor[index] += 1
        self.array[index] += 1
        return self.tensor[index : index + 3].clone(), self.array[index : index + 3].copy(), self.name


class WithLoaderInside(Items):
    """Makes its samples with a DataLoader of its own, or one that PyTorch has."""

    loader: type[DataLoader[Any]] = DataLoader

    def __getitem__(self, index: Any) -> Any:
        # A generator of its own: threads share that of the process.
        inner = self.loader(Items(self.make, 4), batch_size=3, generator=torch.Generator())
        return [batch.tolist() for batch in inner], index


class WaitsForOthers(Dataset[int]):
    """For threads: sample 0 is not made before all others were handed out."""

    def __init__(self, length: int) -> None:
        self._length, self._seen, self._others = length, set[int](), threading.Event()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        if index == 0 and not self._others.wait(60):
            raise TimeoutError("the others wait for this one")
        return index

    def seen(self, index: int) -> None:
        self._seen.add(index)
        if len(self._seen) == self._length - 1:
            self._others.set()


# Streams


def count_to_ten() -> Iterator[int]:
    return iter(range(10))


def count_for_ever() -> Iterator[int]:
    return itertools.count()


def own_batches() -> Iterator[dict[str, Any]]:
    for number in range(3):
        yield {"x": np.arange(number, number + 4), "name": [f"batch {number}"]}


class OwnIterator(IterableDataset[int]):
    """Its own iterator, with a lock for threads."""

    def __init__(self, length: int) -> None:
        self._left, self._lock = iter(range(length)), threading.Lock()

    def __iter__(self) -> "OwnIterator":
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._left)


@dataclass
class Range(IterableDataset[int]):
    """As in the documentation of PyTorch."""

    start: int
    end: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def deal_out(worker: int) -> None:
    info: Any = get_worker_info()
    data = info.dataset
    share = -(-(data.end - data.start) // info.num_workers)
    data.start += worker * share
    data.end = min(data.start + share, data.end)
