"""Shared memory that holds batches: made and filled by a worker, read by the server and by clients on its machine.

A segment is an unnamed file that the worker maps. Others can map it only to read, so a client cannot change what
another one gets. When nobody reads the batch in it any more, the worker fills it with another.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from headrace.serve.packed import Packed
from headrace.store.maps import map_memory
from headrace.workers import wire

INLINE_BYTES = 2**15
"""A body of at most this size comes with its message: a segment takes a descriptor, and at least a page."""
_SPARE = 4
"""A free segment is dropped if it is this many times larger than what is needed."""
_MOST_FREE = 8
_SEAL_FUTURE_WRITE = getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)


class _Segment(NamedTuple):
    number: int
    size: int
    memory: Any


class Placed(NamedTuple):
    """Where a body was put."""

    number: int
    size: int
    descriptor: int | None
    """Of a segment that the server does not know yet."""


class WorkerSegments:
    """The segments of one worker process, whose threads share them."""

    def __init__(self) -> None:
        self._free: list[_Segment] = []
        self._in_use: dict[int, _Segment] = {}
        self._numbers = 0
        self._dropped: list[int] = []
        self._lock = threading.Lock()

    def put(self, packed: Packed) -> Placed:
        """Copy a body into a segment. OSError if there is not enough memory."""
        with self._lock:
            segment, descriptor = self._take(packed.body_bytes)
            self._in_use[segment.number] = segment
        packed.write(np.frombuffer(segment.memory, np.uint8))
        return Placed(segment.number, segment.size, descriptor)

    def give_back(self, numbers: Iterable[int]) -> None:
        """Nobody reads these any more."""
        with self._lock:
            self._free += [self._in_use.pop(number) for number in numbers]

    def take_dropped(self) -> list[int]:
        """The segments that are not used any more, so that the server closes them too."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def _take(self, size: int) -> tuple[_Segment, int | None]:
        fitting = [each for each in self._free if size <= each.size <= _SPARE * size]
        if fitting:
            # The one used last may still be in the processor's cache.
            segment = fitting[-1]
            self._free.remove(segment)
            self._drop_all_but(_MOST_FREE)
            return segment, None
        self._drop_all_but(_MOST_FREE // 2)
        self._numbers += 1
        return _new_segment(self._numbers, wire.round_up(size, mmap.PAGESIZE))

    def _drop_all_but(self, count: int) -> None:
        for segment in self._free[: max(0, len(self._free) - count)]:
            self._free.remove(segment)
            self._dropped.append(segment.number)


def _new_segment(number: int, size: int) -> tuple[_Segment, int]:
    descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # A lack of memory then shows here, and not when the segment is written to.
        os.posix_fallocate(descriptor, 0, size)
        memory = map_memory(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return _Segment(number, size, memory), descriptor
