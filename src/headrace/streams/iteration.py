"""One loop over a stream."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headrace.streams.consumer import Consumer
from headrace.streams.cursor import Cursor, State
from headrace.streams.state import Start, from_state, to_state

OpenPlace = Callable[[Consumer, int, State], Cursor]


class StreamIteration:
    """Hands out items, and has its own `state_dict` and `load_state_dict`, which are valid after each item."""

    def __init__(
        self,
        open_place: OpenPlace,
        described: Mapping[str, Any],
        consumer: Consumer,
        start: Start,
        ended: Callable[[Start], None],
    ) -> None:
        """`ended` is called with the start of the next loop when this one has ended."""
        self._open, self._described, self._consumer, self._tell = open_place, described, consumer, ended
        self._start = start
        self._cursor: Cursor | None = None
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if self._cursor is None:
            # Not before now, because a state may first be loaded into a new iterator.
            self._start.check(self._consumer)
            self._cursor = self._open(self._consumer, self._start.epoch, self._start.place)
        try:
            return next(self._cursor)
        except StopIteration:
            self._start, self._cursor, self._is_over = Start(self._start.epoch + 1), None, True
            self._tell(self._start)
            raise
        except BaseException:
            # The item that was being made is lost, but no record is: the next call continues after the last item.
            self._start, self._cursor = self.start, None
            raise

    @property
    def start(self) -> Start:
        """The current position, from which another iteration can begin."""
        if self._cursor is None:
            return self._start
        return Start(self._start.epoch, self._cursor.state(), self._consumer)

    def state_dict(self) -> dict[str, Any]:
        return to_state(self._described, self.start)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        start = from_state(state, self._described)
        start.check(self._consumer)
        self._start, self._cursor, self._is_over = start, None, False
