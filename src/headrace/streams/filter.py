"""Only the items for which a function returns true."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.streams.bad import StreamBadRecords
from headrace.streams.cursor import Cursor, OpenAt, State
from headrace.streams.map import call, check_function, name_of


@dataclass(frozen=True)
class Filter:
    function: Callable[[Any], Any]

    def __post_init__(self) -> None:
        check_function("filter", self.function)

    def describe(self) -> str:
        return f"filter({name_of(self.function)})"

    def open(self, open_below: OpenAt, state: State, bad: StreamBadRecords) -> Cursor:
        return _FilterCursor(open_below(state), self.function, self.describe())


class _FilterCursor:
    def __init__(self, below: Cursor, function: Callable[[Any], Any], name: str) -> None:
        self._below, self._function, self._name = below, function, name
        self._before: State = None
        """The state before the item that the function is working on, if there is one."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            self._before = self._below.state()
            item = next(self._below)
            wanted = call(self._function, item, self._name)
            self._before = None
            if wanted:
                return item

    def state(self) -> State:
        return self._below.state() if self._before is None else self._before
