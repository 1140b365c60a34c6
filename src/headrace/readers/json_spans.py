"""JSON lines as dicts, from any span of a file.

msgspec decodes a whole piece of the file at once if each line looks like exactly one object. Other pieces go through
the same decoder line by line; what it refuses goes to `json`, which has the last word. So the outcome for a line never
depends on its neighbours.
"""

from collections.abc import Iterator
from typing import Any, TypedDict

import msgspec
import numpy as np

from headrace.readers.columns import ReportBad
from headrace.readers.json_lines import BYTE_ORDER_MARK, BadLine, missing_key, objects, parse_line
from headrace.readers.json_texts import REFUSED
from headrace.readers.places import Places
from headrace.readers.spans import PlacesOfFiles, Record, RecordOptions, Span, delimited_pieces

_whole_records = msgspec.json.Decoder(dict[str, Any])


def decode_lines(piece: bytes, decoder: Any = _whole_records, *, skips: bool = False) -> list[Record] | None:
    """All lines in one call, or None if one of them is not an object. `skips` says that the decoder skips some keys."""
    found = objects(np.frombuffer(piece, dtype=np.uint8))
    if found is None:
        return None
    data, count = found
    try:
        if skips:
            piece.decode()  # values that are skipped must be UTF-8 as well
        records: list[Record] = decoder.decode_lines(data)
    except REFUSED:
        return None
    return records if len(records) == count else None


class JsonSpanReader:
    def __init__(self, options: RecordOptions) -> None:
        self._fields = options.fields
        self._most_bytes = options.max_record_bytes
        self._places = PlacesOfFiles()
        # If fields are chosen, msgspec skips the other keys without creating their values.
        chosen: Any = TypedDict
        kind = chosen("Record", dict.fromkeys(self._fields, Any)) if self._fields else dict[str, Any]
        self._decoder: Any = msgspec.json.Decoder(kind)

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        places = self._places.of(span)
        bound = places.bound(self._most_bytes, report_bad)
        with places:
            for piece, position in delimited_pieces(span, b"\n", bound):
                records = decode_lines(piece, self._decoder, skips=self._fields is not None)
                if records is None:
                    records = list(self._lines(piece, position, places, report_bad))
                yield records

    def _lines(self, piece: bytes, position: int, places: Places, report_bad: ReportBad) -> Iterator[Record]:
        for line in piece.removesuffix(b"\n").split(b"\n"):
            content = line.removeprefix(BYTE_ORDER_MARK) if position == 0 else line
            if content.strip(b" \t\r"):
                try:
                    yield self._record(content)
                except BadLine as error:
                    report_bad(places.describe(position), str(error))
            position += len(line) + 1

    def _record(self, line: bytes) -> Record:
        try:
            if self._fields is not None:
                line.decode()
            record: Record = self._decoder.decode(line)
            return record
        except REFUSED:
            record = parse_line(line)
        if self._fields is None:
            return record
        for name in self._fields:
            if name not in record:
                raise BadLine(missing_key(name, record))
        return {name: record[name] for name in self._fields}
