"""Where the first record of a span of CSV begins, found out from the bytes around the cut.

A newline ends a record only outside quotes, and whether a cut lies inside them is decided, strictly, by all quotes
before it. But quotes soon tell: read the bytes near the cut twice, as if they began outside quotes and as if inside.

    file               wide, \\n deep", 3 \\n 4, 5 \\n
    began outside                  ^ an ordinary character, as no field starts there
    began inside                   ^ closes

From there on both are outside, so the second newline ends a record, whatever came before. Where the two do not meet
(there is no quote near, for instance), the bytes are taken to begin outside if most of their records then have as many
values as the header, and would not if they began inside. Where that is not so either, the file is scanned from its
beginning.

Only the second way can be wrong. So each reader looks at the cuts that its own records lead up to or go over: it
knows what is there, and if the reader of the next span would decide otherwise, it raises an error. And before bad
records end a stream, a scan makes sure that their reader began where a record does.
"""

import os
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError
from headrace.readers.inputs import InputFile
from headrace.readers.quotes import NEWLINE, QUOTE, QuoteScanner

WINDOWS_BYTES = (2**15, 2**20)
"""How far before and after a cut is looked; farther if that does not tell."""
_SCAN_BYTES = 2**20


@dataclass(frozen=True)
class Layout:
    """What must be known of a file to cut it."""

    file: InputFile
    span_bytes: int
    delimiter: bytes
    columns: int
    always_scan: bool = False
    starts: "array[int]" = field(default_factory=lambda: array("q", [0]))
    """What scans have found: the first record at each cut or after it, from the first cut on."""


class _Reading(NamedTuple):
    """Some bytes, read as if they began outside quotes, or inside."""

    scanner: QuoteScanner
    ends: NDArray[np.int64]
    """Where in the file records end."""
    looks_right: bool
    """Whether most of them have as many values as the header."""


class Cuts:
    """The cuts of one open file."""

    def __init__(self, descriptor: int, layout: Layout) -> None:
        self._descriptor, self.layout = descriptor, layout

    def first_start(self, cut: int) -> int:
        """Where the first record at the cut or after it begins; if none does in its span, something beyond that."""
        if cut == 0:
            return 0
        guess = self._look(cut)
        return self._scan(cut) if guess is None else guess

    def check(self, cut: int, known: int, *, exact: bool) -> None:
        """Refuse to go on if the reader of the span at `cut` would begin elsewhere than with the first record there,
        which begins at `known`; or, if that is not `exact`, later."""
        guess = self._look(cut)
        limit = min(cut + self.layout.span_bytes, self.layout.file.bytes)
        if guess is None or (guess >= limit and known >= limit) or (exact and guess == known):
            return
        raise self._differs(cut, guess, f"{'' if exact else 'or after '}byte {known}")

    def confirm(self, cut: int, start: int) -> None:
        """Refuse to go on if the first record at the cut does not begin at `start`, by all quotes before it."""
        known = self._scan(cut) if cut else 0
        if known != start:
            raise self._differs(cut, start, f"byte {known}")

    def _differs(self, cut: int, guess: int, known: str) -> FormatError:
        return FormatError(
            f"{self.layout.file.path}: by what stands around byte {cut}, the first record there would begin at byte "
            f"{guess}; by the quotes before it, at {known}. Read it with csv_cuts='scan', which follows the quotes "
            "from the beginning of the file"
        )

    def _look(self, cut: int) -> int | None:
        """The same as `first_start`, from the bytes around the cut; None if they do not tell."""
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
        # The byte before the first one must be no quote: else that one may have closed, or not, and there would be
        # three ways to read, not two.
        skipped = int(np.argmax(window != QUOTE)) + 1
        before, window, begin = int(window[skipped - 1]), window[skipped:], begin + skipped
        if before == QUOTE or begin >= cut:
            return None
        outside, inside = (
            self._read_as(window, begin, inside=inside, before=before) for inside in (False, True)
        )
        first, other = _first_from(outside.ends, cut), _first_from(inside.ends, cut)
        met = outside.scanner.inside == inside.scanner.inside and window[-1] != QUOTE
        if first == other and (first is not None or met):
            return self._go_on(outside, begin + len(window), cut)
        if outside.looks_right and not inside.looks_right:
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
        """The first end at the cut or later, which may lie beyond what was read up to `position`."""
        size, ends = self.layout.file.bytes, reading.ends
        while (found := _first_from(ends, cut)) is None:
            if position >= min(cut + self.layout.span_bytes, size):
                return size
            window = self._read(position, _SCAN_BYTES)
            ends = reading.scanner.outside_newlines(window) + position + 1
            position += len(window)
        return found

    def _scan(self, cut: int) -> int:
        """By following the quotes from the last cut that is known, and remembering each cut on the way."""
        starts, span_bytes = self.layout.starts, self.layout.span_bytes
        scanner, position = QuoteScanner(self.layout.delimiter), starts[-1]
        ends = np.array([position])
        while (following := len(starts) * span_bytes) <= cut:
            found = _first_from(ends, following)
            if found is not None or position >= self.layout.file.bytes:
                starts.append(self.layout.file.bytes if found is None else found)
                continue
            window = self._read(position, _SCAN_BYTES)
            ends = scanner.outside_newlines(window) + position + 1
            position += len(window)
        return starts[cut // span_bytes]

    def _read(self, position: int, count: int) -> NDArray[np.uint8]:
        # Not by moving the file's own position, at which its records are being read.
        content = os.pread(self._descriptor, count, position)
        if not content and position < self.layout.file.bytes:
            raise FormatError(f"{self.layout.file.path}: became shorter while it was read")
        return np.frombuffer(content, dtype=np.uint8)


def _first_from(ends: NDArray[np.int64], position: int) -> int | None:
    """The first of them at `position` or later."""
    place = int(np.searchsorted(ends, position))
    return int(ends[place]) if place < len(ends) else None
