"""A permutation of [0, n) that is never stored: a keyed bijection, evaluated at the positions that are needed.

The numbers below the next power of two, 2^b, are split into a left and a right half of bits; each round mixes
one half into the other with a keyed hash (a Feistel network), which can be undone whatever the hash is, so
the whole is a bijection on [0, 2^b). A result of n or more is fed in again until it falls below n ('cycle
walking'): that keeps it a bijection on [0, n), and takes fewer than two tries on average because n > 2^b / 2.

Halves of one or two bits mix slowly, so 32 numbers or fewer are sorted by their hashes instead.

>>> permute(np.arange(10), 10, key=1)
array([8, 4, 9, 0, 7, 2, 6, 5, 3, 1])

Sizes and keys may be arrays too: then every position has its own permutation.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError

MAX_SIZE = 2**48
_ROUNDS = 8
_SMALL = 32
_U = np.uint64
Permute = Callable[[Any, Any, Any], NDArray[np.int64]]
"""`permute`, or a faster function with the same results: positions, sizes and keys -> numbers."""
GOLDEN = np.array([0x9E3779B97F4A7C15], dtype=_U)
_TURNS = [GOLDEN * _U(turn) for turn in range(_ROUNDS)]


def permute(positions: Any, size: Any, key: Any) -> NDArray[np.int64]:
    """The numbers at these positions, for sizes up to 2^48 and keys below 2^64."""
    return _walk(positions, size, key, backwards=False)


def unpermute(numbers: Any, size: Any, key: Any) -> NDArray[np.int64]:
    """The positions of these numbers: `unpermute(permute(p, n, k), n, k) == p`."""
    return _walk(numbers, size, key, backwards=True)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64, in place: every input bit flips every output bit half of the time."""
    values ^= values >> _U(30)
    values *= _U(0xBF58476D1CE4E5B9)
    values ^= values >> _U(27)
    values *= _U(0x94D049BB133111EB)
    values ^= values >> _U(31)
    return values


def _walk(positions: Any, size: Any, key: Any, backwards: bool) -> NDArray[np.int64]:
    numbers = np.asarray(positions, dtype=np.int64)
    sizes, keys = _checked(size, key)
    if numbers.size and (numbers.min() < 0 or (numbers >= sizes.view(np.int64)).any()):
        raise SettingsError(
            f"positions from {numbers.min()} to {numbers.max()}: must be inside a permutation of size {size}"
        )
    flat = numbers.reshape(-1).astype(_U)
    small = sizes <= _U(_SMALL)
    if small.all():
        return _by_hash(flat, sizes, keys, backwards).reshape(numbers.shape)
    out = _by_network(flat, _Network(np.maximum(sizes, _U(_SMALL)), keys), backwards)
    where = np.flatnonzero(small)
    if len(where):
        some = keys[where] if len(keys) > 1 else keys
        out[where] = _by_hash(flat[where], sizes[where], some, backwards)
    return out.reshape(numbers.shape)


def _by_hash(
    numbers: NDArray[np.uint64], size: NDArray[np.uint64], key: NDArray[np.uint64], backwards: bool
) -> NDArray[np.int64]:
    """Number p goes to position i if its hash is the i-th smallest; backwards, find that p."""
    every = np.arange(int(size.max(initial=_U(1))), dtype=_U)
    hashes = mix(mix(key + GOLDEN)[:, None] + every * GOLDEN)
    # Numbers beyond the size come last.
    hashes = np.where(every < size[:, None], hashes, _U(2**64 - 1))
    order = np.argsort(hashes, axis=1, kind="stable")
    places = order if backwards else np.argsort(order, axis=1, kind="stable")
    places = np.broadcast_to(places, (len(numbers), places.shape[1]))
    return places[np.arange(len(numbers)), numbers.view(np.int64)]


def _by_network(numbers: NDArray[np.uint64], network: "_Network", backwards: bool) -> NDArray[np.int64]:
    out = network(numbers, backwards)
    outside = np.flatnonzero(out >= network.size)
    network = network.part(outside)
    while len(outside):
        tried = out[outside] = network(out[outside], backwards)
        still = np.flatnonzero(tried >= network.size)
        outside, network = outside[still], network.part(still)
    return out.view(np.int64)


def _checked(size: Any, key: Any) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    lowest, highest = (
        (size, size) if isinstance(size, int) else (np.min(size, initial=0), np.max(size, initial=0))
    )
    if not 0 <= lowest <= highest <= MAX_SIZE:
        raise SettingsError(f"size={size}: must be 0 to 2^48")
    if isinstance(key, int) and not 0 <= key < 2**64:
        raise SettingsError(f"key={key}: must be 0 to 2^64 - 1")
    # At least one dimension: NumPy warns about overflows of single numbers, and hashing overflows.
    return np.atleast_1d(np.asarray(size, dtype=_U)).reshape(-1), np.atleast_1d(
        np.asarray(key, dtype=_U)
    ).reshape(-1)


class _Network:
    """The Feistel network of a single size and key, or of a size and key for each number."""

    def __init__(self, size: NDArray[np.uint64], key: NDArray[np.uint64]) -> None:
        self.size, self._key = size, key
        # frexp gives the bit length, exactly for anything below 2^53.
        bits = np.frexp(size - _U(1))[1].astype(_U)
        self._low_bits = bits >> _U(1)
        self._low_mask = (_U(1) << self._low_bits) - _U(1)
        self._high_mask = (_U(1) << (bits - self._low_bits)) - _U(1)

    def part(self, which: NDArray[np.intp]) -> "_Network":
        """The networks of some of the numbers."""
        if len(self.size) == len(self._key) == 1:
            return self
        size, key = (array[which] if len(array) > 1 else array for array in (self.size, self._key))
        return _Network(size, key)

    def __call__(self, numbers: NDArray[np.uint64], backwards: bool) -> NDArray[np.uint64]:
        high, low = numbers >> self._low_bits, numbers & self._low_mask
        key = mix(self._key + GOLDEN)
        for turn in reversed(range(_ROUNDS)) if backwards else range(_ROUNDS):
            turn_key = key + _TURNS[turn]
            if turn % 2:
                turn_key = mix(np.bitwise_xor(turn_key, high))
                turn_key &= self._low_mask
                low ^= turn_key
            else:
                turn_key = mix(np.bitwise_xor(turn_key, low))
                turn_key &= self._high_mask
                high ^= turn_key
        high <<= self._low_bits
        merged: NDArray[np.uint64] = high | low
        return merged
