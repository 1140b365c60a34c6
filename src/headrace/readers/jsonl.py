"""JSON Lines: one object on each line, in UTF-8; blank lines are skipped.

Texts are extracted by msgspec and tables by Arrow: each parses a whole block in one call, two to three times as fast
as Python's `json` (`docs/log.md` has the numbers). They are given only blocks in which each line looks like an
object, because both also accept several objects on one line and one object on several lines, and Arrow crashes on a
file that begins with `null`. Whatever they refuse goes to `json`, line by line, which has the last word on what a
record is.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.json as arrow_json
from numpy.typing import NDArray

from headrace.errors import FormatError
from headrace.format.fields import Field
from headrace.readers import ranges
from headrace.readers.arrow_columns import one_array, to_block
from headrace.readers.arrow_types import MOST_PARSED_BYTES, parsed_type, source, wanted
from headrace.readers.columns import Block, ReportBad, Strings
from headrace.readers.json_kinds import field_for, kind_of
from headrace.readers.reader import ReadOptions, Split, choose_columns
from headrace.readers.spans import Record, RecordOptions, Span, delimited_pieces

_HEAD_BYTES = 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NEWLINE, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
_REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

fingerprint = ranges.fingerprint


class BadLine(ValueError):
    """A line that is not a record; the message says why."""


@dataclass(frozen=True, eq=False)
class _Lines:
    """The lines of a block that are not empty."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    position: int

    def __getitem__(self, line: int) -> bytes:
        content = self.data[self.starts[line] : self.stops[line]].tobytes()
        at_start = self.position == 0 and self.starts[line] == 0
        return content.removeprefix(_BYTE_ORDER_MARK) if at_start else content

    def locate(self, line: int) -> str:
        return f"byte {self.position + int(self.starts[line])}"


def plan(path: Path, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    return ranges.cut(path, target_bytes, b"\n")


def infer(path: Path, columns: Sequence[str] = ()) -> dict[str, Field]:
    found: dict[str, set[str]] = {}
    head = ranges.head(path, _HEAD_BYTES)
    lines = head
    if len(head) == _HEAD_BYTES:
        # The last line is probably incomplete, but a file with a single long line has no other.
        lines = head[: head.rfind(b"\n") + 1] or head
    for line in lines.removeprefix(_BYTE_ORDER_MARK).split(b"\n"):
        try:
            record = parse_line(line) if line.strip() else {}
        except BadLine:
            continue  # reported when it is read
        for name, value in record.items():
            found.setdefault(name, set()).add(kind_of(value))
    if not found:
        raise FormatError(
            f"{path}: no record in the first {len(head):,} bytes, so its fields cannot be inferred; "
            "leave the file out, or choose types with --columns NAME=TYPE,..."
        )
    chosen = choose_columns(path, list(found), columns)
    return {name: field_for(path, name, found[name] - {"null"}) for name in chosen}


def read(path: Path, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    schema = pa.schema([(name, parsed_type(field)) for name, field in wanted(options).items()])
    for data, position in ranges.blocks(path, start, stop, b"\n", options.block_bytes):
        if options.text_field is not None and (texts := _texts_fast(data, options.text_field)) is not None:
            yield Block({options.text_field: texts}, _locator(data, position), len(data))
            continue
        lines = _lines(data, position)
        rows, arrays = _parse_fast(lines, schema) or _parse_slowly(lines, schema, report_bad)
        yield _block(lines, rows, arrays, options, report_bad)


def _block(
    lines: _Lines,
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
            return f"{name!r} is null"
        remedy = "; choose a key with --text-field NAME" if options.text_field is not None else ""
        return f"{_missing_key(name, keys)}{remedy}"

    return to_block(
        arrays,
        options,
        lambda record: lines.locate(int(rows[record])),
        len(lines.data),
        report_bad,
        null_reason,
    )


def _lines(data: NDArray[np.uint8], position: int) -> _Lines:
    newlines = np.flatnonzero(data == _NEWLINE)
    starts = np.concatenate([[0], newlines + 1]).astype(np.int64)
    stops = np.concatenate([newlines, [len(data)]]).astype(np.int64)
    full = stops > starts
    starts, stops = starts[full], stops[full]
    stops = stops - (data[stops - 1] == _RETURN)
    full = stops > starts
    return _Lines(data, starts[full], stops[full], position)


def _texts_fast(data: NDArray[np.uint8], text_field: str) -> Strings | None:
    """The texts, parsed by msgspec, or None if a line is not a record with a text: then `json` says which, and why."""
    objects = _objects(data)
    if objects is None or not _is_utf8(data):
        return None
    lines, count = objects
    try:
        records = _decoder(text_field).decode_lines(lines)
    except _REFUSED:
        return None
    return Strings([record.text for record in records]) if len(records) == count else None


def _objects(data: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int] | None:
    """The same bytes without a newline at their end, and the number of lines; None if a line cannot be an object.

    msgspec also accepts several objects on one line, and one object on several lines. But inside an object, no } is
    followed by a {, so a newline between the two can only end an object. Here no newline is the first or last byte.
    """
    newlines = np.flatnonzero(data == _NEWLINE)
    if len(newlines) and newlines[-1] == len(data) - 1:
        newlines, data = newlines[:-1], data[:-1]
    if not len(data) or data[0] != _OPEN or data[-1] != _CLOSE:
        return None
    between = (data[newlines - 1] == _CLOSE) & (data[newlines + 1] == _OPEN)
    return (data, len(newlines) + 1) if between.all() else None


def _locator(data: NDArray[np.uint8], position: int) -> Callable[[int], str]:
    """A `locate` that looks for the lines only when it is called."""
    found: list[_Lines] = []

    def locate(record: int) -> str:
        if not found:
            found.append(_lines(data, position))
        return found[0].locate(record)

    return locate


@cache
def _decoder(text_field: str) -> Any:
    """A decoder that reads one key and skips the others; a value that is not a string is an error."""
    # In the struct that msgspec fills, `text` stands for the key, which may be any string.
    record: Any = msgspec.defstruct("Record", [("text", str)], rename={"text": text_field}, gc=False)
    return msgspec.json.Decoder(record)


def _one_object_per_line(lines: _Lines) -> bool:
    """Whether each line can be exactly one object, which the fast parsers do not check.

    If every line begins with { and ends with }, then newlines can only be between objects: inside an object, no } is
    followed by a {. If there are as many objects as lines, each line is one object.
    """
    data = lines.data
    look_like_objects = (data[lines.starts] == _OPEN) & (data[lines.stops - 1] == _CLOSE)
    if not len(look_like_objects) or not look_like_objects.all():
        return False
    return len(data) <= MOST_PARSED_BYTES and _is_utf8(data)


def _parse_fast(lines: _Lines, schema: Any) -> tuple[NDArray[np.int64], dict[str, Any]] | None:
    """The columns, parsed by Arrow, or None if Arrow must not, or will not, read this block."""
    data = lines.data
    if not _one_object_per_line(lines):
        return None
    try:
        table = arrow_json.read_json(
            source(data),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError):
        return None
    if table.num_rows != len(lines.starts):
        return None
    arrays = {name: one_array(table.column(number)) for number, name in enumerate(schema.names)}
    return np.arange(table.num_rows), arrays


def _parse_slowly(
    lines: _Lines, schema: Any, report_bad: ReportBad
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """The same columns, parsed line by line. Lines that are not records are reported here."""
    rows: list[int] = []
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for line in range(len(lines.starts)):
        content = lines[line]
        if not content.strip(b" \t\r"):
            continue
        try:
            record = parse_line(content)
            values = {
                column.name: _value(column.name, record.get(column.name), column.type) for column in schema
            }
        except BadLine as error:
            report_bad(lines.locate(line), str(error))
            continue
        rows.append(line)
        for name, value in values.items():
            columns[name].append(value)
    arrays = {column.name: pa.array(columns[column.name], type=column.type) for column in schema}
    return np.array(rows, dtype=np.int64), arrays


def parse_line(line: bytes) -> dict[str, Any]:
    """The record on a line, according to the parser that has the last word. Raises BadLine if there is none."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8: {error.reason} (byte {error.start} of the record)") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadLine(f"not a JSON object, but {kind_of(record)}")
    return record


def _value(name: str, value: Any, expected: Any) -> Any:
    """A value as Arrow would have parsed it. Raises BadLine for what Arrow would have refused."""
    if value is None:
        return None
    if pa.types.is_list(expected) and type(value) is list:
        return [_value(name, item, expected.value_type) for item in value]
    try:
        stored = _scalar(value, expected)
    except (UnicodeEncodeError, OverflowError) as error:
        raise BadLine(f"{name!r} cannot be stored: {error}") from None
    if stored is None:
        wanted_kind = "text" if pa.types.is_large_binary(expected) else str(expected)
        shown = json.dumps(value)[:60]
        raise BadLine(f"{name!r} is {kind_of(value)} where {wanted_kind} is expected: {shown}")
    return stored


def _scalar(value: Any, expected: Any) -> Any:
    """A text or number as it is stored; None if it is of another kind or does not fit."""
    kind = type(value)
    if kind is str and pa.types.is_large_binary(expected):
        return value.encode()
    if kind is bool and pa.types.is_boolean(expected):
        return value
    if kind in (int, float) and pa.types.is_floating(expected):
        return float(value)
    if kind is int and pa.types.is_integer(expected) and _fits(value, expected):
        return value
    return None


def _fits(value: int, integer_type: Any) -> bool:
    if pa.types.is_uint64(integer_type):
        return 0 <= value < 2**64
    return -(2**63) <= value < 2**63


def _is_utf8(data: Any) -> bool:
    ends: Any = np.array([0, len(data)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    try:
        pa.Array.from_buffers(pa.large_string(), 1, buffers).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _missing_key(name: str, record: Record) -> str:
    present = ", ".join(list(record)[:20]) or "none"
    return f"no key {name!r}; the record has: {present}"


def is_whole(path: Path, split: Split) -> bool:
    return ranges.is_compressed(path)


def span_reader(options: RecordOptions) -> "_JsonSpanReader":
    return _JsonSpanReader(options)


class _JsonSpanReader:
    """msgspec decodes a whole piece of the file at once if each line looks like exactly one object. Other pieces go
    through the same decoder line by line; what it refuses goes to `json`, which has the last word. So the outcome for a
    line never depends on its neighbours."""

    def __init__(self, options: RecordOptions) -> None:
        self._fields = options.fields
        # If fields are chosen, msgspec skips the other keys without creating their values.
        chosen: Any = TypedDict
        kind = chosen("Record", dict.fromkeys(self._fields, Any)) if self._fields else dict[str, Any]
        self._decoder: Any = msgspec.json.Decoder(kind)

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        for piece, position in delimited_pieces(span, b"\n"):
            at_once = self._decode(piece)
            yield at_once if at_once is not None else list(self._lines(piece, position, report_bad))

    def _decode(self, piece: bytes) -> list[Record] | None:
        """All lines in one call, or None if one of them is not an object."""
        objects = _objects(np.frombuffer(piece, dtype=np.uint8))
        if objects is None:
            return None
        data, count = objects
        try:
            if self._fields is not None:
                piece.decode()  # values that are skipped must be UTF-8 as well
            records: list[Record] = self._decoder.decode_lines(data)
        except _REFUSED:
            return None
        return records if len(records) == count else None

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
                raise BadLine(_missing_key(name, record))
        return {name: record[name] for name in self._fields}
