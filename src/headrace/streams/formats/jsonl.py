"""JSON Lines: an object a line, as msgspec decodes it. Blank lines are no records.

msgspec decodes a whole piece of the file at once if each line of it looks like an object and nothing else. Other pieces
go line by line, through the same decoder; what that refuses goes to `json`, which has the last word. So what becomes
of a line never depends on its neighbours.
"""

from collections.abc import Iterator
from typing import Any, TypedDict

import msgspec
import numpy as np

from headrace.readers.columns import ReportBad
from headrace.readers.jsonl import BadLine, parse_line
from headrace.streams.blocks import Block
from headrace.streams.formats.delimited import pieces
from headrace.streams.formats.reader import Record
from headrace.streams.settings import StreamSettings

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NEWLINE, _OPEN, _CLOSE = b"\n{}"
_REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Reader:
    def __init__(self, settings: StreamSettings) -> None:
        self._fields = settings.fields
        # If fields are chosen, msgspec skips the other keys, without making anything of their values.
        chosen: Any = TypedDict
        kind = chosen("Record", dict.fromkeys(self._fields, Any)) if self._fields else dict[str, Any]
        self._decoder: Any = msgspec.json.Decoder(kind)

    def read(self, block: Block, report_bad: ReportBad) -> Iterator[list[Record]]:
        for piece, position in pieces(block, b"\n"):
            at_once = self._decode(piece)
            yield at_once if at_once is not None else list(self._lines(piece, position, report_bad))

    def _decode(self, piece: bytes) -> list[Record] | None:
        """All lines in one call, or None if one of them is anything but an object."""
        data = np.frombuffer(piece, dtype=np.uint8)
        if data[-1] == _NEWLINE:
            data = data[:-1]
        if not len(data) or data[0] != _OPEN or data[-1] != _CLOSE:
            return None
        # msgspec takes several objects on a line, and one over several lines, for records too. But inside an object
        # no } is followed by a {, so between such two a newline can only end an object.
        newlines = np.flatnonzero(data == _NEWLINE)
        if not ((data[newlines - 1] == _CLOSE) & (data[newlines + 1] == _OPEN)).all():
            return None
        try:
            if self._fields is not None:
                piece.decode()  # values that are skipped must be UTF-8 as well
            records: list[Record] = self._decoder.decode_lines(data)
        except _REFUSED:
            return None
        return records if len(records) == len(newlines) + 1 else None

    def _lines(self, piece: bytes, position: int, report_bad: ReportBad) -> Iterator[Record]:
        for line in piece.removesuffix(b"\n").split(b"\n"):
            content = line.removeprefix(_BYTE_ORDER_MARK) if position == 0 else line
            if content.strip(b" \t\r"):
                try:
                    yield self._record(content)
                except BadLine as error:
                    report_bad(f"byte {position}", str(error))
            position += len(line) + 1

    def _record(self, line: bytes) -> Record:
        try:
            if self._fields is not None:
                line.decode()
            record: Record = self._decoder.decode(line)
            return record
        except _REFUSED:
            record = parse_line(line)
        if self._fields is None:
            return record
        for name in self._fields:
            if name not in record:
                raise BadLine(f"no key {name!r}; the record has: {', '.join(list(record)[:20]) or 'none'}")
        return {name: record[name] for name in self._fields}
