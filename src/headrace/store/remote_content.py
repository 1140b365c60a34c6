"""The bytes of an object as an array shows them, `content[start:stop]`, in requests of about 8 MB.

Whoever knows what comes next says so: an expected range is fetched in pieces, two of them ahead of the one that is
read, so that the network works while somebody parses. Everything else is fetched when it is asked for, 64 KB at least;
each time that a read goes on where the one before has ended, twice as much is fetched.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.store.fetching import SMALL_BYTES, fetching
from headrace.store.remote_object import RemoteObject

PIECE_BYTES = 8 << 20
_AHEAD = 2
_LEAST_BYTES = 1 << 16

ByteRange = tuple[int, int]
_Read = Callable[[int, int], memoryview]


class RemoteContent:
    """One thread at a time may use it."""

    def __init__(self, object: RemoteObject) -> None:
        self._read, self._size = object.read, object.size
        self._owner = os.getpid()
        self._expected: list[_Expected] = []
        self._recent = (0, memoryview(b""))
        """What was fetched last that nobody had expected, and the position of its first byte."""
        self._recent_bytes = _LEAST_BYTES
        self._reached = 0
        """Where the last read that nobody had expected ended."""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, where: slice) -> NDArray[np.uint8]:
        if self._owner != os.getpid():
            # The threads that fetch for the process that this one was forked from do not exist here.
            self._owner, self._expected = os.getpid(), []
        start, stop, _ = where.indices(self._size)
        parts: list[memoryview] = []
        while start < stop:
            some = self._some(start, stop)
            parts += some
            start += sum(map(len, some))
        if len(parts) == 1:
            return np.frombuffer(parts[0], dtype=np.uint8)
        return np.frombuffer(b"".join(parts), dtype=np.uint8)

    def expect(self, ranges: Iterable[ByteRange]) -> None:
        """These ranges will be read from now on, each from its beginning to its end, and no others that were expected
        before. The beginnings of all of them are fetched at once."""
        expected = []
        for start, stop in self._wanted(ranges):
            known = (each for each in self._expected if each.start <= start and stop <= each.stop)
            expected.append(next(known, None) or _Expected(self._read, start, stop))
        for each in self._expected:
            if each not in expected:
                each.cancel()
        self._expected = expected
        for each in expected:
            each.begin()

    def _wanted(self, ranges: Iterable[ByteRange]) -> list[ByteRange]:
        """The ranges as far as the object has them."""
        within = [(max(0, start), min(stop, self._size)) for start, stop in ranges]
        wanted = [(start, stop) for start, stop in within if start < stop]
        if wanted and self._size <= SMALL_BYTES:
            return [(0, self._size)]
        return wanted

    def _some(self, start: int, stop: int) -> list[memoryview]:
        """Bytes from `start` on, at least one and at most until `stop`."""
        holding = next((each for each in self._expected if each.start <= start < each.stop), None)
        if holding is not None:
            return holding.read(start, min(stop, holding.stop))
        position, recent = self._recent
        if position <= start < position + len(recent):
            return [recent[start - position : stop - position]]
        following = min((each.start for each in self._expected if each.start > start), default=stop)
        return [self._unexpected(start, min(stop, following))]

    def _unexpected(self, start: int, stop: int) -> memoryview:
        goes_on = 0 < start == self._reached
        self._recent_bytes = min(2 * self._recent_bytes, PIECE_BYTES) if goes_on else _LEAST_BYTES
        count = self._size if self._size <= SMALL_BYTES else self._recent_bytes
        end = min(max(stop, start + count), self._size)
        # What libraries look for at the end of a file is near the end, and a little more comes with it.
        begin = max(0, min(start, end - count))
        content = self._fetch(begin, end)
        self._reached = end
        # What is large is not kept: nobody asks for small parts of it.
        self._recent = (begin, content if len(content) <= PIECE_BYTES else content[:0])
        return content[start - begin : stop - begin]

    def _fetch(self, start: int, stop: int) -> memoryview:
        """Any bytes; many of them in several requests at once."""
        calls = [partial(self._read, *pair) for pair in pairwise(_evenly(start, stop))]
        parts = fetching().urgent(calls)
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


class _Expected:
    """A range that is read from its beginning to its end, in pieces. Those behind are let go."""

    def __init__(self, read: _Read, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self._read = read
        self._bounds = _evenly(start, stop)
        self._pieces: dict[int, Future[memoryview]] = {}

    def begin(self) -> None:
        if not self._pieces:
            self._want(0)

    def read(self, start: int, stop: int) -> list[memoryview]:
        first, last = self._piece_at(start), self._piece_at(stop - 1)
        for number in range(first, min(last + _AHEAD, len(self._bounds) - 2) + 1):
            self._want(number)
        for number in [number for number in self._pieces if number < first]:
            del self._pieces[number]
        parts = []
        for number in range(first, last + 1):
            begin = self._bounds[number]
            try:
                piece = self._pieces[number].result()
            except BaseException:
                # Whoever asks again gets another attempt.
                self._pieces.pop(number, None)
                raise
            parts.append(piece[max(0, start - begin) : stop - begin])
        return parts

    def cancel(self) -> None:
        """What has not been asked for yet is not needed."""
        for future in self._pieces.values():
            future.cancel()
        self._pieces.clear()

    def _piece_at(self, position: int) -> int:
        return int(np.searchsorted(self._bounds, position, side="right")) - 1

    def _want(self, number: int) -> None:
        if number not in self._pieces:
            call = partial(self._read, self._bounds[number], self._bounds[number + 1])
            self._pieces[number] = fetching().ahead(call)


def _evenly(start: int, stop: int) -> list[int]:
    """The bounds of pieces of about equal size."""
    count = max(1, round((stop - start) / PIECE_BYTES))
    return [start + (stop - start) * number // count for number in range(count + 1)]
