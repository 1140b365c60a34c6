"""Many arrays of different lengths as one: the values end to end, and where each begins."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError


@dataclass(frozen=True, eq=False)
class Ragged:
    """Item i is `values[offsets[i]:offsets[i + 1]]`; there are `len(offsets) - 1` items."""

    values: NDArray[Any]
    offsets: NDArray[Any]

    @staticmethod
    def from_items(items: list[NDArray[Any]], dtype: Any, shape: tuple[int, ...] = ()) -> "Ragged":
        offsets = np.zeros(len(items) + 1, dtype=np.int64)
        np.cumsum([len(item) for item in items], out=offsets[1:])
        values = np.concatenate(items) if items else np.empty((0, *shape), dtype=dtype)
        return Ragged(values.astype(dtype, copy=False), offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets).astype(np.int64, copy=False)

    def check(self, name: str) -> None:
        """Refuse invalid offsets before anything is written or read with them."""
        values, offsets = np.asarray(self.values), np.asarray(self.offsets)
        if values.ndim == 0 or offsets.ndim != 1 or not len(offsets) or offsets.dtype.kind not in "iu":
            raise SettingsError(
                f"field {name!r}: values of shape {values.shape}, offsets of dtype {offsets.dtype} and shape "
                f"{offsets.shape}: a Ragged of n items needs n + 1 whole numbers as offsets"
            )
        if offsets[0] < 0 or offsets[-1] > len(values) or (offsets[1:] < offsets[:-1]).any():
            raise SettingsError(
                f"field {name!r}: offsets from {offsets[0]} to {offsets[-1]} over {len(values)} values: "
                "they must not decrease or go beyond the values"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"index {index} is out of range for {count} items")
        index %= count
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        bounds = self.offsets.tolist()
        return (self.values[a:b] for a, b in itertools.pairwise(bounds))

    def __repr__(self) -> str:
        return f"Ragged({len(self)} items, {len(self.values)} values of {self.values.dtype})"
