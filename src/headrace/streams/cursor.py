"""How a stream knows where it stands: cursors, each over the one before it.

A cursor hands out items, and `state()` says where the next one begins, as something that JSON can hold: opened there,
the cursor goes on with that item. Whatever makes its items one by one of the items below stands where the cursor below
stands. Whatever takes a group of items at once (to mix, encode or pack them) stands at

    [where the group began, how many of what came of it were handed out]

and is resumed by making that group again and dropping so many. Nothing that was read is ever part of a state.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from headrace.errors import StateError
from headrace.streams.bad import StreamBadRecords

State = Any
OpenAt = Callable[[State], "Cursor"]
"""Opens the cursor below at a state, or at the beginning if that is None."""


class Cursor(Protocol):
    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def state(self) -> State:
        """Where the next item begins. An error on the way to an item leaves it where it was."""
        ...


class Operation(Protocol):
    """One step of a stream, as a value: it is sent to workers and opened there."""

    def describe(self) -> str:
        """What decides its outcome: a resumed stream must agree on it."""
        ...

    def open(self, open_below: OpenAt, state: State, bad: StreamBadRecords) -> Cursor: ...


class Groups(Protocol):
    """Makes one group after the other."""

    def state(self) -> State:
        """Where the next group begins."""
        ...

    def make(self) -> Sequence[Any]:
        """What comes of the next group; StopIteration after the last."""
        ...


class GroupCursor:
    def __init__(self, groups: Groups, handed: int = 0) -> None:
        """`groups` stand where their first group begins, and `handed` of what comes of it are dropped."""
        self._groups, self._handed = groups, handed
        self._items: Sequence[Any] = ()
        self._begin: State = groups.state()
        self._made = False
        """Whether `_items` are those of the group that began at `_begin`."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while not self._made or self._handed >= len(self._items):
            self._next_group()
        item = self._items[self._handed]
        self._handed += 1
        return item

    def _next_group(self) -> None:
        if self._made:
            self._begin, self._handed, self._made = self._groups.state(), 0, False
        self._items = self._groups.make()
        if self._handed > len(self._items):
            raise StateError(
                f"{self._handed} items of a group were handed out before, and now it makes {len(self._items)}: the "
                "data, a function or max_bad_records has changed since the state was saved"
            )
        self._made = True

    def state(self) -> State:
        if self._made and self._handed >= len(self._items):
            return [self._groups.state(), 0]
        return [self._begin, self._handed]


def take(cursor: Cursor, count: int) -> list[Any]:
    """Up to so many items; StopIteration if there is none."""
    items = list(itertools.islice(cursor, count))
    if not items:
        raise StopIteration
    return items
