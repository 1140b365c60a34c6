"""A permutation of [0, n) that is never stored: a keyed bijection, evaluated where it is needed.

The numbers below the next power of two, 2^b, are split into a left and a right half of bits; each round mixes
one half into the other with a keyed hash (a Feistel network), which can be undone whatever the hash is, so
the whole is a bijection on [0, 2^b). A result of n or more is fed in again until it falls below n ('cycle
walking'): that keeps it a bijection on [0, n), and takes fewer than two tries on average because n > 2^b / 2.

>>> Permutation(10, key=1)(np.arange(10))
array([1, 4, 2, 6, 8, 0, 3, 9, 7, 5])
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SettingsError

MAX_SIZE = 2**48
_ROUNDS = 8
_U = np.uint64


@dataclass(frozen=True)
class Permutation:
    """`permutation(positions)` gives the numbers at those positions; any n up to 2^48, any key below 2^64."""

    size: int
    key: int
    _round_keys: NDArray[np.uint64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_SIZE:
            raise SettingsError(f"size={self.size}: a permutation has 0 to 2^48 elements")
        if not 0 <= self.key < 2**64:
            raise SettingsError(f"key={self.key}: must be 0 to 2^64 - 1")
        seeds = np.arange(1, _ROUNDS + 1, dtype=_U) * _U(0x9E3779B97F4A7C15)
        with np.errstate(over="ignore"):
            keys = _mix(seeds ^ _mix(np.full(_ROUNDS, self.key, dtype=_U) + seeds))
        object.__setattr__(self, "_round_keys", keys)

    def __call__(self, positions: Any) -> NDArray[np.int64]:
        numbers = np.asarray(positions, dtype=np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.size):
            raise SettingsError(
                f"positions from {numbers.min()} to {numbers.max()} in a permutation of {self.size}"
            )
        flat = self._network(numbers.reshape(-1).astype(_U))
        outside = np.flatnonzero(flat >= _U(self.size))
        while len(outside):
            flat[outside] = self._network(flat[outside])
            outside = outside[flat[outside] >= _U(self.size)]
        return flat.astype(np.int64).reshape(numbers.shape)

    def _network(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = max(2, (max(self.size, 1) - 1).bit_length())
        low_bits = _U(bits // 2)
        low_mask, high_mask = (_U(1) << low_bits) - _U(1), (_U(1) << _U(bits - bits // 2)) - _U(1)
        high, low = numbers >> low_bits, numbers & low_mask
        for number, key in enumerate(self._round_keys):
            if number % 2:
                low = low ^ (_mix(high ^ key) & low_mask)
            else:
                high = high ^ (_mix(low ^ key) & high_mask)
        return (high << low_bits) | low


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every input bit changes every output bit half of the time."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> _U(27))) * _U(0x94D049BB133111EB)
    return values ^ (values >> _U(31))
