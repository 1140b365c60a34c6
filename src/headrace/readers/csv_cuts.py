"""Where the first record of a span of a CSV file begins, found from the bytes around the cut.

A newline ends a record only outside quotes, and strictly speaking, whether a cut lies inside quotes depends on all the
quotes before it. But usually the quotes near the cut are enough: read the bytes around it twice, as if they began
outside quotes and as if they began inside.

    file               wide, \\n deep", 3 \\n 4, 5 \\n
    began outside                  ^ an ordinary character, as no field starts there
    began inside                   ^ closes the quotes

From there on both readings are outside, so the second newline ends a record, whatever came before. If the two readings
do not meet (because there is no quote nearby, for instance), the bytes are assumed to begin outside quotes if most of
their records then have as many values as the header, and would not if the bytes began inside. If that does not decide
it either, the file is scanned from its beginning.

Only the second method can be wrong. So each reader checks the cuts that its own records reach or cross: it knows what
is there, and raises an error if the reader of the next span would decide otherwise. And before bad records end a
stream, a scan makes sure that their reader began at the start of a record.
"""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError
from headrace.readers.quotes import NEWLINE, QUOTE, QuoteScanner
from headrace.readers.raw_file import ByteRange, Content

WINDOWS_BYTES = (2**15, 2**20)
"""How many bytes before and after a cut are read; the second number applies if the first is not enough."""
_SCAN_BYTES = 2**20


@dataclass(frozen=True)
class Layout:
    """What must be known about a file to cut it."""

    name: str
    size: int
    span_bytes: int
    delimiter: bytes
    columns: int
    always_scan: bool = False
    starts: "array[int]" = field(default_factory=lambda: array("q", [0]))
    """The results of scans: where the first record at or after each cut begins, from the first cut on."""

    def scanner(self) -> QuoteScanner:
        """One that begins at the start of a record."""
        return QuoteScanner(self.delimiter)


class _Reading(NamedTuple):
    """Some bytes, read as if they began outside quotes, or as if they began inside."""

    scanner: QuoteScanner
    ends: NDArray[np.int64]
    """The positions in the file at which records end."""
    looks_right: bool
    """Whether most of these records have as many values as the header."""


class Cuts:
    """The cuts of one open file."""

    def __init__(self, content: Content, layout: Layout) -> None:
        self._content, self.layout = content, layout

    def first_start(self, cut: int) -> int:
        """Where the first record at or after the cut begins; if none begins in its span, a position beyond the span."""
        if cut == 0:
            return 0
        guess = self._look(cut)
        return self._scan(cut) if guess is None else guess

    def check(self, cut: int, known: int, *, exact: bool) -> None:
        """Raise an error if the reader of the span at `cut` would not begin with the first record there, which begins
        at `known`, or after `known` if that is not `exact`."""
        guess = self._look(cut)
        if guess is None:
            return
        limit = min(cut + self.layout.span_bytes, self.layout.size)
        is_right = exact and guess == known
        both_beyond = guess >= limit and known >= limit
        if is_right or both_beyond:
            return
        raise self._differs(cut, guess, f"{'' if exact else 'or after '}byte {known}")

    def confirm(self, cut: int, start: int) -> None:
        """Raise an error if, by all quotes before the cut, the first record there does not begin at `start`."""
        known = self._scan(cut) if cut else 0
        if known != start:
            raise self._differs(cut, start, f"byte {known}")

    def _differs(self, cut: int, guess: int, known: str) -> FormatError:
        return FormatError(
            f"{self.layout.name}: judging by the bytes around byte {cut}, the first record there begins at byte "
            f"{guess}; judging by all quotes before it, at {known}. Read the file with csv_cuts='scan', which follows "
            "the quotes from its beginning"
        )

    def first_start_after(self, known: int, cut: int) -> int:
        """The same as `first_start`, for any cut after a position at which a record is known to begin."""
        guess = self._look(cut)
        return self._follow(known, cut) if guess is None else guess

    def _follow(self, start: int, cut: int) -> int:
        """The first end of a record at or after the cut, found by following the quotes from the start of a record."""
        scanner = self.layout.scanner()
        position = start
        while position < self.layout.size:
            window = self._read(position, _SCAN_BYTES)
            ends = scanner.outside_newlines(window) + position + 1
            found = _first_from(ends, cut)
            if found is not None:
                return found
            position += len(window)
        return self.layout.size

    def _look(self, cut: int) -> int | None:
        """The same as `first_start`, judging by the bytes around the cut; None if they do not decide it."""
        if self.layout.always_scan:
            return None
        for reach in WINDOWS_BYTES:
            begin = max(0, cut - reach)
            window = self._read(begin, cut + reach - begin)
            start = self._look_at(window, begin, cut)
            if start is not None:
                return start
        return None

    def _look_at(self, window: NDArray[np.uint8], begin: int, cut: int) -> int | None:
        if begin == 0:
            reading = self._read_as(window, begin, inside=False, before=NEWLINE)
            return self._go_on(reading, len(window), cut)
        # The byte before the first one must not be a quote: if it were, it could have closed the quotes or not, and
        # there would be three ways to read the bytes, not two.
        skipped = int(np.argmax(window != QUOTE)) + 1
        before, window, begin = int(window[skipped - 1]), window[skipped:], begin + skipped
        if before == QUOTE or begin >= cut:
            return None
        outside = self._read_as(window, begin, inside=False, before=before)
        inside = self._read_as(window, begin, inside=True, before=before)
        only_outside_looks_right = outside.looks_right and not inside.looks_right
        if only_outside_looks_right or _agree(outside, inside, cut, last_byte=int(window[-1])):
            return self._go_on(outside, begin + len(window), cut)
        return None

    def _read_as(self, window: NDArray[np.uint8], begin: int, *, inside: bool, before: int) -> _Reading:
        scanner = QuoteScanner(self.layout.delimiter, inside=inside, last_byte=before)
        quotes = scanner.advance(window)

        def outside(byte: int) -> NDArray[np.int64]:
            places = np.flatnonzero(window == byte)
            chosen: NDArray[np.bool_] = (np.searchsorted(quotes, places) + inside) % 2 == 0
            return places[chosen]

        newlines = outside(NEWLINE)
        values = np.diff(np.searchsorted(outside(self.layout.delimiter[0]), newlines)) + 1
        right = np.count_nonzero(values == self.layout.columns)
        return _Reading(scanner, newlines + begin + 1, bool(2 * right > len(values)))

    def _go_on(self, reading: _Reading, position: int, cut: int) -> int:
        """The first end of a record at or after the cut, which may lie beyond `position`, where `reading` ends."""
        size, ends = self.layout.size, reading.ends
        while (found := _first_from(ends, cut)) is None:
            if position >= min(cut + self.layout.span_bytes, size):
                return size
            window = self._read(position, _SCAN_BYTES)
            ends = reading.scanner.outside_newlines(window) + position + 1
            position += len(window)
        return found

    def _scan(self, cut: int) -> int:
        """The same as `first_start`, found by following the quotes from the last known cut; remembers every cut on the
        way."""
        starts, span_bytes = self.layout.starts, self.layout.span_bytes
        scanner, position = self.layout.scanner(), starts[-1]
        ends = np.array([position])
        while (following := len(starts) * span_bytes) <= cut:
            found = _first_from(ends, following)
            if found is not None or position >= self.layout.size:
                starts.append(self.layout.size if found is None else found)
                continue
            window = self._read(position, _SCAN_BYTES)
            ends = scanner.outside_newlines(window) + position + 1
            position += len(window)
        return starts[cut // span_bytes]

    def _read(self, position: int, count: int) -> NDArray[np.uint8]:
        return self._content[position : position + count]


def cut_by_looking(content: Content, layout: Layout, target_bytes: int) -> list[ByteRange]:
    """Ranges of about `target_bytes`, each ending after a record, as far as the bytes around the cuts tell. Whoever
    reads a range finds out whether it does."""
    cuts = [0]
    looking = Cuts(content, layout)
    while cuts[-1] + target_bytes < layout.size:
        found = looking.first_start_after(cuts[-1], cuts[-1] + target_bytes)
        if found >= layout.size:
            break
        cuts.append(found)
    return list(zip(cuts, [*cuts[1:], layout.size], strict=True))


def _agree(outside: _Reading, inside: _Reading, cut: int, *, last_byte: int) -> bool:
    """Whether both readings of the same bytes find the same first record at or after the cut."""
    first, other = _first_from(outside.ends, cut), _first_from(inside.ends, cut)
    if first != other:
        return False
    have_met = outside.scanner.inside == inside.scanner.inside and last_byte != QUOTE
    return first is not None or have_met


def _first_from(ends: NDArray[np.int64], position: int) -> int | None:
    """The first of these ends that is at `position` or later."""
    place = int(np.searchsorted(ends, position))
    return int(ends[place]) if place < len(ends) else None
