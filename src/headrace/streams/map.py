"""A function that is applied to every item."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.errors import SettingsError, StageError
from headrace.streams.bad import StreamBadRecords
from headrace.streams.cursor import Cursor, OpenAt, State


@dataclass(frozen=True)
class Map:
    function: Callable[[Any], Any]

    def __post_init__(self) -> None:
        check_function("map", self.function)

    def describe(self) -> str:
        return f"map({name_of(self.function)})"

    def open(self, open_below: OpenAt, state: State, bad: StreamBadRecords) -> Cursor:
        return _MapCursor(open_below(state), self.function, self.describe())


class _MapCursor:
    def __init__(self, below: Cursor, function: Callable[[Any], Any], name: str) -> None:
        self._below, self._function, self._name = below, function, name
        self._before: State = None
        """The state before the item that the function is working on, if there is one."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._before = self._below.state()
        made = call(self._function, next(self._below), self._name)
        self._before = None
        return made

    def state(self) -> State:
        return self._below.state() if self._before is None else self._before


def check_function(name: str, function: Any) -> None:
    if not callable(function):
        raise SettingsError(f"{name}({function!r}): must be a function")


def name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def call(function: Callable[[Any], Any], item: Any, name: str) -> Any:
    """Turn any exception of the function into a StageError; a StopIteration would otherwise silently end the stream."""
    try:
        return function(item)
    except Exception as error:
        shown = repr(item)
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        raise StageError(f"{name} failed on {shown}: {type(error).__name__}: {error}") from error
