"""Arrow files. In the file format, a range is a number of record batches; in the stream format, the whole file is one
range."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.ipc

from headrace.errors import SettingsError
from headrace.format.checksum import hasher
from headrace.readers import arrow_digest, ranges
from headrace.readers.arrow_columns import record_columns, to_block, to_records
from headrace.readers.arrow_sizes import row_slices
from headrace.readers.arrow_types import check_columns, found_columns, readable, wanted
from headrace.readers.bounds import bound_on_rows
from headrace.readers.columns import Block, ReportBad
from headrace.readers.reader import FoundColumn, ReadOptions, Split
from headrace.readers.spans import READ_BYTES, Record, RecordOptions, Span, check_unchanged
from headrace.store.files import read_head


def plan(path: Path, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    with readable(path, "Arrow"):
        reader, footer = _open(path)
        if wanted(options):
            check_columns(path, reader.schema, options)
        if not footer:
            # A batch of a stream can be found only by reading all batches before it.
            return [(0, 1)]
        # The footer does not hold the sizes of the batches; writers make them all about the same size.
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
                arrow_digest.update(digest, column)
    result: str = digest.hexdigest()
    return result


def look(path: Path) -> dict[str, FoundColumn]:
    with readable(path, "Arrow"):
        reader, _ = _open(path)
        return found_columns(reader.schema)


def read(path: Path, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    with readable(path, "Arrow"):
        if _has_footer(path):
            found = _batches_of_file(path, start, stop, options)
        else:
            found = _batches_of_stream(path, options)
        row = 0
        for batch, input_bytes in found.batches:
            chosen = batch.select(list(wanted(options)))
            _check_values(chosen)
            bound = bound_on_rows(
                options.max_record_bytes, report_bad, functools.partial(_sum, found.rows_before, row)
            )
            for first, part in row_slices(chosen, options.block_bytes, bound):
                share = round(input_bytes * part.num_rows / batch.num_rows)
                yield _block(part, row + first, found.rows_before, options, share, report_bad)
            row += batch.num_rows


class _RangeBatches(NamedTuple):
    """The batches of a range."""

    batches: Iterator[tuple[Any, float]]
    """Each batch, with the number of input bytes that it stands for."""
    rows_before: Callable[[], int]
    """How many rows of the file come before the range. Only messages ask for this, because compressed batches must be
    decompressed to count their rows."""


def _batches_of_file(path: Path, start: int, stop: int, options: ReadOptions) -> _RangeBatches:
    content = _mapped(path)
    reader: Any = pa.ipc.open_file(content)
    columns = check_columns(path, reader.schema, options)
    if start < stop and not _lies_in(content, reader.get_batch(start)):
        reader = pa.ipc.open_file(content, options=pa.ipc.IpcReadOptions(included_fields=columns))
    bytes_per_batch = ranges.file_size(path) / max(reader.num_record_batches, 1)
    batches = ((reader.get_batch(number), bytes_per_batch) for number in range(start, stop))
    return _RangeBatches(batches, functools.cache(functools.partial(_rows_before, reader, start)))


def _batches_of_stream(path: Path, options: ReadOptions) -> _RangeBatches:
    source = pa.BufferReader(_mapped(path))
    reader: Any = pa.ipc.open_stream(source)
    check_columns(path, reader.schema, options)

    def batches() -> Iterator[tuple[Any, float]]:
        position = 0
        for batch in reader:
            end = source.tell()
            yield batch, end - position
            position = end

    return _RangeBatches(batches(), lambda: 0)


def _lies_in(content: Any, batch: Any) -> bool:
    """Whether the batch can be used where it lies in the mapped file. If so, unwanted columns cost nothing, while
    leaving them out would make Arrow copy the others. If not, the batch is compressed, and unwanted columns are better
    left out."""
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
    """Whether this is the file format, which records where each batch lies; otherwise it is a stream."""
    ranges.file_size(path)
    head, _ = read_head(path, 6)
    if head.startswith(b"FEA1"):
        raise SettingsError(
            f"{path}: is in Feather version 1, which is not supported; write it again in version 2 (Arrow)"
        )
    return head == b"ARROW1"


def _open(path: Path) -> tuple[Any, bool]:
    """A reader, and whether the file is in the file format."""
    footer = _has_footer(path)
    content = _mapped(path)
    return (pa.ipc.open_file(content) if footer else pa.ipc.open_stream(content)), footer


def _mapped(path: Path) -> Any:
    return pa.memory_map(str(path)).read_buffer()


def _check_values(batch: Any) -> None:
    """Refuse offsets that point outside their buffer: following them would read arbitrary memory."""
    as_bytes = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
    for column in batch.columns:
        name = as_bytes.get(str(column.type))
        # As bytes, because invalid UTF-8 makes a record bad, not the whole file.
        to_check = column if name is None else column.cast(getattr(pa, name)())
        to_check.validate(full=True)


def is_whole(path: Path, split: Split) -> bool:
    return False


def span_reader(options: RecordOptions) -> "_ArrowSpanReader":
    return _ArrowSpanReader(options)


class _ArrowSpanReader:
    """The footer does not say where batches begin, so they are assumed to be of equal size: of n batches, number i
    belongs to the span that holds byte i/n of the file. All of a file without a footer belongs to its first span."""

    def __init__(self, options: RecordOptions) -> None:
        self._fields = options.fields
        self._most_bytes = options.max_record_bytes

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
                bound = bound_on_rows(self._most_bytes, report_bad, row)
                for first, part in row_slices(chosen, READ_BYTES, bound):
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
