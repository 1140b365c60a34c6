"""JSON Lines: one object on each line, in UTF-8; blank lines are skipped."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.readers import ranges
from headrace.readers.arrow_columns import to_block
from headrace.readers.columns import Block, ReportBad
from headrace.readers.json_kinds import column_of_kinds, kind_of
from headrace.readers.json_lines import BadLine, Lines, missing_key, parse_line, split_lines
from headrace.readers.json_spans import JsonSpanReader, decode_lines
from headrace.readers.json_table import TableParser
from headrace.readers.json_texts import texts_block
from headrace.readers.places import Places
from headrace.readers.raw_file import RawFile
from headrace.readers.reader import FoundColumn, ReadOptions, Split
from headrace.readers.remedies import remedy_for_missing
from headrace.readers.spans import RecordOptions

_HEAD_BYTES = 2**20

fingerprint = ranges.fingerprint


def plan(raw: RawFile, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    return ranges.cut(raw, target_bytes, b"\n")


def look(raw: RawFile) -> dict[str, FoundColumn]:
    found: dict[str, set[str]] = {}
    for record in _first_records(raw):
        for name, value in record.items():
            kinds = found.get(name)
            if kinds is None:
                kinds = found[name] = set()
            kinds.add(kind_of(value))
    return {name: column_of_kinds(name, kinds) for name, kinds in found.items()}


def _first_records(raw: RawFile) -> Iterable[dict[str, Any]]:
    head = ranges.head(raw, _HEAD_BYTES)
    if len(head) == _HEAD_BYTES:
        # The last line is probably incomplete, but a file with a single long line has no other.
        head = head[: head.rfind(b"\n") + 1] or head
    at_once = decode_lines(head)
    return at_once if at_once is not None else _line_by_line(raw, head)


def _line_by_line(raw: RawFile, head: bytes) -> Iterator[dict[str, Any]]:
    lines = split_lines(np.frombuffer(head, dtype=np.uint8), 0, Places(raw))
    for line in range(len(lines)):
        try:
            yield parse_line(lines[line])
        except BadLine:
            continue  # reported when it is read


def read(raw: RawFile, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    places = Places(raw)
    bound = places.bound(options.max_record_bytes, report_bad)
    parser = None if options.text_field is not None else TableParser(options)
    with places:
        for data, position in ranges.blocks(raw, start, stop, b"\n", options.block_bytes, bound):
            if parser is None:
                yield texts_block(data, position, options.text_field or "", places, report_bad)
                continue
            lines = split_lines(data, position, places)
            rows, arrays = parser.parse(lines, report_bad)
            yield _block(lines, rows, arrays, options, report_bad)


def _block(
    lines: Lines,
    rows: NDArray[np.int64],
    arrays: dict[str, Any],
    options: ReadOptions,
    report_bad: ReportBad,
) -> Block:
    def null_reason(name: str, record: int) -> str:
        try:
            keys = parse_line(lines[int(rows[record])])
        except BadLine as error:
            return str(error)  # nested deeper than Python's parser goes
        if name in keys:
            return f"{name!r} is null{remedy_for_missing(options, name)}"
        return f"{missing_key(name, keys)}{remedy_for_missing(options, name)}"

    return to_block(
        arrays,
        options,
        lambda record: lines.locate(int(rows[record])),
        len(lines.data),
        report_bad,
        null_reason,
    )


def is_whole(raw: RawFile, split: Split) -> bool:
    return ranges.is_compressed(raw)


def span_reader(options: RecordOptions) -> JsonSpanReader:
    return JsonSpanReader(options)
