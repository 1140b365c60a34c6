"""Which row comes at a position of an epoch: shuffled globally, within blocks, by units, or as stored.

`global` is one permutation of all rows. `block` keeps reads near each other, for storage that is slow to seek:
rows are divided into blocks, the blocks are permuted, and rows are mixed only inside a window of a few blocks that
are consecutive in that order. Eight rows in blocks of 3, with two blocks per window:

    blocks, as stored       0 1 2 | 3 4 5 | 6 7         the last one is short
    blocks, permuted        6 7 | 3 4 5 | 0 1 2         slots 0, 1 and 2
    windows of two slots    6 7 3 4 5 | 0 1 2
    rows mixed in each      6 7 5 4 3 | 0 2 1           the epoch, with the key 2

None of this is stored. Slot k begins at position 3 k, or earlier by what the short block lacks if that block is in a
slot before k; the inverse of the permutation of blocks tells which slot that is. Each epoch has its own key, so
different blocks share a window.

`units` is for data that is fetched in parts, as from an object store: see lanes.py.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.order.keys import derive
from headrace.order.permutation import MAX_SIZE, Permute, permute, unpermute
from headrace.public import public_class

MAX_LANES = 2**16


class ShuffleKind(StrEnum):
    GLOBAL = "global"
    BLOCK = "block"
    UNITS = "units"
    NONE = "none"
    AUTO = "auto"


@public_class
@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """With kind "block", `block` rows are read together, and the rows of `window` blocks are mixed.

    Kind "auto" is "global", but a Loader of remote data takes it for "units".

    With kind "units", `lanes` units of the data are read at once. A unit is what is fetched at once from a remote
    dataset, about 4 MB; a dataset without units counts as a single one.
    """

    kind: str = ShuffleKind.GLOBAL
    block: int = 1024
    window: int = 64
    lanes: int = 128

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", ShuffleKind(self.kind))
        except ValueError:
            raise SettingsError(f"kind={self.kind!r}: must be one of {', '.join(ShuffleKind)}") from None
        for name in ("block", "window", "lanes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise SettingsError(f"{name}={value!r}: must be a whole number of at least 1")
            object.__setattr__(self, name, int(value))
        if self.lanes > MAX_LANES:
            raise SettingsError(f"lanes={self.lanes}: must be at most {MAX_LANES}")

    @staticmethod
    def parse(value: Any) -> "Shuffle":
        """True means `global`, False and None mean `none`; otherwise the name of a kind, or a Shuffle."""
        if isinstance(value, Shuffle):
            return value
        if value is None or isinstance(value, bool):
            return Shuffle(kind=ShuffleKind.GLOBAL if value else ShuffleKind.NONE)
        if isinstance(value, str) and value in list(ShuffleKind):
            return Shuffle(kind=ShuffleKind(value))
        raise SettingsError(
            f"shuffle={value!r}: must be True, False, one of {', '.join(ShuffleKind)}, "
            "or a Shuffle(kind=..., block=..., window=..., lanes=...)"
        )

    def rows_at(self, positions: Any, rows: int, key: Any, permute: Permute = permute) -> NDArray[np.int64]:
        """The rows at these positions of an epoch of `rows` rows, by the key of the epoch, or one for each position.

        With kind "units", the rows are taken for a single unit; `UnitOrder` is for several.
        """
        asked = np.asarray(positions, dtype=np.int64)
        if not 0 <= rows <= MAX_SIZE:
            raise SettingsError(f"rows={rows}: must be 0 to 2^48")
        if asked.size and not 0 <= asked.min() <= asked.max() < rows:
            raise SettingsError(
                f"positions from {asked.min()} to {asked.max()}: must be inside the {rows} rows of the epoch"
            )
        if self.kind is ShuffleKind.NONE or not asked.size:
            return asked.copy()
        keys = _checked_keys(key, asked.size)
        if self.kind in (ShuffleKind.GLOBAL, ShuffleKind.AUTO):
            return permute(asked.reshape(-1), rows, keys).reshape(asked.shape)
        if self.kind is ShuffleKind.UNITS:
            return permute(asked.reshape(-1), rows, derive(keys, 0)).reshape(asked.shape)
        # A block or window larger than the whole epoch has no further effect, and could overflow.
        block = min(self.block, rows)
        slots = _Slots(rows, block, keys, permute)
        return slots.rows_at(asked.reshape(-1), min(self.window, slots.count)).reshape(asked.shape)


def _checked_keys(key: Any, positions: int) -> NDArray[np.uint64]:
    if isinstance(key, int) and not 0 <= key < 2**64:
        raise SettingsError(f"key={key}: must be 0 to 2^64 - 1")
    keys = np.asarray(key, dtype=np.uint64).reshape(-1)
    if len(keys) not in (1, positions):
        raise SettingsError(
            f"{len(keys)} keys for {positions} positions: must be one key, or one for each position"
        )
    return keys


class _Slots:
    """The permuted blocks of an epoch, one after another; for a single epoch, or for one at each position."""

    def __init__(self, rows: int, block: int, keys: NDArray[np.uint64], permute: Permute) -> None:
        self._rows, self._block, self._keys, self._permute = rows, block, keys, permute
        self.count = -(-rows // block)
        self._lacking = self.count * block - rows
        """How many rows the last block lacks."""
        last = np.full(len(keys), self.count - 1)
        self._short = unpermute(last, self.count, keys) if self._lacking else last
        """The slot of the last block."""

    def rows_at(self, positions: NDArray[np.int64], window: int) -> NDArray[np.int64]:
        """The rows at these positions if the rows of every `window` slots are mixed."""
        windows = self._slot_of(positions) // window
        start = self._start_of(windows * window)
        size = self._start_of((windows + 1) * window) - start
        mixed = start + self._permute(positions - start, size, derive(self._keys, windows))
        slot = self._slot_of(mixed)
        return self._permute(slot, self.count, self._keys) * self._block + mixed - self._start_of(slot)

    def _slot_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        after_short = positions >= (self._short + 1) * self._block - self._lacking
        return (positions + self._lacking * after_short) // self._block

    def _start_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The position at which a slot begins; slots past the last one begin at the end."""
        whole = slots * self._block - self._lacking * (slots > self._short)
        return np.minimum(whole, self._rows)
