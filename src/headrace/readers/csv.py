"""CSV and TSV files with a header row. Quoted fields may hold newlines and doubled quotes.

A stream may begin in the middle of a file: `csv_cuts.py` explains how it finds the first record there.
"""

from collections.abc import Iterator, Sequence
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
    missing_column,
    parsed_type,
    source,
    wanted,
)
from headrace.readers.columns import Block, ReportBad
from headrace.readers.csv_header import CsvHeader, delimiter_of, parse_options, read_head_records, read_header
from headrace.readers.csv_parser import NULLS, UNCLOSED, Parser
from headrace.readers.csv_spans import CsvSpanReader
from headrace.readers.quotes import CsvRecords
from headrace.readers.reader import ReadOptions, Split, choose_columns
from headrace.readers.spans import RecordOptions

_INFERRED = {"int64": "int64", "double": "float64", "bool": "bool"}

fingerprint = ranges.fingerprint


def plan(path: Path, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    header = read_header(path)
    if header is not None and wanted(options):
        _columns(path, header, options)
    return quotes.cut(path, target_bytes, delimiter_of(path))


def infer(path: Path, columns: Sequence[str] = ()) -> dict[str, Field]:
    header, head = read_header(path), read_head_records(path)
    if header is None or head is None:
        raise FormatError(f"{path}: is empty, so its fields cannot be inferred; leave it out")
    if len(set(header.names)) < len(header.names):
        names = ", ".join(header.names)
        raise FieldError(f"{path}: several columns have the same name: {names}; rename them")
    good = _good_records(path, header, head)
    types = _inferred_types(good, path, len(header.names)) if good else ["binary"] * len(header.names)
    fields = {name: _field_of_type(kind) for name, kind in zip(header.names, types, strict=True)}
    return {name: fields[name] for name in choose_columns(path, header.names, columns)}


def _field_of_type(arrow_type: str) -> Field:
    dtype = _INFERRED.get(arrow_type)
    return BYTES if dtype is None else Field(FieldKind.FIXED, dtype)


def _good_records(path: Path, header: CsvHeader, head: CsvRecords) -> bytes:
    """The records after the header that have as many values as it has; the others are reported when they are read."""
    places = {name: place for place, name in enumerate(header.names)}
    parser = Parser(parse_options(path), header.names, places, dict.fromkeys(places, parsed_type(BYTES)))
    count = len(head.starts) - head.unclosed
    good = []
    for first, last, table, _ in parser.runs(head, 1, count):
        if table is not None:
            good.append(head.data[head.starts[first] : head.stops[last - 1]].tobytes())
    return b"".join(good)


def _inferred_types(records: bytes, path: Path, columns: int) -> list[str]:
    # Arrow would drop a byte order mark at the very beginning, and here it is text.
    data = b"\n" + records
    names = [str(number) for number in range(columns)]
    table = arrow_csv.read_csv(
        source(data),
        read_options=arrow_csv.ReadOptions(use_threads=False, column_names=names, block_size=len(data) + 1),
        parse_options=parse_options(path),
        convert_options=arrow_csv.ConvertOptions(null_values=NULLS, strings_can_be_null=False),
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
        chosen = CsvRecords(
            records.data,
            records.starts[after_header],
            records.stops[after_header],
            records.position,
            records.unclosed,
        )
        yield _block(chosen, parser, options, report_bad)


def _block(records: CsvRecords, parser: Parser, options: ReadOptions, report_bad: ReportBad) -> Block:
    def where(record: int) -> str:
        return f"byte {records.position + int(records.starts[record])}"

    count = len(records.starts)
    if records.unclosed and count:
        count -= 1
        report_bad(where(count), UNCLOSED)
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


def _columns(path: Path, header: CsvHeader, options: ReadOptions) -> dict[str, int]:
    places = {}
    for name, field in wanted(options).items():
        if header.names.count(name) != 1:
            raise missing_column(path, name, header.names, options)
        if field.kind is FieldKind.RAGGED or field.shape:
            raise FieldError(
                f"{path}: field {name!r} is {field.notation}, but a CSV column holds one value for each record; "
                "use JSONL, Parquet or .npy for lists"
            )
        places[name] = header.names.index(name)
    return places


def is_whole(path: Path, split: Split) -> bool:
    return ranges.is_compressed(path)


def span_reader(options: RecordOptions) -> CsvSpanReader:
    return CsvSpanReader(options)
