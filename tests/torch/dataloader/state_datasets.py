"""Datasets and samplers for tests of resuming. Worker processes import them from here."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


class Numbers(Dataset[Any]):
    """Item i is i. Counts how often it was asked, in the process where it was."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return int(index)


class Counting(Numbers):
    """Map-style with state of its own: an item is also how many this worker has made before it."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.asked += 1
        return int(index), self.asked

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


def _mine(length: int) -> range:
    """Every W-th number: shards of different lengths, and empty ones if there are more workers than numbers."""
    info = get_worker_info()
    return range(length) if info is None else range(info.id, length, info.num_workers)


class Plain(IterableDataset[Any]):
    """An iterable without state: it can only be brought to its place by making everything again."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from _mine(self.length)


class Cursor(Iterator[int]):
    def __init__(self, numbers: range) -> None:
        self.numbers, self.at, self.made = numbers, 0, 0

    def __next__(self) -> int:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at, self.made = self.at + 1, self.made + 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class WithIterator(Plain):
    """The iterator keeps the state."""

    def __iter__(self) -> Cursor:
        return Cursor(_mine(self.length))


class WithDataset(Plain):
    """The dataset keeps the state, and begins where it stands."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        numbers = _mine(self.length)
        while self.at < len(numbers):
            self.at += 1
            yield numbers[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Itself(WithDataset):
    """The dataset is its own iterator."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        numbers = _mine(self.length)
        if self.at >= len(numbers):
            self.at = 0
            raise StopIteration
        self.at += 1
        return numbers[self.at - 1]


class Careless(Sampler[int]):
    """Shuffles with whatever generator of the process it is told, as many people write it."""

    def __init__(self, length: int, using: str) -> None:
        self.length, self.using = length, using

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        indices = list(range(self.length))
        if self.using == "random":
            random.shuffle(indices)
        elif self.using == "numpy":
            np.random.shuffle(indices)
        else:
            indices = torch.randperm(self.length).tolist()
        return iter(indices)


class OwnGenerators(Sampler[int]):
    """Draws from generators of its own, of every kind, epoch after epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.of_numpy, self.of_random = np.random.default_rng(3), random.Random(4)
        self.old_numpy = np.random.Generator(np.random.MT19937(5))

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = self.old_numpy.permutation(self.of_numpy.permutation(self.length)).tolist()
        self.of_random.shuffle(order)
        return iter(order)


class Placed(Sampler[int]):
    """A sampler that keeps state and says how many it has passed over to get there."""

    def __init__(self, length: int) -> None:
        self.length, self.at, self.begun_at = length, 0, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.begun_at = self.at
        while self.at < self.length:
            self.at += 1
            yield (self.at - 1) * 7 % self.length
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class CountsEpochs(Sampler[int]):
    """A sampler that keeps its place and its epoch, which decides about the order."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch_number, self.at = length, 0, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch_number))
        while self.at < self.length:
            self.at += 1
            yield int(order[self.at - 1])
        self.epoch_number, self.at = self.epoch_number + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch_number": self.epoch_number, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch_number, self.at = state["epoch_number"], state["at"]


class PlacedCursor(Sampler[int]):
    """A sampler whose iterator keeps the state."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Cursor:
        return Cursor(range(self.length))


class Groups(Sampler[list[int]]):
    """A batch sampler of uneven batches."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        order, at = torch.randperm(self.length).tolist(), 0
        while at < self.length:
            size = 1 + order[at] % 4
            yield order[at : at + size]
            at += size
