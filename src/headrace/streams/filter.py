"""Only the items for which a function returns true."""

from typing import Any

from headrace.streams.function import FunctionCursor, FunctionStage


class _FilterCursor(FunctionCursor):
    def __next__(self) -> Any:
        while True:
            item, is_wanted = self._call_for_next()
            if is_wanted:
                return item


class Filter(FunctionStage):
    name = "filter"
    cursor = _FilterCursor
