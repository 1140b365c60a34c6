"""What readers hand over: blocks of records, one column for each field, without a Python object for each record."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.format.ragged import Ragged
from headrace.format.shard import Column


@dataclass(frozen=True, eq=False)
class Texts:
    """Byte strings as slices of one buffer: string i is `data[starts[i]:stops[i]]`.

    The slices need not touch, so the lines of a mapped file are Texts without copying a byte.
    """

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> bytes:
        return self.data[self.starts[index] : self.stops[index]].tobytes()

    @property
    def text_bytes(self) -> int:
        return int((self.stops - self.starts).sum())

    def strings(self) -> list[str]:
        return [self[number].decode() for number in range(len(self))]

    def to_texts(self) -> "Texts":
        return self

    def take(self, keep: NDArray[np.bool_]) -> "Texts":
        return Texts(self.data, self.starts[keep], self.stops[keep])

    def to_ragged(self) -> Ragged:
        """The same strings end to end; without a copy if they already lie end to end."""
        if len(self) and np.array_equal(self.starts[1:], self.stops[:-1]):
            first = int(self.starts[0])
            offsets = np.concatenate([self.starts, self.stops[-1:]]) - first
            return Ragged(self.data[first : int(self.stops[-1])], offsets)
        bounds = zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        return Ragged.from_items([self.data[a:b] for a, b in bounds], np.uint8)


@dataclass(frozen=True, eq=False)
class Strings:
    """Texts that a parser has already turned into Python strings; encoders take them as they are."""

    items: list[str]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> bytes:
        return self.items[index].encode()

    @property
    def text_bytes(self) -> int:
        """Approximate: characters are counted, not bytes."""
        return sum(map(len, self.items))

    def strings(self) -> list[str]:
        return self.items

    def to_texts(self) -> Texts:
        encoded = [item.encode() for item in self.items]
        stops = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        starts = np.concatenate([np.zeros(1, np.int64), stops])[: len(encoded)]
        return Texts(np.frombuffer(b"".join(encoded), dtype=np.uint8), starts, stops)

    def to_ragged(self) -> Ragged:
        return self.to_texts().to_ragged()


@dataclass(frozen=True)
class Block:
    """Some consecutive records. `locate(i)` describes the place of record i in its file, for messages to people."""

    columns: Mapping[str, Column | Texts | Strings]
    locate: Callable[[int], str]
    input_bytes: int
    """How far this block advanced through the input, for the progress display."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


ReportBad = Callable[[str, str], None]
"""Called with (where, reason) for a record that is left out; raises an error if there have been too many."""
