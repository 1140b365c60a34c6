"""How a stream keeps track of its position: cursors, each on top of the one below.

A cursor hands out items, and `state()` says where the next one begins, as a value that can be stored as JSON: a cursor
that is opened there continues with that item. A cursor that makes each item from one item below has the same state as
the cursor below. A cursor that takes a group of items at once (to shuffle, encode or pack them) has the state

    [where the group began, how many of the items made from it were handed out]

and is resumed by making that group again and dropping that many items. A state never contains any data.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from headrace.errors import StateError
from headrace.streams.bad import StreamBadRecords

_LARGEST = 2**62

State = Any
OpenAt = Callable[[State], "Cursor"]
"""Opens the cursor below at a state, or at the beginning if the state is None."""


def split_state(state: State) -> tuple[State, int]:
    """A state `[where something began, how much of it is done]`; the beginning if the state is None."""
    if state is None:
        return None, 0
    begin, done = parts_of(state, 2)
    return begin, count_in(done)


def parts_of(state: State, count: int) -> list[Any]:
    """The parts of a state, which must be this many."""
    if not isinstance(state, list | tuple) or len(state) != count:
        raise damaged(state)
    return list(state)


def count_in(value: Any) -> int:
    """A number in a state, where something is counted."""
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise damaged(value)
    return value


def damaged(part: Any) -> StateError:
    shown = repr(part)
    return StateError(
        f"the state is damaged: {shown if len(shown) <= 80 else shown[:80] + '...'} is not a place in this stream; "
        "load a state that is as state_dict() returned it"
    )


class Cursor(Protocol):
    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def state(self) -> State:
        """Where the next item begins. If making an item fails, the state does not change."""
        ...


class Operation(Protocol):
    """One step of a stream, as a value that can be sent to workers and opened there."""

    def describe(self) -> str:
        """What decides the outcome of the operation; it must be the same when a stream is resumed."""
        ...

    def open(self, open_below: OpenAt, state: State, bad: StreamBadRecords) -> Cursor: ...


class Groups(Protocol):
    """Makes one group of items after the other."""

    def state(self) -> State:
        """Where the next group begins."""
        ...

    def make(self) -> Sequence[Any]:
        """The items made from the next group. Raises StopIteration after the last group."""
        ...


class GroupCursor:
    def __init__(self, groups: Groups, handed: int = 0) -> None:
        """`groups` is at the beginning of a group, whose first `handed` items are dropped."""
        self._groups, self._handed = groups, handed
        self._items: Sequence[Any] = ()
        self._begin: State = groups.state()
        self._made = False
        """Whether `_items` are those of the group that begins at `_begin`."""

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
        try:
            self._items = self._groups.make()
        except StopIteration:
            if self._handed:
                raise self._fewer(0) from None
            raise
        if self._handed > len(self._items):
            raise self._fewer(len(self._items))
        self._made = True

    def _fewer(self, count: int) -> StateError:
        return StateError(
            f"{self._handed} items of a group had been handed out, but now the group has only {count}; "
            "the data, a function or max_bad_records has changed since the state was saved"
        )

    def state(self) -> State:
        if self._made and self._handed >= len(self._items):
            return [self._groups.state(), 0]
        return [self._begin, self._handed]


def take(cursor: Cursor, count: int) -> list[Any]:
    """Up to `count` items. Raises StopIteration if there are none."""
    items = list(itertools.islice(cursor, count))
    if not items:
        raise StopIteration
    return items
