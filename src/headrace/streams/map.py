"""A function that is applied to every item."""

from typing import Any

from headrace.streams.function import FunctionCursor, FunctionStage


class _MapCursor(FunctionCursor):
    def __next__(self) -> Any:
        _, made = self._call_for_next()
        return made


class Map(FunctionStage):
    name = "map"
    cursor = _MapCursor
