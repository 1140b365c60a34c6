"""Documents -> rows of `seq_len` tokens, with the fields of a Loader's rows, filled by the Loader's own kernel.

Best fit packs the documents of a buffer in the same way as the Loader packs those of a dataset; a document is never
continued in the next buffer. Windows lay all documents end to end and cut them every `seq_len` tokens, so a row can
begin in the middle of a document, which is read again when a stream is resumed there:

    documents        aaaaa bbbbbbb ccc          rows of 4:   aaaa abbb bbbb ccc.
    after two rows   [where b begins, 3 tokens of it used]
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checks import whole_number
from headrace.errors import SettingsError, StageError
from headrace.load.settings import LoaderSettings, parse_settings
from headrace.order.keys import derive
from headrace.order.permutation import permute
from headrace.pack.documents import strategy_of
from headrace.pack.overlong import Overlong
from headrace.pack.packing import Packing
from headrace.rows.buffers import BufferPool
from headrace.rows.kernel import pack, plan_best_fit
from headrace.rows.reference import TYPES
from headrace.rows.token_batches import RowFiller
from headrace.rows.token_rows import Stretches
from headrace.streams.bad import StreamBadRecords
from headrace.streams.cursor import Cursor, GroupCursor, OpenAt, State, damaged, split_state, take
from headrace.streams.tokenize import TOKENS

ROW_FIELDS = ("tokens", "labels", "position_ids", "segment_ids", "loss_mask")
_WINDOWS_AT_ONCE = 32
_BUFFERS_KEPT = 4
_ROWS = 4
"""What keys are derived for."""


@dataclass(frozen=True)
class Pack:
    settings: LoaderSettings
    buffer: int

    def describe(self) -> str:
        settings = self.settings
        shown = [str(settings.seq_len), str(settings.packing)]
        if settings.packing is not Packing.WINDOWS:
            shown += [f"buffer={self.buffer}", f"overlong={settings.overlong}"]
        return f"pack({', '.join(shown)})"

    @property
    def token_field(self) -> str:
        return self.settings.token_field or TOKENS

    def open(self, open_below: OpenAt, state: State, bad: StreamBadRecords) -> Cursor:
        begin, handed = split_state(state)
        rows = _StreamRows(self)
        if self.settings.packing is not Packing.WINDOWS:
            return GroupCursor(_Buffers(open_below(begin), rows, self.buffer), handed)
        below, used = split_state(begin)
        return GroupCursor(_WindowRows(open_below(below), rows, used), handed)


def make_pack(buffer: int, options: Mapping[str, Any]) -> Pack:
    """`options` are some of the options of a Loader, with the same meaning."""
    if options.get("seq_len") is None:
        raise SettingsError("seq_len=None: give the number of tokens in a row")
    settings = parse_settings({"batch_size": 1, "fields": ROW_FIELDS, **options})
    if not set(settings.fields or ()) <= set(ROW_FIELDS):
        raise SettingsError(f"fields={options['fields']}: must be some of {', '.join(ROW_FIELDS)}")
    return Pack(settings, whole_number("buffer", buffer, 1))


@dataclass(frozen=True)
class _Tokens:
    """Documents end to end: document i is `values[offsets[i]:offsets[i + 1]]`."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


class _StreamRows:
    """Fills rows with stretches of documents."""

    def __init__(self, operation: Pack) -> None:
        self.settings, self._field = operation.settings, operation.token_field
        self.seq_len: int = operation.settings.seq_len or 0
        self._filler = RowFiller(operation.settings, BufferPool(keep=_BUFFERS_KEPT))

    def tokens_of(self, record: Any) -> NDArray[Any]:
        tokens = record.get(self._field) if isinstance(record, Mapping) else None
        array = None if tokens is None else np.asarray(tokens)
        if array is not None and array.size == 0:
            array = np.zeros(0, np.uint16)
        if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
            raise StageError(
                f"pack() takes records whose {self._field!r} holds integers, but got {_shown(record)}; call tokenize() "
                "before pack(), or name the field with token_field="
            )
        return array

    def join(self, documents: Sequence[NDArray[Any]]) -> _Tokens:
        values = np.concatenate(documents)
        if values.dtype.kind == "f":  # uint64 among int64
            values = np.concatenate([document.astype(np.int64) for document in documents])
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return _Tokens(np.ascontiguousarray(values), offsets)

    def fill(
        self,
        tokens: _Tokens,
        rows: int,
        row: NDArray[np.int64],
        document: NDArray[np.int64],
        start: NDArray[np.int64],
        length: NDArray[np.int64],
    ) -> list[dict[str, Any]]:
        """Stretch i is the `length[i]` tokens of `document[i]` that begin at its token `start[i]`; it goes into row
        `row[i]`."""
        values = tokens.values
        place = tokens.offsets[document] + start
        more = start + length < tokens.lengths[document]
        if self.settings.overlong is not Overlong.SPLIT:
            more[:] = False
        stretches = Stretches(
            row=row,
            length=length,
            address=np.uint64(values.ctypes.data) + place.astype(np.uint64) * np.uint64(values.itemsize),
            type=np.full(len(row), TYPES.index(values.dtype.name), dtype=np.uint8),
            more=more,
            record=document,
            start=start,
        )
        arrays = self._filler.rows_of(stretches, rows)
        return [{name: array[number] for name, array in arrays.items()} for number in range(rows)]


class _Buffers:
    """Groups of documents, each packed on its own."""

    def __init__(self, below: Cursor, rows: _StreamRows, buffer: int) -> None:
        self._below, self._rows, self._buffer = below, rows, buffer
        self._strategy = strategy_of(rows.settings.packing, plan_best_fit)

    def state(self) -> State:
        return self._below.state()

    def make(self) -> Sequence[Any]:
        rows = self._rows
        tokens = rows.join([rows.tokens_of(record) for record in take(self._below, self._buffer)])
        lengths, counts = np.unique(tokens.lengths, return_counts=True)
        by_length = np.argsort(tokens.lengths, kind="stable")
        packed = self._strategy(lengths, counts, rows.seq_len, rows.settings.overlong)
        if not packed.rows:
            return ()
        # The rows are sorted by length, which no model should see: shuffle them, always in the same way.
        key = derive(_ROWS, len(by_length), len(tokens.values))
        order = permute(np.arange(packed.rows), packed.rows, key)
        pieces = pack(packed, order, None)
        first = np.cumsum(counts) - counts
        document = by_length[first[pieces.length_index] + pieces.nth]
        return rows.fill(tokens, packed.rows, pieces.row, document, pieces.start, pieces.length)


class _WindowRows:
    """Groups of rows cut from documents that lie end to end."""

    def __init__(self, below: Cursor, rows: _StreamRows, used: int) -> None:
        self._below, self._rows = below, rows
        self._waiting: deque[tuple[State, NDArray[Any]]] = deque()
        """Documents that still have unused tokens, each with the state before it."""
        self._used = used
        """How many tokens of the first document are already in rows."""
        self._begun = used > 0
        """Whether the first document still has to be read, some of whose tokens are in rows."""

    def state(self) -> State:
        begin = self._waiting[0][0] if self._waiting else self._below.state()
        return [begin, self._used]

    def make(self) -> Sequence[Any]:
        seq_len = self._rows.seq_len
        held = self._read(_WINDOWS_AT_ONCE * seq_len)
        # Only the very last row may be short; otherwise tokens that do not fill a row wait for more.
        rows = min(held // seq_len, _WINDOWS_AT_ONCE) or 1
        if not held:
            raise StopIteration
        tokens = self._rows.join([document for _, document in self._waiting])
        begin, end = self._used, self._used + min(held, rows * seq_len)
        row_starts = np.arange(begin, end, seq_len)
        is_between = (tokens.offsets > begin) & (tokens.offsets < end)
        document_starts = tokens.offsets[is_between]
        # A stretch begins where a row or a document begins.
        edges = np.union1d(row_starts, document_starts)
        document = np.searchsorted(tokens.offsets, edges, side="right") - 1
        length = np.diff(np.append(edges, end))
        row = (edges - begin) // seq_len
        made = self._rows.fill(tokens, rows, row, document, edges - tokens.offsets[document], length)
        self._drop(end)
        return made

    def _read(self, wanted: int) -> int:
        """Read until `wanted` tokens are waiting or there are no more; returns how many are waiting."""
        held = sum(len(document) for _, document in self._waiting) - self._used
        while held < wanted:
            state = self._below.state()
            try:
                record = next(self._below)
            except StopIteration:
                if self._begun:
                    raise damaged(self._used) from None
                break
            document = self._rows.tokens_of(record)
            if self._begun and self._used >= len(document):
                raise damaged(self._used)
            self._begun = False
            self._waiting.append((state, document))
            held += len(document)
        return max(held, 0)

    def _drop(self, used: int) -> None:
        """Forget the documents that are completely in rows; `used` is counted from the start of the first one."""
        while self._waiting and used >= len(self._waiting[0][1]):
            used -= len(self._waiting.popleft()[1])
        self._used = used


def _shown(record: Any) -> str:
    shown = repr(record)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."
