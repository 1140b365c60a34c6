"""CSV and TSV with a header row: a dict of strings a record, or of what `types` makes of them.

Quoted values may hold newlines; `csv_cuts.py` says how a block is entered all the same. What is a record, and what is
wrong with one that is none, the builder's parser decides.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.errors import FieldError
from headrace.readers import ranges
from headrace.readers.columns import ReportBad
from headrace.readers.csv import Parser, delimiter_of, parse_options, read_header
from headrace.readers.inputs import InputFile
from headrace.readers.quotes import QuoteScanner, Records, split_records
from headrace.readers.reader import choose_columns
from headrace.streams.blocks import Block
from headrace.streams.formats.csv_cuts import Cuts, Layout
from headrace.streams.formats.delimited import READ_BYTES, chunks
from headrace.streams.formats.reader import Record, opened
from headrace.streams.settings import CsvCuts, StreamSettings

_FILES_REMEMBERED = 1024


class _Known(NamedTuple):
    """What is remembered of a file."""

    parser: Parser
    first_record: int
    """Where the first record after the header begins."""
    layout: Layout


class Reader:
    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings
        self._files: dict[str, _Known | None] = {}
        """None: the file is empty."""
        self._reached = ("", 0, 0)
        """The file that was read last, the end of that block, and where the next record begins: who reads consecutive
        blocks need not look for it."""

    def read(self, block: Block, report_bad: ReportBad) -> Iterator[list[Record]]:
        with opened(block.file) as file:
            known = self._know(block.file)
            if known is None:
                return
            path = Path(block.file.path)
            if ranges.is_compressed(path):
                found = _records(ranges.decompressed(path), 0, None, known.layout.delimiter)
            else:
                found = self._of_block(file, block, known)
            for records in found:
                yield self._parsed(records, known, report_bad)

    def _of_block(self, file: Any, block: Block, known: _Known) -> Iterator[Records]:
        cuts, layout = Cuts(file.fileno(), known.layout), known.layout
        path, last_limit, next_start = self._reached
        if path == block.file.path and last_limit <= block.cut <= next_start:
            start = next_start
        else:
            start = cuts.first_start(block.cut)
        if start >= block.limit:
            return
        after, checked = block.limit, start

        def passed(position: int, *, exact: bool) -> None:
            """No record has begun between the block's limit and `position`; if `exact`, one begins there."""
            nonlocal checked, after
            checked = position
            while after < block.file.bytes and (
                after <= position if exact else after + layout.block_bytes <= position
            ):
                cuts.check(after, position, exact=exact)
                after += layout.block_bytes

        yield from _records(
            chunks(file, start, block.limit), start, block.limit, layout.delimiter, passed=passed
        )
        self._reached = (block.file.path, block.limit, checked)

    def _parsed(self, records: Records, known: _Known, report_bad: ReportBad) -> list[Record]:
        def where(record: int) -> str:
            return f"byte {records.position + int(records.starts[record])}"

        first = int(np.searchsorted(records.starts + records.position, known.first_record))
        last = len(records.starts)
        if records.unclosed and last > first:
            last -= 1
            reason = "a quote is opened and never closed: left out, up to the end of the file"
            report_bad(where(last), reason)
        types, parsed = self._settings.types or {}, []
        for begin, _, table, reason in known.parser.runs(records, first, last):
            if table is None:
                report_bad(where(begin), reason)
                continue
            made: list[Record] = table.rename_columns(list(known.parser.columns)).to_pylist()
            if not types:
                parsed += made
                continue
            for number, record in enumerate(made):
                reason = _convert(record, types)
                if reason:
                    report_bad(where(begin + number), reason)
                else:
                    parsed.append(record)
        return parsed

    def _know(self, file: InputFile) -> _Known | None:
        if file.path not in self._files:
            if len(self._files) >= _FILES_REMEMBERED:
                self._files.clear()
            self._files[file.path] = self._meet(file)
        return self._files[file.path]

    def _meet(self, file: InputFile) -> _Known | None:
        path = Path(file.path)
        header = read_header(path)
        if header is None:
            return None
        names = header.names
        columns = choose_columns(path, names, self._settings.fields or ())
        for name in columns:
            if names.count(name) > 1:
                raise FieldError(
                    f"{path}: several columns are called {name!r}; rename them, or choose with fields="
                )
        for name in self._settings.types or {}:
            if name not in columns:
                raise FieldError(
                    f"{path}: types= names {name!r}, and the columns are {', '.join(map(repr, columns))}"
                )
        places = {name: names.index(name) for name in columns}
        parser = Parser(parse_options(path), names, places, dict.fromkeys(columns, pa.large_string()))
        layout = Layout(
            file,
            self._settings.block_bytes,
            delimiter_of(path),
            len(names),
            self._settings.csv_cuts is CsvCuts.SCAN,
        )
        return _Known(parser, header.stop, layout)


def _records(
    chunks: Iterable[bytes], start: int, limit: int | None, delimiter: bytes, passed: Any = None
) -> Iterator[Records]:
    """From the start of a record on, until one ends at `limit` or later; `passed` is told what lies beyond it."""
    scanner = QuoteScanner(delimiter)
    pending: list[NDArray[np.uint8]] = []
    ends: list[NDArray[np.int64]] = []
    at, held = start, 0
    for chunk in chunks:
        piece = np.frombuffer(chunk, dtype=np.uint8)
        found = scanner.outside_newlines(piece) + held + 1
        pending.append(piece)
        held += len(piece)
        if limit is not None:
            found = found[: int(np.searchsorted(found, limit - at)) + 1]
        if len(found):
            ends.append(found)
        over = limit is not None and bool(ends) and at + int(ends[-1][-1]) >= limit
        if not over and passed is not None:
            passed(at + held, exact=False)
        # A call of the parser costs as much as a hundred kilobytes: what ends beyond the block waits for its end.
        enough = held >= READ_BYTES and (limit is None or at + held < limit)
        if ends and (over or enough):
            data, last = np.concatenate(pending), int(ends[-1][-1])
            yield split_records(data[:last], np.concatenate(ends), at, unclosed=False)
            pending, ends = [data[last:]], []
            at, held = at + last, len(data) - last
        if over:
            passed(at, exact=True)
            return
    if held:
        yield split_records(
            np.concatenate(pending), np.concatenate([*ends, [held]]), at, unclosed=scanner.inside
        )
    if passed is not None:
        passed(at + held, exact=True)


def _convert(record: Record, types: Any) -> str:
    """Put the values in their types; gives what is wrong if one refuses."""
    for name, make in types.items():
        try:
            record[name] = make(record[name])
        except Exception as error:  # whatever a user's function raises, the record is bad
            kind = getattr(make, "__name__", type(make).__name__)
            return f"{name!r} holds {record[name]!r}, which makes no {kind}: {error}"
    return ""
