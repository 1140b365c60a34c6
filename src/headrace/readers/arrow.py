"""Arrow files: the file format, a range being some record batches, and the stream format, one range."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from headrace.errors import SettingsError
from headrace.format.checksum import hasher
from headrace.format.fields import Field
from headrace.readers import ranges
from headrace.readers.arrow_columns import record_columns, row_slices, to_block, to_records
from headrace.readers.arrow_types import check_columns, infer_fields, readable, wanted
from headrace.readers.columns import Block, ReportBad
from headrace.readers.reader import ReadOptions, Split
from headrace.readers.spans import READ_BYTES, Record, RecordOptions, Span, check_unchanged
from headrace.store.files import read_head


def plan(path: Path, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    with readable(path, "Arrow"):
        reader, footer = _open(path)
        if wanted(options):
            check_columns(path, reader.schema, options)
        if not footer:
            # The batches of a stream can be found only by reading all before them.
            return [(0, 1)]
        # The sizes of single batches are not in the footer, and writers make batches of about one size.
        average = ranges.file_size(path) // max(reader.num_record_batches, 1)
        return ranges.join([average] * reader.num_record_batches, target_bytes)


def fingerprint(path: Path, start: int, stop: int) -> str:
    if not _has_footer(path):
        return ranges.fingerprint(path, 0, ranges.file_size(path))
    digest = hasher()
    with readable(path, "Arrow"):
        reader, _ = _open(path)
        digest.update(reader.schema.to_string(show_field_metadata=False, show_schema_metadata=False).encode())
        for number in range(start, stop):
            batch = reader.get_batch(number)
            _check_values(batch)
            digest.update(b"batch %d" % batch.num_rows)
            for column in batch.columns:
                _update(digest, column)
    result: str = digest.hexdigest()
    return result


def infer(path: Path, columns: Sequence[str] = ()) -> dict[str, Field]:
    with readable(path, "Arrow"):
        reader, _ = _open(path)
        return infer_fields(path, reader.schema, columns)


def read(path: Path, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    with readable(path, "Arrow"):
        footer = _has_footer(path)
        content = _mapped(path)
        source = pa.BufferReader(content)
        reader: Any = pa.ipc.open_file(content) if footer else pa.ipc.open_stream(source)
        columns = check_columns(path, reader.schema, options)
        if footer and start < stop and not _lies_in(content, reader.get_batch(start)):
            reader = pa.ipc.open_file(content, options=pa.ipc.IpcReadOptions(included_fields=columns))
        batches = (reader.get_batch(number) for number in range(start, stop)) if footer else iter(reader)
        bytes_per_batch = ranges.file_size(path) / max(reader.num_record_batches, 1) if footer else 0.0
        # Asked for only when a message names a row: compressed batches would be decompressed to count them.
        rows_before = functools.cache(
            lambda: sum(reader.get_batch(number).num_rows for number in range(start)) if footer else 0
        )
        row, position = 0, 0
        for batch in batches:
            chosen = batch.select(list(wanted(options)))
            _check_values(chosen)
            input_bytes = bytes_per_batch or source.tell() - position
            position = source.tell()
            for first, part in row_slices(chosen, options.block_bytes):
                share = round(input_bytes * part.num_rows / batch.num_rows)
                yield _block(part, row + first, rows_before, options, share, report_bad)
            row += batch.num_rows


def _lies_in(content: Any, batch: Any) -> bool:
    """Whether the batch lies in the mapped file as it is. If so, columns that nobody wants cost nothing, while
    leaving them out would make Arrow copy the others. If not, it is compressed: then leave them out."""
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer and buffer.size]
    return all(0 <= buffer.address - content.address < content.size for buffer in buffers)


def _block(
    part: Any,
    row: int,
    rows_before: Callable[[], int],
    options: ReadOptions,
    input_bytes: int,
    report_bad: ReportBad,
) -> Block:
    arrays = dict(zip(part.schema.names, part.columns, strict=True))
    return to_block(
        arrays, options, lambda record: f"row {rows_before() + row + record}", input_bytes, report_bad
    )


def _has_footer(path: Path) -> bool:
    """Whether this is the file format, which tells where each batch lies; otherwise it is a stream."""
    ranges.file_size(path)
    head, _ = read_head(path, 6)
    if head.startswith(b"FEA1"):
        raise SettingsError(
            f"{path}: Feather version 1, which is not supported; write it again as version 2 (Arrow)"
        )
    return head == b"ARROW1"


def _open(path: Path) -> tuple[Any, bool]:
    """A reader, and whether it is one of the file format."""
    footer = _has_footer(path)
    content = _mapped(path)
    return (pa.ipc.open_file(content) if footer else pa.ipc.open_stream(content)), footer


def _mapped(path: Path) -> Any:
    return pa.memory_map(str(path)).read_buffer()


def _check_values(batch: Any) -> None:
    """Refuse offsets that point outside their buffer: we would read wild memory."""
    as_bytes = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
    for column in batch.columns:
        name = as_bytes.get(str(column.type))
        # Bad UTF-8 is for the record to answer for, not the file.
        (column if name is None else column.cast(getattr(pa, name)())).validate(full=True)


def _update(digest: Any, array: Any) -> None:
    """Take in the values of an array, and no byte beside them: buffers may run on into the next batch."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _update(digest, array.storage)
    digest.update(b"%d %d " % (len(array), array.null_count))
    if array.null_count:
        digest.update(array.is_null().to_numpy(zero_copy_only=False))
    if pa.types.is_dictionary(kind):
        _update(digest, array.indices)
        _update(digest, array.dictionary)
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            _update(digest, array.field(number))
    elif pa.types.is_fixed_size_list(kind):
        _update(digest, array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size))
    elif _has_offsets(kind) and len(array):
        wide = pa.types.is_large_list(kind) or str(kind).startswith("large_")
        ends = np.frombuffer(array.buffers()[1], dtype=np.int64 if wide else np.int32)
        ends = ends[array.offset : array.offset + len(array) + 1]
        digest.update(ends - ends[0])
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            _update(digest, array.values.slice(int(ends[0]), int(ends[-1] - ends[0])))
        elif ends[-1] > ends[0]:
            digest.update(array.buffers()[2][int(ends[0]) : int(ends[-1])])
    else:
        for buffer in array.buffers()[1:]:
            digest.update(buffer or b"")
    return None


def _has_offsets(kind: Any) -> bool:
    return str(kind) in ("string", "binary", "large_string", "large_binary") or bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind)
    )


def is_whole(path: Path, split: Split) -> bool:
    return False


def span_reader(options: RecordOptions) -> "_ArrowSpanReader":
    return _ArrowSpanReader(options)


class _ArrowSpanReader:
    """The footer does not say where batches begin, so they are taken to be of one size: of n batches, number i belongs
    to the span that holds byte i/n of the file. All of a file without a footer belongs to its first span."""

    def __init__(self, options: RecordOptions) -> None:
        self._fields = options.fields

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        path = check_unchanged(span.file)
        with readable(path, "Arrow"):
            reader, footer = _open(path)
            columns = record_columns(path, reader.schema.names, self._fields)
            if footer:
                batches: Any = self._batches(reader, span)
            else:
                batches = _numbered(reader) if span.start == 0 else []
            for row, batch in batches:
                chosen = batch.select(columns)
                _check_values(chosen)
                for first, part in row_slices(chosen, READ_BYTES):
                    yield to_records(part, columns, functools.partial(_sum, row, first), report_bad)

    def _batches(self, reader: Any, span: Span) -> Iterator[tuple[Callable[[], int], Any]]:
        count = reader.num_record_batches
        for number in range(count):
            if span.start <= number * span.file.bytes // count < span.stop:
                yield functools.partial(_rows_before, reader, number), reader.get_batch(number)


def _sum(row: Callable[[], int], first: int) -> int:
    return row() + first


def _rows_before(reader: Any, number: int) -> int:
    return sum(reader.get_batch(each).num_rows for each in range(number))


def _numbered(batches: Any) -> Iterator[tuple[Callable[[], int], Any]]:
    """The batches of a stream, each with the number of its first row."""
    row = 0
    for batch in batches:
        yield functools.partial(int, row), batch
        row += batch.num_rows
