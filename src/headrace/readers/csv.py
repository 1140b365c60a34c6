"""CSV and TSV files with a header row. Quoted fields may hold newlines and doubled quotes.

A block of records is parsed by Arrow in one go. If Arrow refuses it, the block is halved until the records
that are to blame stand alone, so what happens to a record never depends on its neighbours.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv

from headrace.errors import FieldError, FormatError
from headrace.format.fields import Field, FieldKind
from headrace.readers import quotes, ranges
from headrace.readers.arrow_columns import one_array, to_block
from headrace.readers.arrow_types import (
    BYTES,
    MOST_PARSED_BYTES,
    missing_column,
    parsed_type,
    source,
    wanted,
)
from headrace.readers.columns import Block, ReportBad
from headrace.readers.quotes import Records
from headrace.readers.reader import ReadOptions, choose_columns

_HEAD_BYTES = 2**20
_NULLS = ["", "NA", "N/A", "NaN", "nan", "null", "NULL"]
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_INFERRED = {"int64": "int64", "double": "float64", "bool": "bool"}

fingerprint = ranges.fingerprint


@dataclass(frozen=True)
class Header:
    names: list[str]
    stop: int
    """Where the first record after it begins."""


def plan(path: Path, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    header = read_header(path)
    if header is not None and wanted(options):
        _columns(path, header, options)
    return quotes.cut(path, target_bytes, delimiter_of(path))


def infer(path: Path, columns: Sequence[str] = ()) -> dict[str, Field]:
    header, head = read_header(path), _head(path)
    if header is None or head is None:
        raise FormatError(f"{path}: is empty, so its fields cannot be told; leave it out")
    if len(set(header.names)) < len(header.names):
        raise FieldError(f"{path}: several columns have one name: {', '.join(header.names)}; rename them")
    places = {name: place for place, name in enumerate(header.names)}
    parser = Parser(parse_options(path), header.names, places, dict.fromkeys(places, parsed_type(BYTES)))
    # Records of a wrong length are reported when they are read; here they are left out.
    count = len(head.starts) - head.unclosed
    runs = [(first, last) for first, last, table, _ in parser.runs(head, 1, count) if table is not None]
    data = b"\n" + b"".join(
        head.data[head.starts[first] : head.stops[last - 1]].tobytes() for first, last in runs
    )
    types = _inferred_types(data, path, len(header.names)) if runs else ["binary"] * len(header.names)
    kinds = dict(zip(header.names, types, strict=True))
    return {
        name: Field(FieldKind.FIXED, _INFERRED[kinds[name]]) if kinds[name] in _INFERRED else BYTES
        for name in choose_columns(path, header.names, columns)
    }


def _inferred_types(data: bytes, path: Path, columns: int) -> list[str]:
    names = [str(number) for number in range(columns)]
    table = arrow_csv.read_csv(
        source(data),
        read_options=arrow_csv.ReadOptions(use_threads=False, column_names=names, block_size=len(data) + 1),
        parse_options=parse_options(path),
        convert_options=arrow_csv.ConvertOptions(null_values=_NULLS, strings_can_be_null=False),
    )
    return [str(column.type) for column in table.columns]


def read(path: Path, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    header = read_header(path)
    if header is None:
        return
    columns = _columns(path, header, options)
    types = {name: parsed_type(wanted(options)[name]) for name in columns}
    parser = Parser(parse_options(path), header.names, columns, types)
    for records in quotes.records(path, start, stop, delimiter_of(path), options.block_bytes):
        after_header = records.starts + records.position >= header.stop
        chosen = Records(
            records.data,
            records.starts[after_header],
            records.stops[after_header],
            records.position,
            records.unclosed,
        )
        yield _block(chosen, parser, options, report_bad)


def _block(records: Records, parser: "Parser", options: ReadOptions, report_bad: ReportBad) -> Block:
    def where(record: int) -> str:
        return f"byte {records.position + int(records.starts[record])}"

    count = len(records.starts)
    if records.unclosed and count:
        count -= 1
        report_bad(where(count), "a quote is opened and never closed: left out, up to the end of the file")
    runs: list[tuple[int, Any]] = []
    for first, _, table, reason in parser.runs(records, 0, count):
        if table is None:
            report_bad(where(first), reason)
        else:
            runs.append((first, table))
    rows = np.concatenate(
        [np.arange(first, first + table.num_rows) for first, table in runs] or [np.zeros(0, np.int64)]
    )
    table = pa.concat_tables([table for _, table in runs]) if runs else parser.schema.empty_table()
    arrays = dict(zip(parser.columns, (one_array(column) for column in table.columns), strict=True))
    return to_block(
        arrays,
        options,
        lambda record: where(int(rows[record])),
        len(records.data),
        report_bad,
        lambda name, record: f"{name!r} is empty",
    )


class Parser:
    """Arrow's CSV parser for some columns of one file."""

    def __init__(
        self, parse_options: Any, names: list[str], columns: dict[str, int], types: dict[str, Any]
    ) -> None:
        """`columns`: each one's place among the `names` of the header; `types`: its Arrow type."""
        # Columns go by number, so that columns of one name do no harm as long as nobody asks for them.
        self.columns, self._parse_options, self._names = columns, parse_options, names
        self._read_names = [str(number) for number in range(len(names))]
        by_place = {str(place): types[name] for name, place in columns.items()}
        self.schema = pa.schema(list(by_place.items()))
        self._convert_options = arrow_csv.ConvertOptions(
            column_types=by_place,
            include_columns=list(by_place),
            null_values=_NULLS,
            strings_can_be_null=False,
            true_values=["true", "True", "TRUE", "1"],
            false_values=["false", "False", "FALSE", "0"],
        )

    def runs(self, records: Records, first: int, last: int) -> Iterator[tuple[int, int, Any, str]]:
        """Tables of good records, and bad records one by one with the reason, in order."""
        if first >= last:
            return
        data = records.data[records.starts[first] : records.stops[last - 1]]
        try:
            table = self._parse(data)
            if table.num_rows != last - first:
                raise pa.ArrowInvalid("a carriage return alone, outside quotes")
            yield first, last, table, ""
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            # The second if Arrow quotes bytes that are no text in its message.
            if last - first == 1:
                yield first, last, None, self._reason(data.tobytes(), str(error))
                return
            middle = (first + last) // 2
            yield from self.runs(records, first, middle)
            yield from self.runs(records, middle, last)

    def _parse(self, data: Any) -> Any:
        if len(data) > MOST_PARSED_BYTES:
            raise pa.ArrowInvalid(f"a record of {len(data):,} bytes; the most is {MOST_PARSED_BYTES:,}")
        if data[: len(_BYTE_ORDER_MARK)].tobytes() == _BYTE_ORDER_MARK:
            # Arrow would drop it, and here it is text: the header, which it may precede, is not parsed here.
            data = np.concatenate([np.frombuffer(b"\n", dtype=np.uint8), data])
        options = arrow_csv.ReadOptions(
            use_threads=False, column_names=self._read_names, block_size=len(data) + 1
        )
        return arrow_csv.read_csv(
            source(data),
            read_options=options,
            parse_options=self._parse_options,
            convert_options=self._convert_options,
        )

    def _reason(self, record: bytes, error: str) -> str:
        """Why a single record is bad, with its own columns and values where they can be told."""
        if "invalid UTF8" in error:
            return "not UTF-8"
        try:
            values = _split(record, self._parse_options.delimiter)
        except csv.Error:
            return error
        if not values:
            return "a carriage return alone, outside quotes"
        if len(values) != len(self._names):
            return f"{len(values)} values where the header names {len(self._names)} columns"
        for name, place in self.columns.items():
            kind = self.schema.field(str(place)).type
            text = values[place].strip()[:100]
            if pa.types.is_integer(kind) and not _is_int(text) and _is_float(text):
                return (
                    f"{name!r} holds {text}, a float where {kind} is expected; if the column holds floats, "
                    f"choose its type with --columns NAME=float64"
                )
            if f"'{values[place]}'" in error:
                return f"{name!r} holds {values[place]!r}, which is not {kind}"
        return error


def _is_int(text: str) -> bool:
    return text.lstrip("-").isdecimal()


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _split(record: bytes, delimiter: str) -> list[str]:
    rows = list(csv.reader(io.StringIO(record.decode("utf-8", "replace"), newline=""), delimiter=delimiter))
    return rows[0] if len(rows) == 1 else []


def _columns(path: Path, header: Header, options: ReadOptions) -> dict[str, int]:
    places = {}
    for name, field in wanted(options).items():
        if header.names.count(name) != 1:
            raise missing_column(path, name, header.names, options)
        if field.kind is FieldKind.RAGGED or field.shape:
            raise FieldError(
                f"{path}: field {name!r} is {field.notation}, and a CSV column holds one value a record; "
                "use JSONL, Parquet or .npy for lists"
            )
        places[name] = header.names.index(name)
    return places


def read_header(path: Path) -> Header | None:
    """The header row, or None if the file holds nothing."""
    head = _head(path)
    if head is None or not len(head.starts):
        return None
    row = head.data[head.starts[0] : head.stops[0]].tobytes()
    try:
        row.decode()
        names = _split(row.removeprefix(_BYTE_ORDER_MARK), delimiter_of(path).decode())
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(
            f"{path}: the header row cannot be read: {error}. The first line must name the columns, in UTF-8"
        ) from error
    if not names:
        raise FormatError(
            f"{path}: the header row cannot be read: it has a carriage return inside; end lines with a newline"
        )
    return Header(names, int(head.stops[0]))


def _head(path: Path) -> Records | None:
    return next(quotes.records(path, 0, ranges.file_size(path), delimiter_of(path), _HEAD_BYTES), None)


def delimiter_of(path: Path) -> bytes:
    endings = [suffix.lower() for suffix in path.suffixes[-2:]]
    return b"\t" if ".tsv" in (endings[-1:] if not ranges.is_compressed(path) else endings) else b","


def parse_options(path: Path) -> Any:
    return arrow_csv.ParseOptions(delimiter=delimiter_of(path).decode(), newlines_in_values=True)
