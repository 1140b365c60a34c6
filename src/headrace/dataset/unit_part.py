"""One unit of a dataset, as a part whose fields are loaded when they are first needed.

A field is loaded whole, or opened sparse: then its offsets are there, and of its data only what was asked for. When
the whole unit arrives later, it takes the place of the sparse one; whoever has that one can go on with it.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.reads import Reads
from headrace.dataset.sparse import BlockList, SparseBytes
from headrace.errors import CorruptError
from headrace.fork_lock import fork_lock
from headrace.format.blocks import BLOCK_BYTES, SECTION, count_blocks
from headrace.format.ragged import Ragged
from headrace.format.shard import Column
from headrace.format.units import Piece, Units


@dataclass(frozen=True, eq=False)
class UnitField:
    """A field of a unit: its column, and the memory that may still lack some of its data."""

    column: Column
    sparse: SparseBytes | None


class UnitPart:
    """A unit's fields by name."""

    def __init__(self, units: Units, reads: Reads, number: int, name: str) -> None:
        self._units, self._reads, self.number, self._name = units, reads, number, name
        self._fields: dict[str, UnitField] = {}
        self._loading = fork_lock()
        self._asked_ahead: tuple[int, Future[None]] | None = None
        """The process that has asked for the whole unit ahead of need, and its fetch."""

    # Whole fields

    def __getitem__(self, name: str) -> Column:
        """A field with all of its data."""
        if not self._is_whole(name):
            self.wait_for_ahead()
            self.load([name])
        return self._fields[name].column

    def load(self, names: Sequence[str]) -> None:
        """Load fields whole; those near each other with one request."""
        names = [name for name in names if not self._is_whole(name)]
        pieces = [piece for name in names for piece in self._pieces(name)]
        self._put(names, self._reads.pieces(pieces))

    def load_cached(self, name: str) -> bool:
        """Load a field whole if that takes no request."""
        contents = self._reads.cached(self._pieces(name))
        if contents is None:
            return False
        self._put([name], contents)
        return True

    def _is_whole(self, name: str) -> bool:
        found = self._fields.get(name)
        return found is not None and found.sparse is None

    def _pieces(self, name: str) -> list[Piece]:
        pieces = [self._units.data_piece(self.number, name)]
        if name in self._units.first_element:
            pieces.append(self._units.offsets_piece(self.number, name))
        return pieces

    def _put(self, names: Sequence[str], contents: Sequence[NDArray[np.uint8]]) -> None:
        """Fields that are whole now, with their pieces end to end."""
        remaining = iter(contents)
        for name in names:
            data = next(remaining)
            offsets = next(remaining) if name in self._units.first_element else None
            field = self._field(name, data, offsets, None)
            with self._loading:
                if not self._is_whole(name):
                    self._fields[name] = field

    # Sparse fields

    def sparse(self, name: str) -> UnitField:
        """A field of which perhaps not all data is there."""
        found = self._fields.get(name)
        if found is None:
            self.load([name])
            found = self._fields[name]
        return found

    def is_closed(self, name: str, wait: bool) -> bool:
        """Whether a field must be opened, because it is not there.

        If the whole unit was asked for ahead, it may come any moment, and `wait` says whether to wait for it.
        """
        if name not in self._fields and wait:
            self.wait_for_ahead()
        return name not in self._fields and not self.load_cached(name)

    def wait_for_ahead(self) -> None:
        """Wait for what was asked for ahead. If that fails, the error comes again when it is asked for once more."""
        if (ahead := self._ahead) is not None:
            with contextlib.suppress(CancelledError):
                ahead.exception()

    @property
    def _ahead(self) -> "Future[None] | None":
        """The fetch that this process has begun. In a forked one, the thread that was at it does not exist."""
        asked = self._asked_ahead
        return asked[1] if asked is not None and asked[0] == os.getpid() else None

    def open_sparse(self, name: str, offsets: NDArray[np.uint8] | None) -> None:
        """Open a field without its data, with the blocks of its offsets if it has some."""
        data = self._units.data_piece(self.number, name)
        begin = int(self._units.sections[SECTION][data.shard])
        first, last = data.blocks_start // BLOCK_BYTES, count_blocks(data.blocks_stop)
        blocks = BlockList(data.shard, begin, first, last, data.check, self._name)
        sparse = SparseBytes(self._reads, data.blocks_start, data.blocks_stop, blocks)
        with self._loading:
            if name not in self._fields:
                self._fields[name] = self._field(name, sparse.content, offsets, sparse)

    # Ahead of need

    def fetch_ahead(
        self, names: Sequence[str], start: Callable[[Callable[[], None]], "Future[None]"]
    ) -> None:
        """Begin to load fields whole, in another thread."""
        with self._loading:
            if self._ahead is None and not all(map(self._is_whole, names)):
                self._asked_ahead = os.getpid(), start(partial(self.load, names))

    def give_up(self) -> None:
        """Do not begin what was asked for ahead."""
        if (ahead := self._ahead) is not None:
            ahead.cancel()

    # Columns

    def _field(
        self,
        name: str,
        data: NDArray[np.uint8],
        offsets: NDArray[np.uint8] | None,
        sparse: SparseBytes | None,
    ) -> UnitField:
        field, piece = self._units.fields[name], self._units.data_piece(self.number, name)
        counted = self._units.first_element.get(name, self._units.first_record)
        elements = int(counted[self.number + 1] - counted[self.number])
        begin = piece.start - piece.blocks_start
        if (data.ctypes.data + begin) % max(1, field.numpy_dtype.itemsize):
            # Bytes from the network may lie anywhere.
            data = data.copy()
        raw = data[begin : begin + elements * field.element_bytes]
        values = _typed(raw, field.numpy_dtype, (elements, *field.shape))
        if offsets is None:
            return UnitField(values, sparse)
        return UnitField(Ragged(values, self._offsets(name, offsets, elements)), sparse)

    def _offsets(self, name: str, content: NDArray[np.uint8], elements: int) -> NDArray[np.uint64]:
        """Offsets counted from the unit's first element."""
        piece = self._units.offsets_piece(self.number, name)
        begin = piece.start - piece.blocks_start
        stored = content[begin : begin + piece.stop - piece.start]
        offsets = np.frombuffer(stored.tobytes(), dtype="<u8").astype(np.uint64)
        offsets -= offsets[0]
        if offsets[-1] != elements:
            raise CorruptError(
                f"{self._name}: unit {self.number} has {offsets[-1]} elements of {name!r} instead of {elements}; run "
                "`headrace verify`"
            )
        return offsets


def _typed(raw: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if not dtype.itemsize or not len(raw):
        return np.empty(shape, dtype)
    values = raw.view(dtype).reshape(shape)
    values.flags.writeable = False
    return values
