"""Operations that call a function of the user's for every item: `map` and `filter`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.errors import SettingsError, StageError
from headrace.streams.bad import StreamBadRecords
from headrace.streams.cursor import Cursor, OpenAt, State

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Map:
    """Every item is replaced by what the function returns for it."""

    name: ClassVar[str] = "map"

    function: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SettingsError(f"{self.name}({self.function!r}): must be a function")

    def describe(self) -> str:
        function = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{self.name}({function})"

    def open(self, open_below: OpenAt, state: State, bad: StreamBadRecords) -> Cursor:
        return _FunctionCursor(open_below(state), self)


class Filter(Map):
    """Only the items for which the function returns true are kept."""

    name = "filter"


class _FunctionCursor:
    def __init__(self, below: Cursor, operation: Map) -> None:
        self._below, self._operation = below, operation
        self._filters = isinstance(operation, Filter)
        self._before: State = None
        """The state before the item that the function is working on, if there is one."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            self._before = self._below.state()
            item = next(self._below)
            returned = self._call(item)
            self._before = None
            if not self._filters:
                return returned
            if returned:
                return item

    def _call(self, item: Any) -> Any:
        """Turn any exception of the function into a StageError; a StopIteration would silently end the stream."""
        try:
            return self._operation.function(item)
        except Exception as error:
            shown = repr(item)
            if len(shown) > _SHOWN_CHARACTERS:
                shown = f"{shown[:_SHOWN_CHARACTERS]}..."
            what = self._operation.describe()
            raise StageError(f"{what} failed on {shown}: {type(error).__name__}: {error}") from error

    def state(self) -> State:
        return self._below.state() if self._before is None else self._before
