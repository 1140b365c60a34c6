"""CSV and TSV files with a header row. Quoted fields may hold newlines and doubled quotes.

A stream may begin in the middle of a file: `csv_cuts.py` explains how it finds the first record there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import FieldError, FormatError
from headrace.format.fields import Field, FieldKind
from headrace.readers import quotes, ranges
from headrace.readers.arrow_columns import Problems, one_array, to_block
from headrace.readers.arrow_types import missing_column, parsed_type, wanted
from headrace.readers.columns import Block, ReportBad
from headrace.readers.csv_cuts import Layout, cut_by_looking
from headrace.readers.csv_header import (
    CsvHeader,
    delimiter_of,
    hint_at_delimiter,
    parse_options,
    read_head_records,
    read_header,
)
from headrace.readers.csv_numbers import BOOL, FLOAT64, INT64, column_of_texts, to_numbers
from headrace.readers.csv_parser import UNCLOSED, Parser
from headrace.readers.csv_spans import CsvSpanReader
from headrace.readers.places import Places
from headrace.readers.quotes import CsvRecords, QuoteScanner
from headrace.readers.raw_file import RawFile
from headrace.readers.reader import FoundColumn, ReadOptions, Split
from headrace.readers.remedies import columns_with, remedy_for_missing
from headrace.readers.spans import RecordOptions

fingerprint = ranges.fingerprint


def plan(raw: RawFile, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    header = read_header(raw)
    if header is not None and wanted(options):
        _columns(raw, header, options)
    size, is_near = raw.size(), raw.path is not None
    if header is None or is_near or ranges.is_compressed(raw) or size <= target_bytes:
        return quotes.cut(raw, target_bytes, delimiter_of(raw))
    # To follow the quotes from the beginning, all of the file would be fetched once more.
    layout = Layout(str(raw), size, size, delimiter_of(raw), len(header.names))
    return cut_by_looking(raw.content(), layout, target_bytes)


def look(raw: RawFile) -> dict[str, FoundColumn]:
    header, head = read_header(raw), read_head_records(raw)
    if header is None or head is None:
        return {}
    # Texts under names that cannot be chosen, as other columns may have the same ones.
    places = {str(place): place for place in range(len(header.names))}
    parser = Parser(parse_options(raw), header.names, places, dict.fromkeys(places, pa.large_string()))
    count = len(head.starts) - head.unclosed
    # The records that have as many values as the header; the others are reported when they are read.
    tables = [table for _, _, table, _ in parser.runs(head, 1, count) if table is not None]
    table = pa.concat_tables([parser.schema.empty_table(), *tables])
    found = {
        name: column_of_texts(one_array(column))
        for name, column in zip(header.names, table.columns, strict=True)
    }
    for name in header.names:
        if header.names.count(name) > 1:
            found[name] = FoundColumn(problem=f"several columns are named {name!r}; rename them")
    hint = hint_at_delimiter(header.names)
    return {name: replace(column, note=hint) for name, column in found.items()}


def read(raw: RawFile, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    header = read_header(raw)
    if header is None:
        return
    columns = _columns(raw, header, options)
    fields = wanted(options)
    exact = {name: fields[name] for name in options.inferred if fields[name] in (INT64, FLOAT64, BOOL)}
    types = {
        name: pa.large_string() if name in exact else parsed_type(field) for name, field in fields.items()
    }
    parser = Parser(parse_options(raw), header.names, columns, types)
    places = Places(raw)
    bound = places.bound(options.max_record_bytes, report_bad)
    scanner = QuoteScanner(delimiter_of(raw))
    with places:
        for records in quotes.records(raw, start, stop, scanner, options.block_bytes, bound):
            if records.unclosed:
                _check_cut(raw, stop)
            chosen = records.take(records.starts + records.position >= header.stop)
            yield _block(chosen, parser, exact, places, options, report_bad)
        if scanner.inside:
            _check_cut(raw, stop)


def _check_cut(raw: RawFile, stop: int) -> None:
    """For a range that ends inside quotes: raise an error if `cut_by_looking` has cut the file there. At the end of a
    file it is a bad record."""
    if raw.path is None and stop < raw.size():
        raise FormatError(
            f"{raw}: judging by the bytes around byte {stop}, a record begins there; judging by all quotes before it, "
            "the byte is inside quotes. Copy the file to a local disk and build from there, where the quotes are "
            "followed from the beginning of the file"
        )


def _block(
    records: CsvRecords,
    parser: Parser,
    exact: Mapping[str, Field],
    places: Places,
    options: ReadOptions,
    report_bad: ReportBad,
) -> Block:
    def where(record: int) -> str:
        return places.describe(records.position + int(records.starts[record]))

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
    problems = _parse_exactly(arrays, exact, options)

    def missing(name: str, record: int) -> str:
        text = parser.value(records, int(rows[record]), name)
        found = f"holds {text!r}, which counts as missing" if text else "is empty"
        return f"{name!r} {'is missing' if text is None else found}{remedy_for_missing(options, name)}"

    return to_block(
        arrays,
        options,
        lambda record: where(int(rows[record])),
        len(records.data),
        report_bad,
        missing,
        problems,
    )


def _parse_exactly(arrays: dict[str, Any], exact: Mapping[str, Field], options: ReadOptions) -> Problems:
    """Replace these columns of texts by columns of numbers. Returns the rows whose texts are not the same number
    again."""
    problems: Problems = {}
    for name, field in exact.items():
        texts = arrays[name]
        arrays[name], changed = to_numbers(texts, field)
        for row in changed.tolist():
            text = texts[row].as_py()[:100]
            reason = (
                f"{name!r} holds {text!r}, which is not {field.notation}, as the values at the start of the inputs "
                f"are; choose a type that holds all of them, like {columns_with(options, name, 'bytes')}"
            )
            problems.setdefault(row, reason)
    return problems


def _columns(raw: RawFile, header: CsvHeader, options: ReadOptions) -> dict[str, int]:
    places = {}
    for name, field in wanted(options).items():
        if header.names.count(name) != 1:
            raise missing_column(raw, name, header.names, options, hint_at_delimiter(header.names))
        if field.kind is FieldKind.RAGGED or field.shape:
            raise FieldError(
                f"{raw}: field {name!r} is {field.notation}, but a CSV column holds one value for each record; "
                "use JSONL, Parquet or .npy for lists"
            )
        places[name] = header.names.index(name)
    return places


def is_whole(raw: RawFile, split: Split) -> bool:
    return ranges.is_compressed(raw)


def span_reader(options: RecordOptions) -> CsvSpanReader:
    return CsvSpanReader(options)
