"""Where CSV records end: at the newlines outside quotes.

Quotes open and close in turn, so a newline is outside if an even number of them came before it. A quote that
stands neither at the start of a field nor right after a closing quote is an ordinary character and does not
count:

    a,"b<newline>c ""d"" e"<newline>      the first newline is inside, the second outside
    a,5" disk<newline>                    the quote opens nothing: outside
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.readers import ranges

QUOTE, NEWLINE, RETURN = b'"\n\r'
_SCAN_BYTES = 4 * 2**20


class QuoteScanner:
    """Follows the quotes through consecutive pieces of a file, from the start of a record on."""

    def __init__(self, delimiter: bytes, *, inside: bool = False, last_byte: int = NEWLINE) -> None:
        """Elsewhere than at the start of a record: say whether that is inside quotes, and the byte before it, which
        must be no quote."""
        self.inside = inside
        self._starts_field = np.zeros(256, dtype=bool)
        self._starts_field[[NEWLINE, RETURN, delimiter[0]]] = True
        self._last_byte = last_byte
        self._ends_closed = False
        """Whether the last byte of the piece before was a closing quote."""

    def outside_newlines(self, piece: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Where the newlines outside quotes stand in the next piece."""
        newlines = np.flatnonzero(piece == NEWLINE)
        inside = self.inside
        quotes = self.advance(piece)
        if len(quotes):
            outside: NDArray[np.bool_] = (np.searchsorted(quotes, newlines) + inside) % 2 == 0
            return newlines[outside]
        return newlines[:0] if inside else newlines

    def advance(self, piece: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Go past the next piece; gives where its opening and closing quotes stand."""
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
        # Right after a closing quote: a doubled quote, or else a quote that the loop below must judge.
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


def cut(path: Path, target_bytes: int, delimiter: bytes) -> list[tuple[int, int]]:
    """Ranges of about `target_bytes`, each ending after a record. One pass over a file that needs cutting."""
    size = ranges.file_size(path)
    if ranges.is_compressed(path) or size <= target_bytes:
        return [(0, size)]
    content = ranges.mapped(path)
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
    """Whole records: their bytes, where each begins and ends, and where the bytes stand in the file."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    position: int
    unclosed: bool = False
    """Whether the last record ends inside quotes, because the file does."""


def records(path: Path, start: int, stop: int, delimiter: bytes, block_bytes: int) -> Iterator[CsvRecords]:
    """The records of a range, in blocks of about `block_bytes`, without the blank lines."""
    return records_in(_pieces(path, start, stop, block_bytes), start, delimiter, block_bytes)


Passed = Callable[[int, bool], None]
"""Called with a position: no record has begun between the limit and there; one begins there, if that is exact."""


def records_in(
    pieces: Iterable[NDArray[np.uint8]],
    start: int,
    delimiter: bytes,
    block_bytes: int,
    limit: int | None = None,
    passed: Passed = lambda position, exact: None,
) -> Iterator[CsvRecords]:
    """From the start of a record on, until the pieces end, or until a record ends at `limit` or later."""
    scanner = QuoteScanner(delimiter)
    pending: list[NDArray[np.uint8]] = []
    ends: list[NDArray[np.int64]] = []
    position, held = start, 0
    for piece in pieces:
        found = scanner.outside_newlines(piece) + held + 1
        pending.append(piece)
        held += len(piece)
        if limit is not None:
            found = found[: int(np.searchsorted(found, limit - position)) + 1]
        if len(found):
            ends.append(found)
        over = limit is not None and bool(ends) and position + int(ends[-1][-1]) >= limit
        if not over:
            passed(position + held, False)
        # A piece that ends far inside a record waits for the rest, without being looked at again; and since a call of
        # the parser costs as much as a hundred kilobytes, what ends beyond the limit waits for its end.
        enough = held >= block_bytes and (limit is None or position + held < limit)
        if ends and (over or enough):
            data, last = np.concatenate(pending), int(ends[-1][-1])
            yield split_records(data[:last], np.concatenate(ends), position, unclosed=False)
            pending, ends = [data[last:]], []
            position, held = position + last, len(data) - last
        if over:
            passed(position, True)
            return
    if held:
        ends.append(np.array([held]))
        yield split_records(np.concatenate(pending), np.concatenate(ends), position, unclosed=scanner.inside)
    passed(position + held, True)


def split_records(
    data: NDArray[np.uint8], ends: NDArray[Any], position: int, *, unclosed: bool
) -> CsvRecords:
    """The records that end at those places, without the blank lines."""
    stops = np.unique(ends.astype(np.int64))
    starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)
    lengths = stops - starts
    first = data[starts]
    blank = (first == NEWLINE) | ((first == RETURN) & (lengths == 2) & (data[stops - 1] == NEWLINE))
    blank |= (first == RETURN) & (lengths == 1)
    return CsvRecords(data, starts[~blank], stops[~blank], position, unclosed)


def _pieces(path: Path, start: int, stop: int, block_bytes: int) -> Iterable[NDArray[np.uint8]]:
    if ranges.is_compressed(path):
        return (np.frombuffer(chunk, dtype=np.uint8) for chunk in ranges.decompressed(path))
    content = ranges.mapped(path)[start:stop]
    return (content[first : first + block_bytes] for first in range(0, len(content), block_bytes))
