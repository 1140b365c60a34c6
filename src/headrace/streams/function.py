"""Stages that call a function of the user's for every item."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.errors import SettingsError, StageError
from headrace.streams.bad import StreamBadRecords
from headrace.streams.cursor import Cursor, OpenAt, State

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class FunctionStage:
    name: ClassVar[str]
    cursor: ClassVar[type["FunctionCursor"]]

    function: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SettingsError(f"{self.name}({self.function!r}): must be a function")

    def describe(self) -> str:
        function = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{self.name}({function})"

    def open(self, open_below: OpenAt, state: State, bad: StreamBadRecords) -> Cursor:
        return self.cursor(open_below(state), self.function, self.describe())


class FunctionCursor:
    def __init__(self, below: Cursor, function: Callable[[Any], Any], stage: str) -> None:
        self._below, self._function, self._stage = below, function, stage
        self._before: State = None
        """The state before the item that the function is working on, if there is one."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError

    def _call_for_next(self) -> tuple[Any, Any]:
        """The next item, and what the function returns for it."""
        self._before = self._below.state()
        item = next(self._below)
        returned = self._call(item)
        self._before = None
        return item, returned

    def _call(self, item: Any) -> Any:
        """Turn any exception of the function into a StageError; a StopIteration would silently end the stream."""
        try:
            return self._function(item)
        except Exception as error:
            shown = repr(item)
            if len(shown) > _SHOWN_CHARACTERS:
                shown = f"{shown[:_SHOWN_CHARACTERS]}..."
            raise StageError(f"{self._stage} failed on {shown}: {type(error).__name__}: {error}") from error

    def state(self) -> State:
        return self._below.state() if self._before is None else self._before
