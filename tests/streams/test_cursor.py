"""Groups: where a cursor stands is where its group began and how many of it are gone, also when something fails."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.errors import StateError
from headrace.streams.cursor import GroupCursor, take


class Count:
    """The numbers from a place on."""

    def __init__(self, place: int, end: int) -> None:
        self._place, self._end = place, end

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._place >= self._end:
            raise StopIteration
        self._place += 1
        return self._place - 1

    def state(self) -> int:
        return self._place


class Reversed:
    """Groups of three, backwards; a group with a 7 in it makes nothing, one with `fails_at` an error."""

    def __init__(self, below: Count, fails_at: int = -1) -> None:
        self._below, self._fails_at = below, fails_at

    def state(self) -> Any:
        return self._below.state()

    def make(self) -> list[int]:
        group = take(self._below, 3)
        if self._fails_at in group:
            raise OSError("no such luck")
        return [] if 7 in group else group[::-1]


WANTED = [2, 1, 0, 5, 4, 3, 11, 10, 9, 13, 12]


def opened(state: Any, **options: Any) -> GroupCursor:
    begin, handed = (0, 0) if state is None else state
    return GroupCursor(Reversed(Count(begin, 14), **options), handed)


def test_it_goes_on_from_every_state() -> None:
    cursor = opened(None)
    states = [cursor.state()]
    for number in WANTED:
        assert next(cursor) == number
        states.append(cursor.state())
    assert list(cursor) == []
    assert states[2] == [0, 2]
    for step, state in enumerate(states):
        other = opened(state)
        assert other.state() == state
        assert list(other) == WANTED[step:]


def test_a_failure_on_the_way_loses_nothing() -> None:
    cursor = opened(None, fails_at=4)
    assert take(cursor, 3) == WANTED[:3]
    with pytest.raises(OSError, match="no such luck"):
        next(cursor)
    assert list(opened(cursor.state())) == WANTED[3:]


def test_a_group_that_shrank_is_told() -> None:
    with pytest.raises(
        StateError, match="3 items of a group had been handed out, but now the group has only 2"
    ):
        next(opened([12, 3]))


def test_taking_from_nothing_stops() -> None:
    with pytest.raises(StopIteration):
        take(Count(3, 3), 2)
