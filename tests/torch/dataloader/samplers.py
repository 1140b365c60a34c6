"""Samplers for DataLoaders in tests, of the kinds that users write."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler


class Backwards(Sampler[int]):
    """A generator, as most are."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        yield from reversed(range(self._length))

    def __len__(self) -> int:
        return self._length


class Drawn(Sampler[int]):
    """Draws when it is asked for an iterator, not with the first index: from every global generator."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self._length).tolist()
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())

    def __len__(self) -> int:
        return self._length


class DrawnBatches(Drawn):
    """The same, in batches of three."""

    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        return iter([order[first : first + 3] for first in range(0, len(order), 3)])

    def __len__(self) -> int:
        return -(-self._length // 3)


class ByEpoch(Sampler[int]):
    """Counts its epochs by itself: each iteration is another order."""

    def __init__(self, length: int) -> None:
        self._length, self.epoch = length, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(self._length).tolist())

    def __len__(self) -> int:
        return self._length


class Watched:
    """An iterable, not even a Sampler: it keeps how many indices were asked for."""

    def __init__(self, indices: Sequence[Any]) -> None:
        self._indices, self.asked = indices, 0

    def __iter__(self) -> Iterator[Any]:
        for index in self._indices:
            self.asked += 1
            yield index

    def __len__(self) -> int:
        return len(self._indices)


class Broken(Watched):
    """Fails after so many indices."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        raise ValueError("the sampler is broken")
