"""Which row stands at a position of an epoch: shuffled wholly, shuffled near together, or as stored.

`global` is one permutation of all rows. `block` keeps reads near each other, for storage that is slow to seek:
rows are cut into blocks, the blocks are permuted, and rows are mixed only inside a window of a few blocks that
follow each other in that order. Eight rows in blocks of 3, two blocks a window:

    blocks, as stored       0 1 2 | 3 4 5 | 6 7         the last one is short
    blocks, permuted        6 7 | 3 4 5 | 0 1 2         slots 0, 1 and 2
    windows of two slots    6 7 3 4 5 | 0 1 2
    rows mixed in each      6 7 5 4 3 | 0 2 1           the epoch, with the key 2

Nothing of this is stored. Slot k begins at position 3 k, or earlier by what the short block lacks if that block
stands in a slot before k; the inverse of the permutation of blocks tells which slot that is. Another epoch has
another key, so other blocks meet in a window.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.order.keys import derive
from headrace.order.permutation import MAX_SIZE, Permute, permute, unpermute


class ShuffleKind(StrEnum):
    GLOBAL = "global"
    BLOCK = "block"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """`block` rows are read together, and the rows of `window` blocks are mixed; both only matter to `block`."""

    kind: str = ShuffleKind.GLOBAL
    block: int = 1024
    window: int = 64

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", ShuffleKind(self.kind))
        except ValueError:
            raise SettingsError(f"kind={self.kind!r}: must be one of {', '.join(ShuffleKind)}") from None
        for name in ("block", "window"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise SettingsError(f"{name}={value!r}: must be a whole number of at least 1")
            object.__setattr__(self, name, int(value))

    @staticmethod
    def parse(value: Any) -> "Shuffle":
        """True is `global`, False and None are `none`; otherwise a kind by name, or a Shuffle."""
        if isinstance(value, Shuffle):
            return value
        if value is None or isinstance(value, bool):
            return Shuffle(kind=ShuffleKind.GLOBAL if value else ShuffleKind.NONE)
        if isinstance(value, str) and value in list(ShuffleKind):
            return Shuffle(kind=ShuffleKind(value))
        raise SettingsError(
            f"shuffle={value!r}: must be True, False, one of {', '.join(ShuffleKind)}, "
            "or a Shuffle(kind=..., block=..., window=...)"
        )

    def rows_at(self, positions: Any, rows: int, key: Any, permute: Permute = permute) -> NDArray[np.int64]:
        """The rows at those positions of an epoch of `rows` rows. `key` is the epoch's, or one a position."""
        asked = np.asarray(positions, dtype=np.int64)
        if not 0 <= rows <= MAX_SIZE:
            raise SettingsError(f"rows={rows}: must be 0 to 2^48")
        if asked.size and not 0 <= asked.min() <= asked.max() < rows:
            raise SettingsError(f"positions from {asked.min()} to {asked.max()}: there are {rows} rows")
        if self.kind is ShuffleKind.NONE or not asked.size:
            return asked.copy()
        keys = _checked_keys(key, asked.size)
        if self.kind is ShuffleKind.GLOBAL:
            return permute(asked.reshape(-1), rows, keys).reshape(asked.shape)
        # A block or a window larger than everything there is changes nothing, and could overflow.
        block = min(self.block, rows)
        slots = _Slots(rows, block, keys, permute)
        return slots.rows_at(asked.reshape(-1), min(self.window, slots.count)).reshape(asked.shape)


def _checked_keys(key: Any, positions: int) -> NDArray[np.uint64]:
    if isinstance(key, int) and not 0 <= key < 2**64:
        raise SettingsError(f"key={key}: must be 0 to 2^64 - 1")
    keys = np.asarray(key, dtype=np.uint64).reshape(-1)
    if len(keys) not in (1, positions):
        raise SettingsError(f"{len(keys)} keys for {positions} positions: must be one key, or one a position")
    return keys


class _Slots:
    """The permuted blocks of an epoch, one after the other; of one epoch, or of one for each position."""

    def __init__(self, rows: int, block: int, keys: NDArray[np.uint64], permute: Permute) -> None:
        self._rows, self._block, self._keys, self._permute = rows, block, keys, permute
        self.count = -(-rows // block)
        self._lacking = self.count * block - rows
        """Rows that the last block is short of a whole one."""
        last = np.full(len(keys), self.count - 1)
        self._short = unpermute(last, self.count, keys) if self._lacking else last
        """The slot of the last block."""

    def rows_at(self, positions: NDArray[np.int64], window: int) -> NDArray[np.int64]:
        """The rows at those positions if the rows of each `window` slots are mixed."""
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
        """The position at which a slot begins; every slot past the last one begins at the end."""
        whole = slots * self._block - self._lacking * (slots > self._short)
        return np.minimum(whole, self._rows)
