"""A batch that a worker has made, kept by the server for everybody who asks for it."""

import itertools
import os
from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.store.maps import map_open_file

_numbers = itertools.count(1)


class Segment:
    """A worker's shared memory, as the server sees it: a file that it passes on, or maps to read."""

    def __init__(self, size: int, descriptor: int) -> None:
        self.size, self.descriptor = size, descriptor
        self.number = next(_numbers)
        """By which clients know it: another than that of the worker, of which there are several."""
        self.when_closed: dict[object, Callable[[int], None]] = {}
        """By who wants to be told."""

    @cached_property
    def memory(self) -> NDArray[np.uint8]:
        return map_open_file(self.descriptor, self.size)

    def close(self) -> None:
        os.close(self.descriptor)
        self.__dict__.pop("memory", None)
        for tell in list(self.when_closed.values()):
            tell(self.number)


class Result:
    """Created with one hold on it; when the last hold is let go, the worker may fill the segment again."""

    def __init__(
        self,
        head: bytes,
        inline: NDArray[np.uint8],
        *,
        body_bytes: int | None = None,
        segment: Segment | None = None,
        free: Callable[[], None] | None = None,
        made_seconds: float = 0.0,
        spent: tuple[tuple[str, int, int], ...] = (),
    ) -> None:
        self.head, self._inline, self.segment, self._free = head, inline, segment, free
        self.body_bytes = len(inline) if body_bytes is None else body_bytes
        self.made_seconds, self.spent = made_seconds, spent
        self._holds = 1
        self.when_freed: Callable[[], None] = lambda: None

    @property
    def body(self) -> NDArray[np.uint8]:
        return self._inline if self.segment is None else self.segment.memory[: self.body_bytes]

    @property
    def held_bytes(self) -> int:
        """The memory that it takes."""
        return len(self.head) + (len(self._inline) if self.segment is None else self.segment.size)

    def hold(self) -> "Result":
        self._holds += 1
        return self

    def let_go(self) -> None:
        self._holds -= 1
        if self._holds:
            return
        self.when_freed()
        if self._free is not None:
            self._free()
