"""Where in a file a record is, in words for people: 'line 3, byte 17'.

Lines are counted only when a place is asked for, which happens only for bad records, so nothing is spent on the others.
"""

from collections.abc import Generator
from typing import Self

from headrace.errors import StorageError
from headrace.readers import ranges
from headrace.readers.bounds import Bound, too_long
from headrace.readers.columns import ReportBad
from headrace.readers.raw_file import RawFile

_READ_BYTES = 2**20
_MOST_REMOTE_BYTES = 64 * 2**20
"""How much of a remote file is read to count its lines. Beyond that, a place is only the number of its byte."""


class Places:
    """The places of one file of lines. Positions are counted in bytes, after decompression.

    As a context, it stays at the place that was asked for last, so that the next one is not far: a compressed file can
    only be read from its beginning.
    """

    def __init__(self, raw: RawFile) -> None:
        self._raw = raw
        self._stays = False
        self._pieces: Generator[bytes, None, None] | None = None
        """The rest of the file, from the end of `_piece` on; None if the file is not open."""
        self._piece = b""
        """What is left of the piece that was read last: it begins at `_position`."""
        self._position = 0
        self._newlines = 0
        """How many newlines are before `_position`."""

    def __enter__(self) -> Self:
        self._stays = True
        return self

    def __exit__(self, *_: object) -> None:
        self._stays = False
        self._close()

    def describe(self, position: int) -> str:
        if self._raw.path is None and abs(position - self._position) > _MOST_REMOTE_BYTES:
            return f"byte {position}"
        try:
            line = self._line(position)
        except (OSError, StorageError):
            return f"byte {position}"  # the file has changed or gone meanwhile
        finally:
            if not self._stays:
                self._close()
        return f"line {line:,}, byte {position}"

    def bound(self, most: int, report_bad: ReportBad) -> Bound:
        """A bound on records that reports longer ones as bad records at their place."""
        return Bound(most, lambda position, size: report_bad(self.describe(position), too_long(size, most)))

    def _line(self, position: int) -> int:
        """The number of the line that holds this byte. Continues from the place that was asked for last."""
        if position < self._position:
            self._close()
            self._position = self._newlines = 0
        if self._pieces is None:
            self._pieces = self._read(self._position)
        while self._position < position:
            if not self._piece:
                self._piece = next(self._pieces, b"")
            if not self._piece:
                break
            passed = self._piece[: position - self._position]
            self._newlines += passed.count(b"\n")
            self._position += len(passed)
            self._piece = self._piece[len(passed) :]
        return self._newlines + 1

    def _read(self, start: int) -> Generator[bytes, None, None]:
        if ranges.is_compressed(self._raw):
            yield from ranges.decompressed(self._raw)
            return
        with self._raw.reading() as content:
            for position in range(start, len(content), _READ_BYTES):
                yield content[position : position + _READ_BYTES].tobytes()

    def _close(self) -> None:
        if self._pieces is not None:
            self._pieces.close()
        self._pieces, self._piece = None, b""
        if ranges.is_compressed(self._raw):
            self._position = self._newlines = 0
