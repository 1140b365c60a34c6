"""Parquet files; a range is a number of row groups."""

import functools
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.format.checksum import hasher
from headrace.readers import ranges
from headrace.readers.arrow_columns import record_columns, to_block, to_records
from headrace.readers.arrow_files import arrow_file
from headrace.readers.arrow_sizes import longest_in_dictionaries, row_slices
from headrace.readers.arrow_types import check_columns, found_columns, readable, wanted
from headrace.readers.bounds import bound_on_rows
from headrace.readers.columns import Block, ReportBad
from headrace.readers.parquet_pages import dictionary_bytes
from headrace.readers.raw_file import ByteRange, RawFile
from headrace.readers.reader import FoundColumn, ReadOptions, Split
from headrace.readers.spans import READ_BYTES, Record, RecordOptions, Span, check_unchanged
from headrace.store.fetching import SMALL_BYTES

_FILES_REMEMBERED, _FOOTERS_REMEMBERED = 1024, 64
_MOST_ROWS = 2**15
"""The most rows that are decoded at once."""
_DECODED_BYTES = 32 * 2**20
"""About how many bytes texts from dictionaries may have when they are decoded at once."""
_MOST_DECODED_BYTES, _LEAST_ROWS = 48 * 2**20, 8
"""What they could have if each were as long as the whole dictionary. If less than so many rows fit, the dictionary is
looked at."""
_BUFFER_BYTES = 2**20
_JOINED_BYTES = 8 * 2**20
_MOST_AHEAD_BYTES = 64 * 2**20
"""How much of a row group is fetched while the one before it is read."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8, "BYTE_ARRAY": 4}
"""The bytes of a decoded value, apart from the bytes of a text."""


def plan(raw: RawFile, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    with readable(raw, "Parquet"), open_file(raw) as file:
        names = list(wanted(options)) or file.schema_arrow.names
        if wanted(options):
            check_columns(raw, file.schema_arrow, options)
        sizes = [column_bytes(file.metadata.row_group(group), names) for group in range(file.num_row_groups)]
    return ranges.join(sizes, target_bytes)


def fingerprint(raw: RawFile, start: int, stop: int) -> str:
    """A checksum of the stored bytes of the row groups, and of the schema that gives them their meaning."""
    content = raw.content()
    digest = hasher()
    with readable(raw, "Parquet"), open_file(raw) as file:
        schema = file.schema_arrow.to_string(show_field_metadata=False, show_schema_metadata=False)
        digest.update(schema.encode())
        for group in range(start, stop):
            first, last = extent(file.metadata.row_group(group))
            digest.update(content[first:last])
    result: str = digest.hexdigest()
    return result


def look(raw: RawFile) -> dict[str, FoundColumn]:
    with readable(raw, "Parquet"), open_file(raw) as file:
        return found_columns(file.schema_arrow)


def read(raw: RawFile, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    names = list(wanted(options))
    with readable(raw, "Parquet"), open_file(raw) as file:
        check_columns(raw, file.schema_arrow, options)
        row = sum(file.metadata.row_group(group).num_rows for group in range(start))
        for number in range(start, stop):
            _expect(raw, file, range(number, stop), names)
            group = file.metadata.row_group(number)
            first, last = extent(group)
            # All bytes of the group count as read, including those of unwanted columns.
            bytes_per_row = (last - first) / max(group.num_rows, 1)
            for batch in _batches(raw, file, number, names, options.block_bytes):
                bound = bound_on_rows(options.max_record_bytes, report_bad, functools.partial(int, row))
                for offset, part in row_slices(batch, options.block_bytes, bound):
                    yield _block(part, row + offset, options, bytes_per_row, report_bad)
                row += batch.num_rows


def _batches(raw: RawFile, file: Any, number: int, names: list[str], block_bytes: int) -> Iterator[Any]:
    """The rows of a group, in batches of about `block_bytes` when decoded."""
    group = file.metadata.row_group(number)
    rows = block_bytes * group.num_rows // max(1, decoded_bytes(file, number, names))
    rows = max(1, min(rows, _MOST_ROWS, _rows_of_dictionaries(raw, file, number, names)))
    waiting: list[Any] = []
    size = 0
    for batch in file.iter_batches(rows, row_groups=[number], columns=names, use_threads=False):
        waiting.append(batch)
        size += batch.nbytes
        if size >= block_bytes // 2:
            yield from _joined(waiting)
            waiting, size = [], 0
    yield from _joined(waiting)


def _joined(batches: list[Any]) -> list[Any]:
    if len(batches) <= 1:
        return batches
    joined: list[Any] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


def decoded_bytes(file: Any, number: int, names: list[str]) -> int:
    """About how many bytes the columns of a row group have in memory; encoded numbers can have far fewer."""
    group = file.metadata.row_group(number)
    size = 0
    for place, column in _columns(group, names):
        width = _WIDTHS.get(column.physical_type) or file.schema.column(place).length or 0
        size += max(column.total_uncompressed_size, column.num_values * width)
    return size


def _rows_of_dictionaries(raw: RawFile, file: Any, number: int, names: list[str]) -> int:
    """How many rows can be decoded at once if each has the longest text of its dictionary.

    The size of an encoded column says little: a text that is stored once can be in all rows.
    """
    group = file.metadata.row_group(number)
    columns = [
        column
        for _, column in _columns(group, names)
        if column.physical_type == "BYTE_ARRAY" and _has_dictionary(column)
    ]
    size = sum(column.total_uncompressed_size for column in columns)
    values_per_row = max((-(-column.num_values // max(group.num_rows, 1)) for column in columns), default=1)
    if size * group.num_rows * values_per_row <= _DECODED_BYTES:
        return group.num_rows or 1
    rows = _rows_of_any_text(raw, columns) // values_per_row
    if rows >= _LEAST_ROWS:
        return rows
    leaves = [column.path_in_schema for column in columns]
    with _parquet_file(raw, metadata=file.metadata, read_dictionary=leaves) as encoded:
        # Whatever is read of such a column, its dictionary comes as a whole.
        first = next(encoded.iter_batches(1, row_groups=[number], columns=names, use_threads=False), None)
    found = [(0, 0)] if first is None else [longest_in_dictionaries(column) for column in first.columns]
    longest, fewest = sum(most for most, _ in found), min(count for _, count in found)
    if fewest <= 1:
        # It may be that the dictionary is used only later.
        longest = max(longest, size)
    return int(_DECODED_BYTES // max(1, longest * values_per_row))


def _rows_of_any_text(raw: RawFile, columns: list[Any]) -> int:
    """How many rows can be decoded at once if each had the whole dictionary; 0 if that is not known. It takes no
    decoding, and is enough for most files: writers limit the sizes of dictionaries."""
    content = raw.content()
    sizes = [dictionary_bytes(content, _first_page(column) or 0) for column in columns]
    known = [size for size in sizes if size is not None]
    return _MOST_DECODED_BYTES // max(1, sum(known)) if len(known) == len(sizes) else 0


def _has_dictionary(column: Any) -> bool:
    # Some writers do not say where the dictionary is, so its place proves nothing.
    return any("DICTIONARY" in encoding for encoding in column.encodings)


def _block(part: Any, row: int, options: ReadOptions, bytes_per_row: float, report_bad: ReportBad) -> Block:
    arrays = {name: part.column(part.schema.get_field_index(name)) for name in wanted(options)}
    input_bytes = round(bytes_per_row * part.num_rows)
    return to_block(arrays, options, lambda record: f"row {row + record}", input_bytes, report_bad)


def open_file(raw: RawFile) -> Any:
    return _parquet_file(raw)


def _parquet_file(raw: RawFile, **options: Any) -> Any:
    # A column chunk of a remote file is read a little at a time, as the pages of a mapped one are.
    buffer_bytes = _BUFFER_BYTES if raw.path is None else 0
    return pq.ParquetFile(arrow_file(raw), pre_buffer=False, buffer_size=buffer_bytes, **options)


def _expect(raw: RawFile, file: Any, numbers: Iterable[int], names: list[str]) -> None:
    """Have the columns of the first of these row groups fetched, and those of the next one if they are not large."""
    if raw.path is not None:
        return
    expected: list[ByteRange] = []
    for number in islice(numbers, 2):
        of_group = column_ranges(file.metadata.row_group(number), names)
        is_large = sum(stop - start for start, stop in of_group) > _MOST_AHEAD_BYTES
        if expected and is_large:
            break
        expected += joined_ranges(of_group)
    raw.expect(expected)


def column_ranges(group: Any, names: list[str]) -> list[ByteRange]:
    """Where these columns of a row group are in the file."""
    found = []
    for _, column in _columns(group, names):
        first = _first_page(column)
        if first is not None:
            found.append((first, first + column.total_compressed_size))
    return sorted(found)


def joined_ranges(ascending: list[ByteRange]) -> list[ByteRange]:
    """Small ranges that are near each other as one, which takes one request. A large one is read by itself."""
    joined: list[ByteRange] = []
    for start, stop in ascending:
        begin, end = joined[-1] if joined else (start, start)
        is_near = start - end <= SMALL_BYTES and stop - begin <= _JOINED_BYTES
        if joined and is_near:
            joined[-1] = (begin, max(end, stop))
        else:
            joined.append((start, stop))
    return joined


def column_bytes(group: Any, names: list[str]) -> int:
    return sum(column.total_uncompressed_size for _, column in _columns(group, names))


def _columns(group: Any, names: list[str]) -> Iterator[tuple[int, Any]]:
    """The stored columns that belong to these columns of the table, each with its place."""
    chosen = set(names)
    for place in range(group.num_columns):
        column = group.column(place)
        if column.path_in_schema in chosen or column.path_in_schema.split(".")[0] in chosen:
            yield place, column


def extent(group: Any) -> tuple[int, int]:
    """Where a row group's bytes begin and end in the file."""
    firsts, lasts = [], []
    for number in range(group.num_columns):
        column = group.column(number)
        first = _first_page(column)
        if first is not None:
            firsts.append(first)
            lasts.append(first + column.total_compressed_size)
    return (min(firsts), max(lasts)) if firsts else (0, 0)


def _first_page(column: Any) -> int | None:
    """Where the first page of a column begins; None if it has no pages."""
    # Without a dictionary, writers leave out its offset or write 0.
    offsets = filter(None, (column.dictionary_page_offset, column.data_page_offset))
    return min(offsets, default=None)


def is_whole(raw: RawFile, split: Split) -> bool:
    return False


def span_reader(options: RecordOptions) -> "_ParquetSpanReader":
    return _ParquetSpanReader(options)


class _ParquetSpanReader:
    """A row group belongs to the span that holds its first byte."""

    def __init__(self, options: RecordOptions) -> None:
        self._fields = options.fields
        self._most_bytes = options.max_record_bytes
        self._starts: dict[str, list[int]] = {}
        """Where the row groups of each file begin. If they are large, most spans hold none, and the file need not be
        opened again to find that out."""
        self._footers: dict[str, Any] = {}
        """The metadata of remote files, which need not be fetched again for each of their spans."""

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        name = span.file.path
        if name in self._starts and not self._groups(span):
            return
        raw = check_unchanged(span)
        with readable(raw, "Parquet"), _parquet_file(raw, metadata=self._footers.get(name)) as file:
            if raw.path is None:
                self._remember(name, file.metadata)
            if len(self._starts) >= _FILES_REMEMBERED:
                self._starts.clear()
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            self._starts[name] = [extent(group)[0] for group in groups]
            columns = record_columns(raw, file.schema_arrow.names, self._fields)
            numbers = self._groups(span)
            for place, number in enumerate(numbers):
                _expect(raw, file, numbers[place:], columns)
                row = sum(group.num_rows for group in groups[:number])
                for batch in _batches(raw, file, number, columns, READ_BYTES):
                    bound = bound_on_rows(self._most_bytes, report_bad, functools.partial(int, row))
                    for first, part in row_slices(batch, READ_BYTES, bound):
                        yield to_records(part, columns, functools.partial(int, row + first), report_bad)
                    row += batch.num_rows

    def _remember(self, name: str, metadata: Any) -> None:
        if len(self._footers) >= _FOOTERS_REMEMBERED:
            self._footers.clear()
        self._footers[name] = metadata

    def _groups(self, span: Span) -> list[int]:
        starts = self._starts[span.file.path]
        return [number for number, start in enumerate(starts) if span.start <= start < span.stop]
