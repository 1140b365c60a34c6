"""Unnamed shared memory, made by a worker process and reused for batch after batch.

Each worker has its own segments. It makes one when it needs one and sends the descriptor of its file along with the
first batch in it; then both sides close that descriptor. So a segment needs no open file, and disappears with the last
process that has it mapped, however that process ends.

    worker: free -> fills it -> "batch 7 is in segment 2" -> parent: views of it -> the last view dies -> "2 is free"

The parent need not release anything. Each batch has its own array over the segment, the owner, which NumPy makes the
base of every view; when the last view dies, so does the owner, and a weak reference reports it. On the worker's side
the same mechanism shows whether the user's code still refers to a batch: such a segment is not reused yet.

A process can have only so many maps (65,530 on most Linux systems). So the parent of a loop that keeps thousands of
batches copies those beyond a bound out of their segments, which are free again at once.
"""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import StageError
from headrace.store.maps import map_memory
from headrace.workers import wire

INLINE = -1
"""In place of a segment's number: the bytes come with the message."""
_INLINE_BYTES = 2**15
"""A batch of at most this size is sent with its message: a segment takes at least a page, and one of the parent's maps
for as long as the user holds the batch."""
_SPARE = 4
"""A free segment is dropped if it is this many times larger than what batches need."""

MOST_IN_USE = 2**14
"""How many segments the batches that the user holds may occupy in one process."""

Place = tuple[int, int, int]
"""The number of a segment, the first byte, and the number of bytes."""


class Parcel(NamedTuple):
    """Where the buffers of a batch are, and what the other side needs to open them."""

    places: list[Place]
    made: list[tuple[int, int]]
    """The numbers and sizes of new segments, whose descriptors come with the message in this order."""
    dropped: list[int]
    inline: list[memoryview]

    @property
    def inline_bytes(self) -> int:
        return sum(wire.round_up(len(each)) for each in self.inline)

    def joined_inline(self) -> memoryview | None:
        """The buffers that are sent with the message, end to end."""
        if not self.inline:
            return None
        joined = wire.aligned(self.inline_bytes)
        first = 0
        for each in self.inline:
            joined.data[first : first + len(each)] = each
            first += wire.round_up(len(each))
        return joined.data

    def described(self) -> "Parcel":
        """The parcel without the buffers, to be sent as the head of the message."""
        return self._replace(inline=[])


class _Segment:
    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        descriptor = wire.anonymous_file()
        try:
            os.ftruncate(descriptor, size)
            if hasattr(os, "posix_fallocate"):
                # A lack of memory then shows here, and not when the segment is written to.
                os.posix_fallocate(descriptor, 0, size)
            self._mapped = map_memory(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor: int | None = descriptor
        """The open file, until it is sent."""
        self.owner: weakref.ref[Any] | None = None
        self.address = self._own().__array_interface__["data"][0]

    def _own(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._mapped, np.uint8)

    def open(self) -> NDArray[np.uint8]:
        """An array over the segment, for one batch."""
        owner = self._own()
        self.owner = weakref.ref(owner)
        return owner

    def is_kept(self) -> bool:
        return self.owner is not None and self.owner() is not None


class WorkerSegments:
    """The worker's side. Call `begin`, then `memory` for what is collated, then `place` for the whole batch."""

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._free: list[_Segment] = []
        self._kept: list[_Segment] = []
        self._opened: list[_Segment] = []
        """The segments of the batch that is being made."""
        self._numbers = 0
        self._need = 0
        """The approximate number of bytes that a batch takes."""
        self._current: _Segment | None = None
        self._owner: NDArray[np.uint8] | None = None
        self._used = 0
        self._made: list[_Segment] = []
        self._dropped: list[int] = []

    def give_back(self, numbers: Iterable[int]) -> None:
        """Take back segments that the parent has no more views of."""
        self._kept.extend(self._segments[number] for number in numbers)

    def give_up(self, numbers: Iterable[int]) -> None:
        """Drop segments of which a fork of the parent may have views."""
        for number in numbers:
            del self._segments[number]

    def begin(self) -> None:
        """Begin a new batch, in a free segment that is large enough, or in a new one."""
        # There are none, unless the previous batch failed.
        self._close_all_but(set())
        self._sort_out()
        self._open(self._find(self._need) if self._need > _INLINE_BYTES else None)

    def memory(self, size: int) -> NDArray[np.uint8] | None:
        if self._current is None or self._owner is None or self._used + size > self._current.size:
            return None
        first = self._used
        self._used += wire.round_up(size)
        return self._owner[first : first + size]

    def place(self, buffers: Sequence[memoryview]) -> Parcel:
        """Where each buffer is; those that are not in the segment yet are copied there, or to a new one."""
        arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        found = [self._place_of(array) for array in arrays]
        outside = sum(wire.round_up(len(a)) for a, place in zip(arrays, found, strict=True) if place is None)
        total = self._used + outside
        self._make_room(outside)
        places: list[Place] = []
        inline: list[memoryview] = []
        for array, place in zip(arrays, found, strict=True):
            places.append(self._copy(array, inline) if place is None else place)
        # It shrinks in small steps, so that batches of uneven sizes do not each make a new segment.
        self._need = max(total, self._need - self._need // 16)
        made, self._made = self._made, []
        dropped, self._dropped = self._dropped, []
        self._close_all_but({number for number, _, _ in places})
        return Parcel(places, [(each.number, each.size) for each in made], dropped, inline)

    def _make_room(self, outside: int) -> None:
        """Open a segment for `outside` more bytes, unless they fit the current one or go with the message."""
        total = self._used + outside
        if self._current is None:
            if total > _INLINE_BYTES:
                self._open(self._find(total))
        elif total > self._current.size:
            self._open(self._find(outside))

    def take_descriptors(self, parcel: Parcel) -> list[int]:
        """The descriptors of the segments that are new to the parent."""
        descriptors = []
        for number, _ in parcel.made:
            segment = self._segments[number]
            if segment.descriptor is not None:
                descriptors.append(segment.descriptor)
                segment.descriptor = None
        return descriptors

    def _place_of(self, array: NDArray[np.uint8]) -> Place | None:
        current, size = self._current, len(array)
        if not size:
            return (INLINE, 0, 0)
        if current is None:
            return None
        first = array.__array_interface__["data"][0] - current.address
        return (current.number, first, size) if 0 <= first < current.size else None

    def _copy(self, array: NDArray[np.uint8], inline: list[memoryview]) -> Place:
        room = self.memory(len(array))
        if room is None or self._current is None:
            first = sum(wire.round_up(len(each)) for each in inline)
            inline.append(array.data)
            return (INLINE, first, len(array))
        first = self._used - wire.round_up(len(array))
        np.copyto(room, array)
        return (self._current.number, first, len(array))

    def _open(self, segment: _Segment | None) -> None:
        """Continue in a segment. A batch may use two: what was collated stays in the first."""
        self._current, self._used = segment, 0
        self._owner = None if segment is None else segment.open()
        if segment is not None:
            self._opened.append(segment)

    def _close_all_but(self, sent: set[int]) -> None:
        """Keep the segments in which nothing was sent, since the parent will not give them back."""
        self._kept.extend(segment for segment in self._opened if segment.number not in sent)
        self._opened.clear()
        self._current = self._owner = None

    def _find(self, size: int) -> _Segment | None:
        """A free segment of at least that size, or else a new one; None if there is not enough memory."""
        for place in range(len(self._free) - 1, -1, -1):
            if self._free[place].size >= size:
                return self._free.pop(place)
        try:
            segment = _Segment(self._numbers, wire.round_up(size + size // 4, mmap.PAGESIZE))
        except OSError:
            return None
        self._numbers += 1
        self._segments[segment.number] = segment
        self._made.append(segment)
        return segment

    def _sort_out(self) -> None:
        """Free the segments that are no longer in use, and drop those that are too small or too large."""
        still, returned = [], self._kept
        for segment in returned:
            if segment.is_kept():
                still.append(segment)
            elif self._need <= segment.size <= max(_SPARE * self._need, mmap.PAGESIZE):
                self._free.append(segment)
            else:
                del self._segments[segment.number]
                self._dropped.append(segment.number)
        self._kept = still


class ParentSegments:
    """The parent's side: the segments of one worker, and those that have become free."""

    def __init__(self) -> None:
        self._mapped: dict[int, Any] = {}
        self._uses: dict[int, _Use] = {}
        self._freed: deque[int] = deque()
        self._lost: list[int] = []
        _living.add(self)

    def receive(
        self, parcel: Parcel, descriptors: Sequence[int], inline: NDArray[np.uint8]
    ) -> list[NDArray[np.uint8]]:
        """The buffers of a batch, from what came with its message."""
        self._meet(parcel.made, parcel.dropped, descriptors)
        buffers = self._views(parcel.places, inline)
        if len(_in_use) > MOST_IN_USE:
            return [buffer.copy() for buffer in buffers]
        return buffers

    def _meet(
        self, made: Sequence[tuple[int, int]], dropped: Sequence[int], descriptors: Sequence[int]
    ) -> None:
        try:
            for (number, size), descriptor in zip(made, descriptors, strict=True):
                self._mapped[number] = _mapped(descriptor, size)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        for number in dropped:
            self._mapped.pop(number, None)
            self._uses.pop(number, None)

    def _views(self, places: Sequence[Place], inline: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The buffers of a batch. When the last view of a segment dies, the segment is free."""
        owners: dict[int, NDArray[np.uint8]] = {INLINE: inline}
        for number in {number for number, _, _ in places} - {INLINE}:
            owners[number] = self._own(number)
        return [owners[number][first : first + size] for number, first, size in places]

    def _own(self, number: int) -> NDArray[np.uint8]:
        owner = np.frombuffer(self._mapped[number], np.uint8)
        use = _Use(owner, _end_use)
        use.number, use.freed = number, self._freed
        self._uses[number] = _in_use[id(use)] = use
        return owner

    def lose_those_in_use(self) -> None:
        """Give up segments in use before a fork: its views of them die unnoticed, so they cannot be reused."""
        for number, use in list(self._uses.items()):
            if use() is not None:
                use.freed = None
                del self._uses[number], self._mapped[number]
                self._lost.append(number)

    def take_lost(self) -> list[int]:
        lost, self._lost = self._lost, []
        return lost

    def take_freed(self) -> list[int]:
        freed = []
        while self._freed:
            freed.append(self._freed.popleft())
        return freed


class _Use(weakref.ref[Any]):
    """That a segment is in use: refers to the owner of a batch's views."""

    __slots__ = ("freed", "number")
    number: int
    freed: deque[int] | None
    """Where the segment's number goes when the last view is gone; nowhere if the segment was given up."""


_in_use: dict[int, _Use] = {}
"""All uses in this process, by identity, whether or not the workers that made the segments are still there."""


def _end_use(use: Any) -> None:
    _in_use.pop(id(use), None)
    if use.freed is not None:
        use.freed.append(use.number)


def _mapped(descriptor: int, size: int) -> Any:
    try:
        return map_memory(descriptor, size)
    except OSError as error:
        raise StageError(
            f"a batch of {size:,} bytes from a worker cannot be mapped into memory: {error.strerror}; this process may "
            "have too many maps (see vm.max_map_count), or too little memory: keep fewer batches, or copies of them"
        ) from error


_living: "weakref.WeakSet[ParentSegments]" = weakref.WeakSet()


def _before_fork() -> None:
    for segments in list(_living):
        segments.lose_those_in_use()


os.register_at_fork(before=_before_fork)
