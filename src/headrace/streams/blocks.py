"""Blocks: the units in which files are read, permuted and shared. Only the sizes of the files need to be known.

A block is (file, k): the records that start in bytes [k T, (k + 1) T) of the file, where T is `block_bytes`. Each
epoch takes the blocks of all files in some order, and C consumers (the workers of all ranks) share them in rounds: each
consumer takes one of every C consecutive blocks. With seven blocks and three consumers:

    order of the epoch    1 6 0 | 4 5 3 | 2           as stored if nothing is shuffled
    takes of the round    1 2 0 | 2 0 1 | 0 1 2       the place in each round that consumers 0, 1 and 2 take
    blocks of consumer    0: 6, 3, 2   1: 0, 4   2: 1, 5

Which consumer takes which place changes from round to round. If it were always the same, a file in which records start
only in every third block (the row groups of Parquet files can be that regular) would go to a single consumer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.order.keys import derive
from headrace.order.permutation import permute
from headrace.readers.inputs import InputFile
from headrace.readers.reader import Split, reader_for
from headrace.readers.spans import Span
from headrace.streams.consumer import Consumer

_ORDER, _ROUNDS = 1, 2
"""What keys are derived for."""
_TURNS_AT_ONCE = 256


@dataclass(frozen=True)
class Blocks:
    """All blocks of some files, numbered file after file."""

    files: Sequence[InputFile]
    block_bytes: int
    split: Split = Split.LINE

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """For each file, the number of the block after its last one."""
        counts = [1 if self._is_whole(file) else -(-file.bytes // self.block_bytes) for file in self.files]
        return np.cumsum(np.maximum(counts, 1), dtype=np.int64)

    def _is_whole(self, file: InputFile) -> bool:
        """Whether a file cannot be read from the middle."""
        return reader_for(file.format).is_whole(file.raw(), self.split)

    @property
    def count(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Span:
        which = int(np.searchsorted(self._ends, number, side="right"))
        file = self.files[which]
        if self._is_whole(file):
            return Span(file, 0, file.bytes)
        first_of_file = int(self._ends[which - 1]) if which else 0
        start = (number - first_of_file) * self.block_bytes
        return Span(file, start, min(start + self.block_bytes, file.bytes))


class Turns:
    """The blocks that one consumer takes in an epoch, in order: `turns[t]` is the number of a block."""

    def __init__(self, blocks: int, consumer: Consumer, epoch: int, seed: int | None) -> None:
        """Without a seed, the blocks are taken in the order in which they are stored."""
        self._blocks, self._consumer, self._epoch, self._seed = blocks, consumer, epoch, seed
        self._first, self._known = 0, np.zeros(0, dtype=np.int64)

    @property
    def count(self) -> int:
        """The most turns that a consumer has."""
        return -(-self._blocks // self._consumer.total)

    def place(self, turn: int) -> int:
        """The place of the block in the order of the epoch."""
        return int(self._places(np.array([turn]))[0])

    def __getitem__(self, turn: int) -> int:
        """Raises IndexError after the last turn."""
        if not self._first <= turn < self._first + len(self._known):
            self._first, self._known = turn, self._look_up(np.arange(turn, turn + _TURNS_AT_ONCE))
        if not len(self._known):
            raise IndexError(f"turn {turn}: there are no more blocks")
        return int(self._known[turn - self._first])

    def _look_up(self, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        places = self._places(turns)
        # Only the last round can be incomplete, so places beyond the last block come last.
        places = places[places < self._blocks]
        if self._seed is None:
            return places
        return permute(places, self._blocks, derive(self._seed, _ORDER, self._epoch))

    def _places(self, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        total = self._consumer.total
        keys = derive(self._seed or 0, _ROUNDS, 0 if self._seed is None else self._epoch, turns // total)
        # In any C rounds that begin at a multiple of C, each consumer takes each place once.
        shifts = permute(turns % total, total, keys)
        return turns * total + (self._consumer.number + shifts) % total
