"""CSV records as dicts of strings, or of the values that `types` makes of them, from any span of a file.

The same parser as in a build decides what a record is, and what is wrong with a line that is not a record.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.errors import BadRecordsError, FieldError
from headrace.readers import ranges
from headrace.readers.bounds import Bound
from headrace.readers.columns import ReportBad
from headrace.readers.csv_cuts import Cuts, Layout
from headrace.readers.csv_header import CsvHeader, delimiter_of, parse_options, read_header
from headrace.readers.csv_parser import UNCLOSED, Parser
from headrace.readers.places import Places
from headrace.readers.quotes import CsvRecords, records_in
from headrace.readers.raw_file import Content, RawFile
from headrace.readers.reader import choose_columns
from headrace.readers.spans import READ_BYTES, PlacesOfFiles, Record, RecordOptions, Span, opened

_FILES_REMEMBERED = 1024
_READ_BEYOND = 2**14
"""How many bytes are read at first of a record that continues beyond its span."""


class _Known(NamedTuple):
    """What is remembered about a file."""

    parser: Parser
    first_record: int
    """Where the first record after the header begins."""
    layout: Layout


class CsvSpanReader:
    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self._places = PlacesOfFiles()
        self._files: dict[str, _Known | None] = {}
        """By path; None for an empty file."""
        self._reached = ("", 0, 0)
        """The file that was read last, the end of that span, and where the next record begins: a reader of consecutive
        spans need not look for it."""

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        places = self._places.of(span)
        raw, most = span.raw, self._options.max_record_bytes
        with places, opened(span) as content:
            known = self._know(span)
            if known is None:
                return
            if ranges.is_compressed(raw):
                bound = places.bound(most, report_bad)
                found = records_in(_unpacked(raw), 0, known.layout.scanner(), READ_BYTES, bound=bound)
            else:
                cuts = Cuts(content, known.layout)
                start = self._first_start(cuts, span)
                report_bad = _once_confirmed(report_bad, cuts, span.start, start)
                found = self._of_span(content, span, cuts, start, places.bound(most, report_bad))
            for records in found:
                yield self._parsed(records, known, places, report_bad)

    def _first_start(self, cuts: Cuts, span: Span) -> int:
        path, last_stop, next_start = self._reached
        if path == span.file.path and last_stop <= span.start <= next_start:
            return next_start
        return cuts.first_start(span.start)

    def _of_span(
        self, content: Content, span: Span, cuts: Cuts, start: int, bound: Bound
    ) -> Iterator[CsvRecords]:
        layout = cuts.layout
        if start >= span.stop:
            return
        following, checked = span.stop, start

        def passed(position: int, exact: bool) -> None:
            nonlocal checked, following
            checked = position
            while following < span.file.bytes and (
                following <= position if exact else following + layout.span_bytes <= position
            ):
                cuts.check(following, position, exact=exact)
                following += layout.span_bytes

        pieces = _pieces(content, start, span.stop)
        yield from records_in(pieces, start, layout.scanner(), READ_BYTES, span.stop, passed, bound)
        self._reached = (span.file.path, span.stop, checked)

    def _parsed(
        self, records: CsvRecords, known: _Known, places: Places, report_bad: ReportBad
    ) -> list[Record]:
        def where(record: int) -> str:
            return places.describe(records.position + int(records.starts[record]))

        first = int(np.searchsorted(records.starts + records.position, known.first_record))
        last = len(records.starts)
        if records.unclosed and last > first:
            last -= 1
            report_bad(where(last), UNCLOSED)
        parsed: list[Record] = []
        for begin, _, table, reason in known.parser.runs(records, first, last):
            if table is None:
                report_bad(where(begin), reason)
                continue
            made = table.rename_columns(list(known.parser.columns)).to_pylist()
            if not self._options.types:
                parsed += made
                continue
            for number, record in enumerate(made):
                reason = _convert(record, self._options.types)
                if reason:
                    report_bad(where(begin + number), reason)
                else:
                    parsed.append(record)
        return parsed

    def _know(self, span: Span) -> _Known | None:
        name = span.file.path
        if name not in self._files:
            if len(self._files) >= _FILES_REMEMBERED:
                self._files.clear()
            header = read_header(span.raw)
            self._files[name] = None if header is None else self._meet(span, header)
        return self._files[name]

    def _meet(self, span: Span, header: CsvHeader) -> _Known:
        raw, names = span.raw, header.names
        columns = choose_columns(raw, names, self._options.fields or ())
        for name in columns:
            if names.count(name) > 1:
                raise FieldError(
                    f"{raw}: several columns are named {name!r}; rename them, or choose other columns with fields="
                )
        for name in self._options.types or {}:
            if name not in columns:
                raise FieldError(
                    f"{raw}: types= names {name!r}, but the columns are {', '.join(map(repr, columns))}"
                )
        places = {name: names.index(name) for name in columns}
        parser = Parser(parse_options(raw), names, places, dict.fromkeys(columns, pa.large_string()))
        layout = Layout(
            span.file.path,
            span.file.bytes,
            self._options.span_bytes,
            delimiter_of(raw),
            len(names),
            self._options.scan_csv,
        )
        return _Known(parser, header.stop, layout)


def _once_confirmed(report_bad: ReportBad, cuts: Cuts, cut: int, start: int) -> ReportBad:
    """Like `report_bad`, but before bad records end the stream, check that the span's records do begin at `start`."""

    def report(where: str, reason: str) -> None:
        try:
            report_bad(where, reason)
        except BadRecordsError:
            cuts.confirm(cut, start)
            raise

    return report


def _unpacked(raw: RawFile) -> Iterator[NDArray[np.uint8]]:
    return (np.frombuffer(chunk, dtype=np.uint8) for chunk in ranges.decompressed(raw))


def _pieces(content: Content, start: int, stop: int) -> Iterator[NDArray[np.uint8]]:
    """The file from `start` to its end, in pieces of at most a megabyte. One of them ends at `stop`, so that not much
    is read in vain."""
    position, beyond = start, _READ_BEYOND
    while position < len(content):
        if position < stop:
            wanted = min(READ_BYTES, stop - position)
        else:
            wanted, beyond = beyond, min(2 * beyond, READ_BYTES)
        yield content[position : position + wanted]
        position += wanted


def _convert(record: Record, types: Any) -> str:
    """Convert the values to their types, in place. Returns what is wrong, or "" if all were converted."""
    for name, make in types.items():
        try:
            record[name] = make(record[name])
        except Exception as error:  # whatever the user's function raises, the record is bad
            kind = getattr(make, "__name__", type(make).__name__)
            return f"{name!r} holds {record[name]!r}, which cannot be converted to {kind}: {error}"
    return ""
