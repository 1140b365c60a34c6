"""Arrow files. In the file format, a range is a number of record batches; in the stream format, the whole file is one
range."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from headrace.errors import SettingsError
from headrace.format.checksum import hasher
from headrace.readers import arrow_digest, ranges
from headrace.readers.arrow_columns import record_columns, to_block, to_records
from headrace.readers.arrow_files import BatchFile, open_batch_stream
from headrace.readers.arrow_sizes import row_slices
from headrace.readers.arrow_types import check_columns, found_columns, readable, wanted
from headrace.readers.bounds import bound_on_rows
from headrace.readers.columns import Block, ReportBad
from headrace.readers.raw_file import RawFile
from headrace.readers.reader import FoundColumn, ReadOptions, Split
from headrace.readers.spans import READ_BYTES, Record, RecordOptions, Span, check_unchanged


def plan(raw: RawFile, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    with readable(raw, "Arrow"):
        if not _has_footer(raw):
            # A batch of a stream can be found only by reading all batches before it.
            reader, _ = open_batch_stream(raw)
            _check_wanted(raw, reader.schema, options)
            return [(0, 1)]
        file = BatchFile(raw)
        _check_wanted(raw, file.schema, options)
        # The footer does not hold the sizes of the batches; writers make them all about the same size.
        average = raw.size() // max(len(file), 1)
        return ranges.join([average] * len(file), target_bytes)


def _check_wanted(raw: RawFile, schema: Any, options: ReadOptions) -> None:
    if wanted(options):
        check_columns(raw, schema, options)


def fingerprint(raw: RawFile, start: int, stop: int) -> str:
    if not _has_footer(raw):
        return ranges.fingerprint(raw, 0, raw.size())
    digest = hasher()
    with readable(raw, "Arrow"):
        file = BatchFile(raw)
        digest.update(file.schema.to_string(show_field_metadata=False, show_schema_metadata=False).encode())
        for number in range(start, stop):
            batch = file[number]
            _check_values(batch)
            digest.update(b"batch %d" % batch.num_rows)
            for column in batch.columns:
                arrow_digest.update(digest, column)
    result: str = digest.hexdigest()
    return result


def look(raw: RawFile) -> dict[str, FoundColumn]:
    with readable(raw, "Arrow"):
        schema = BatchFile(raw).schema if _has_footer(raw) else open_batch_stream(raw)[0].schema
        return found_columns(schema)


def read(raw: RawFile, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    with readable(raw, "Arrow"):
        if _has_footer(raw):
            found = _batches_of_file(raw, start, stop, options)
        else:
            found = _batches_of_stream(raw, options)
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


def _batches_of_file(raw: RawFile, start: int, stop: int, options: ReadOptions) -> _RangeBatches:
    file = BatchFile(raw)
    columns = check_columns(raw, file.schema, options)
    if start < stop:
        file.choose(columns, start)
    bytes_per_batch = raw.size() / max(len(file), 1)
    batches = ((batch, bytes_per_batch) for batch in file.some(list(range(start, stop))))
    return _RangeBatches(batches, functools.cache(functools.partial(file.rows_before, start)))


def _batches_of_stream(raw: RawFile, options: ReadOptions) -> _RangeBatches:
    raw.expect([(0, raw.size())])
    reader, source = open_batch_stream(raw)
    check_columns(raw, reader.schema, options)

    def batches() -> Iterator[tuple[Any, float]]:
        position = 0
        for batch in reader:
            end = source.tell()
            yield batch, end - position
            position = end

    return _RangeBatches(batches(), lambda: 0)


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


def _has_footer(raw: RawFile) -> bool:
    """Whether this is the file format, which records where each batch lies; otherwise it is a stream."""
    raw.size()
    with raw.reading() as content:
        # Both ends say it. The footer of a remote file is fetched next, and comes with its last bytes.
        ends = content[:6] if raw.path is not None else content[max(0, len(content) - 6) :]
    magic = ends.tobytes()
    if b"FEA1" in magic:
        raise SettingsError(
            f"{raw}: is in Feather version 1, which is not supported; write it again in version 2 (Arrow)"
        )
    return magic == b"ARROW1"


def _check_values(batch: Any) -> None:
    """Refuse offsets that point outside their buffer: following them would read arbitrary memory."""
    as_bytes = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
    for column in batch.columns:
        name = as_bytes.get(str(column.type))
        # As bytes, because invalid UTF-8 makes a record bad, not the whole file.
        to_check = column if name is None else column.cast(getattr(pa, name)())
        to_check.validate(full=True)


def is_whole(raw: RawFile, split: Split) -> bool:
    return False


def span_reader(options: RecordOptions) -> "_ArrowSpanReader":
    return _ArrowSpanReader(options)


class _ArrowSpanReader:
    """The footer does not say where batches begin, so they are assumed to be of equal size: of n batches, number i
    belongs to the span that holds byte i/n of the file. All of a file without a footer belongs to its first span."""

    def __init__(self, options: RecordOptions) -> None:
        self._fields = options.fields
        self._most_bytes = options.max_record_bytes
        self._latest: tuple[str, BatchFile] | None = None
        """The remote file that was read last: its footer need not be fetched again for its next span."""

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        raw = check_unchanged(span)
        with readable(raw, "Arrow"):
            file = self._open(span)
            if file is not None:
                columns = record_columns(raw, file.schema.names, self._fields)
                batches = self._batches(file, columns, span)
            else:
                if span.start == 0:
                    raw.expect([(0, raw.size())])
                reader, _ = open_batch_stream(raw)
                columns = record_columns(raw, reader.schema.names, self._fields)
                batches = _numbered(reader) if span.start == 0 else iter(())
            for row, batch in batches:
                chosen = batch.select(columns)
                _check_values(chosen)
                bound = bound_on_rows(self._most_bytes, report_bad, row)
                for first, part in row_slices(chosen, READ_BYTES, bound):
                    yield to_records(part, columns, functools.partial(_sum, row, first), report_bad)

    def _open(self, span: Span) -> BatchFile | None:
        """The file, if it has a footer."""
        if self._latest is not None and self._latest[0] == span.file.path:
            return self._latest[1]
        if not _has_footer(span.raw):
            return None
        file = BatchFile(span.raw)
        if span.file.is_remote:
            self._latest = span.file.path, file
        return file

    def _batches(
        self, file: BatchFile, columns: list[str], span: Span
    ) -> Iterator[tuple[Callable[[], int], Any]]:
        count, size = len(file), span.file.bytes
        numbers = [number for number in range(count) if span.start <= number * size // count < span.stop]
        if self._fields is not None and numbers and span.file.is_remote:
            file.choose([file.schema.names.index(name) for name in columns], numbers[0])
        for number, batch in zip(numbers, file.some(numbers), strict=True):
            yield functools.partial(file.rows_before, number), batch


def _sum(row: Callable[[], int], first: int) -> int:
    return row() + first


def _numbered(batches: Any) -> Iterator[tuple[Callable[[], int], Any]]:
    """The batches of a stream, each with the number of its first row."""
    row = 0
    for batch in batches:
        yield functools.partial(int, row), batch
        row += batch.num_rows
