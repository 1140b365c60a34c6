"""One epoch, or one epoch after the other without end. A state is `[epoch, place in that epoch]`."""

from collections.abc import Callable, Iterator
from typing import Any

from headrace.errors import SettingsError
from headrace.streams.cursor import Cursor, State

_MOST_EMPTY_EPOCHS = 100


class Epochs:
    def __init__(
        self, open_epoch: Callable[[int, State], Cursor], epoch: int, place: State, *, repeat: bool
    ) -> None:
        self._open, self._epoch, self._repeat = open_epoch, epoch, repeat
        self._cursor = open_epoch(epoch, place)
        self._empty = 0
        """The number of epochs since the last record."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                record = next(self._cursor)
            except StopIteration:
                self._next_epoch()
            else:
                self._empty = 0
                return record

    def _next_epoch(self) -> None:
        if not self._repeat:
            raise StopIteration
        self._empty += 1
        if self._empty > _MOST_EMPTY_EPOCHS:
            raise SettingsError(
                f"repeat=True, but there was no record in {self._empty - 1} epochs: there are fewer blocks than ranks "
                "times workers, or the blocks are empty. Use fewer workers, or smaller blocks (block_bytes=)"
            )
        self._epoch += 1
        self._cursor = self._open(self._epoch, None)

    def state(self) -> State:
        return [self._epoch, self._cursor.state()]
