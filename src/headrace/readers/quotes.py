"""Where CSV records end: at the newlines outside quotes.

Quotes open and close in turn, so a newline is outside if an even number of quotes came before it. A quote that is
neither at the start of a field nor right after a closing quote is an ordinary character and does not count:

    a,"b<newline>c ""d"" e"<newline>      the first newline is inside, the second outside
    a,5" disk<newline>                    the quote opens nothing: outside
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.readers import ranges
from headrace.readers.bounds import Bound
from headrace.readers.raw_file import RawFile

QUOTE, NEWLINE, RETURN = b'"\n\r'
_SCAN_BYTES = 4 * 2**20


class QuoteScanner:
    """Follows the quotes through consecutive pieces of a file, beginning at the start of a record."""

    def __init__(self, delimiter: bytes, *, inside: bool = False, last_byte: int = NEWLINE) -> None:
        """To begin elsewhere than at the start of a record, say whether that place is inside quotes, and which byte is
        before it, which must not be a quote."""
        self.inside = inside
        self._starts_field = np.zeros(256, dtype=bool)
        self._starts_field[[NEWLINE, RETURN, delimiter[0]]] = True
        self._last_byte = last_byte
        self._ends_closed = False
        """Whether the last byte of the previous piece was a closing quote."""

    def outside_newlines(self, piece: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The positions of the newlines outside quotes in the next piece."""
        newlines = np.flatnonzero(piece == NEWLINE)
        inside = self.inside
        quotes = self.advance(piece)
        if len(quotes):
            outside: NDArray[np.bool_] = (np.searchsorted(quotes, newlines) + inside) % 2 == 0
            return newlines[outside]
        return newlines[:0] if inside else newlines

    def advance(self, piece: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Go past the next piece, and return the positions of its opening and closing quotes."""
        if not len(piece):
            return np.zeros(0, np.int64)
        quotes = np.flatnonzero(piece == QUOTE)
        if len(quotes) and not self._all_count(piece, quotes):
            quotes = self._those_that_count(piece, quotes)
        self.inside = bool((self.inside + len(quotes)) % 2)
        self._ends_closed = not self.inside and len(quotes) > 0 and int(quotes[-1]) == len(piece) - 1
        self._last_byte = int(piece[-1])
        return quotes

    def _all_count(self, piece: NDArray[np.uint8], quotes: NDArray[np.int64]) -> bool:
        opening = quotes[int(self.inside) :: 2]
        if not len(opening):
            return True
        before = self._starts_field[piece[opening - 1]]
        # A quote right after another one: either a doubled quote, or one that `_those_that_count` must judge.
        before |= piece[opening - 1] == QUOTE
        if opening[0] == 0:
            before[0] = self._starts_field[self._last_byte] or self._ends_closed
        return bool(before.all())

    def _those_that_count(self, piece: NDArray[np.uint8], quotes: NDArray[np.int64]) -> NDArray[np.int64]:
        counting, inside = [], self.inside
        closed_at = -1 if self._ends_closed else -2
        for position in quotes.tolist():
            before = int(piece[position - 1]) if position else self._last_byte
            if inside:
                closed_at, inside = position, False
            elif self._starts_field[before] or closed_at == position - 1:
                inside = True
            else:
                continue
            counting.append(position)
        return np.array(counting, dtype=np.int64)


def cut(raw: RawFile, target_bytes: int, delimiter: bytes) -> list[tuple[int, int]]:
    """Ranges of about `target_bytes`, each ending after a record. One pass over a file that needs cutting."""
    size = raw.size()
    if ranges.is_compressed(raw) or size <= target_bytes:
        return [(0, size)]
    content = raw.content()
    scanner = QuoteScanner(delimiter)
    cuts = [0]
    for first in range(0, size, _SCAN_BYTES):
        piece = content[first : first + _SCAN_BYTES]
        if first + len(piece) < cuts[-1] + target_bytes:
            scanner.advance(piece)
            continue
        ends = scanner.outside_newlines(piece) + first + 1
        while (place := np.searchsorted(ends, cuts[-1] + target_bytes)) < len(ends) and ends[place] < size:
            cuts.append(int(ends[place]))
    return list(zip(cuts, [*cuts[1:], size], strict=True))


@dataclass(frozen=True, eq=False)
class CsvRecords:
    """Complete records: their bytes, where each begins and ends, and the position of the bytes in the file."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    position: int
    unclosed: bool = False
    """Whether the last record ends inside quotes, because the file does."""

    def take(self, keep: NDArray[np.bool_]) -> "CsvRecords":
        unclosed = self.unclosed and bool(keep[-1:].all())
        return CsvRecords(self.data, self.starts[keep], self.stops[keep], self.position, unclosed)

    def within(self, bound: Bound | None) -> "CsvRecords":
        """Without the records that are beyond the bound."""
        if bound is None or len(self.data) <= bound.most:
            return self
        sizes = self.stops - self.starts
        for record in np.flatnonzero(sizes > bound.most).tolist():
            bound.tell(self.position + int(self.starts[record]), int(sizes[record]))
        return self.take(sizes <= bound.most)


def records(
    raw: RawFile,
    start: int,
    stop: int,
    scanner: QuoteScanner,
    block_bytes: int,
    bound: Bound | None = None,
) -> Iterator[CsvRecords]:
    """The records of a range, in blocks of about `block_bytes`, without the blank lines."""
    pieces = _pieces(raw, start, stop, block_bytes)
    return records_in(pieces, start, scanner, block_bytes, bound=bound)


Passed = Callable[[int, bool], None]
"""Called with a position, and whether it is exact: no record begins between the limit and the position, and if it is
exact, one begins there."""
_NO_LIMIT = 2**62


def records_in(
    pieces: Iterable[NDArray[np.uint8]],
    start: int,
    scanner: QuoteScanner,
    block_bytes: int,
    limit: int = _NO_LIMIT,
    passed: Passed = lambda position, exact: None,
    bound: Bound | None = None,
) -> Iterator[CsvRecords]:
    """The records from `start` on, until the pieces end, or until a record ends at `limit` or later.

    The first piece begins at `start`, which is the start of a record, and so does the scanner. Records beyond the
    `bound` are left out.
    """
    waiting = _Waiting(start, bound)
    for piece in pieces:
        waiting.add(piece, scanner.outside_newlines(piece) + 1, limit)
        is_over = waiting.records_end >= limit
        if not is_over:
            passed(waiting.stop, False)
        # A piece that ends far inside a record waits for the rest, without being looked at again. And since a call of
        # the parser costs as much as a hundred kilobytes, a block that goes beyond the limit waits for its last record.
        is_full = block_bytes <= waiting.size and waiting.stop < limit
        if waiting.has_records and (is_over or is_full):
            yield waiting.take_records().within(bound)
        if is_over:
            passed(waiting.start, True)
            return
    if waiting.size:
        yield waiting.take_rest(unclosed=scanner.inside).within(bound)
    waiting.tell_if_skipping()
    passed(waiting.stop, True)


class _Waiting:
    """Bytes that have been read but not handed over yet: some complete records, and the beginning of another one.

    Positions are those in the file.
    """

    def __init__(self, start: int, bound: Bound | None) -> None:
        self.start = self.stop = self.records_end = start
        self._bound = bound
        self._pieces: list[NDArray[np.uint8]] = []
        self._ends: list[NDArray[np.int64]] = []
        """Where records end, counted from `start`."""
        self._skipped: int | None = None
        """Where a record begins that is beyond the bound and has not ended yet: its bytes are not kept."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def has_records(self) -> bool:
        return bool(self._ends)

    def add(self, piece: NDArray[np.uint8], ends: NDArray[np.int64], limit: int) -> None:
        """`ends` are those of the records that end in the piece; those after the first one at `limit` or later are
        ignored."""
        if self._skipped is not None:
            piece, ends = self._skip(piece, ends, limit)
        shifted = ends + self.size
        self._pieces.append(piece)
        self.stop += len(piece)
        kept = shifted[: int(np.searchsorted(shifted, limit - self.start)) + 1]
        if len(kept):
            self._ends.append(kept)
            self.records_end = self.start + int(kept[-1])
        elif self._bound is not None and self.size > self._bound.most and not self.has_records:
            self._skipped = self.start
            self._drop(self.stop)

    def _skip(
        self, piece: NDArray[np.uint8], ends: NDArray[np.int64], limit: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Drop what belongs to the record that is beyond the bound, and return what follows it."""
        if not len(ends):
            self._drop(self.stop + len(piece))
            return piece[:0], ends
        first_end = int(ends[0])
        self._drop(self.stop + first_end)
        self.tell_if_skipping()
        self.records_end = self.stop
        if self.stop >= limit:
            return piece[:0], ends[:0]
        return piece[first_end:], ends[1:] - first_end

    def _drop(self, until: int) -> None:
        self._pieces = []
        self.start = self.stop = until

    def tell_if_skipping(self) -> None:
        if self._skipped is not None and self._bound is not None:
            self._bound.tell(self._skipped, self.stop - self._skipped)
        self._skipped = None

    def take_records(self) -> CsvRecords:
        """The complete records; what follows them goes on waiting."""
        data, count = np.concatenate(self._pieces), self.records_end - self.start
        records = split_records(data[:count], np.concatenate(self._ends), self.start, unclosed=False)
        self._pieces, self._ends = [data[count:]], []
        self.start = self.records_end
        return records

    def take_rest(self, *, unclosed: bool) -> CsvRecords:
        """Everything, the last record ending where the bytes do."""
        ends = np.concatenate([*self._ends, np.array([self.size])])
        return split_records(np.concatenate(self._pieces), ends, self.start, unclosed=unclosed)


def split_records(
    data: NDArray[np.uint8], ends: NDArray[Any], position: int, *, unclosed: bool
) -> CsvRecords:
    """The records that end at these ascending places, without the blank lines."""
    stops = ends[np.diff(ends, prepend=0) > 0].astype(np.int64)
    starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)
    lengths = stops - starts
    first = data[starts]
    blank = (first == NEWLINE) | ((first == RETURN) & (lengths == 2) & (data[stops - 1] == NEWLINE))
    blank |= (first == RETURN) & (lengths == 1)
    return CsvRecords(data, starts[~blank], stops[~blank], position, unclosed)


def _pieces(raw: RawFile, start: int, stop: int, block_bytes: int) -> Iterable[NDArray[np.uint8]]:
    if ranges.is_compressed(raw):
        return (np.frombuffer(chunk, dtype=np.uint8) for chunk in ranges.decompressed(raw))
    content = raw.content()
    return (content[first : min(first + block_bytes, stop)] for first in range(start, stop, block_bytes))
