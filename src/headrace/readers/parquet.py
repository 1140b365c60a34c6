"""Parquet files; a range is a number of row groups."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from headrace.format.checksum import hasher
from headrace.readers import ranges
from headrace.readers.arrow_columns import record_columns, row_slices, rows_for, to_block, to_records
from headrace.readers.arrow_types import check_columns, found_columns, readable, wanted
from headrace.readers.columns import Block, ReportBad
from headrace.readers.reader import FoundColumn, ReadOptions, Split
from headrace.readers.spans import READ_BYTES, Record, RecordOptions, Span, check_unchanged

_FILES_REMEMBERED = 1024


def plan(path: Path, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    with readable(path, "Parquet"), open_file(path) as file:
        names = list(wanted(options)) or file.schema_arrow.names
        if wanted(options):
            check_columns(path, file.schema_arrow, options)
        sizes = [column_bytes(file.metadata.row_group(group), names) for group in range(file.num_row_groups)]
    return ranges.join(sizes, target_bytes)


def fingerprint(path: Path, start: int, stop: int) -> str:
    """A checksum of the stored bytes of the row groups, and of the schema that gives them their meaning."""
    content = ranges.mapped(path)
    digest = hasher()
    with readable(path, "Parquet"), open_file(path) as file:
        schema = file.schema_arrow.to_string(show_field_metadata=False, show_schema_metadata=False)
        digest.update(schema.encode())
        for group in range(start, stop):
            first, last = extent(file.metadata.row_group(group))
            digest.update(content[first:last])
    result: str = digest.hexdigest()
    return result


def look(path: Path) -> dict[str, FoundColumn]:
    with readable(path, "Parquet"), open_file(path) as file:
        return found_columns(file.schema_arrow)


def read(path: Path, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    names = list(wanted(options))
    with readable(path, "Parquet"), open_file(path) as file:
        check_columns(path, file.schema_arrow, options)
        row = sum(file.metadata.row_group(group).num_rows for group in range(start))
        for number in range(start, stop):
            group = file.metadata.row_group(number)
            first, last = extent(group)
            # All bytes of the group count as read, including those of unwanted columns.
            bytes_per_row = (last - first) / max(group.num_rows, 1)
            rows = rows_for(group.num_rows, column_bytes(group, names), options.block_bytes)
            for batch in file.iter_batches(rows, row_groups=[number], columns=names, use_threads=False):
                for offset, part in row_slices(batch, options.block_bytes):
                    yield _block(part, row + offset, options, bytes_per_row, report_bad)
                row += batch.num_rows


def _block(part: Any, row: int, options: ReadOptions, bytes_per_row: float, report_bad: ReportBad) -> Block:
    arrays = {name: part.column(part.schema.get_field_index(name)) for name in wanted(options)}
    input_bytes = round(bytes_per_row * part.num_rows)
    return to_block(arrays, options, lambda record: f"row {row + record}", input_bytes, report_bad)


def open_file(path: Path) -> Any:
    ranges.file_size(path)
    return pq.ParquetFile(path, memory_map=True, pre_buffer=False)


def column_bytes(group: Any, names: list[str]) -> int:
    columns = [group.column(number) for number in range(group.num_columns)]
    chosen = set(names)
    return sum(
        column.total_uncompressed_size
        for column in columns
        if column.path_in_schema in chosen or column.path_in_schema.split(".")[0] in chosen
    )


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


def is_whole(path: Path, split: Split) -> bool:
    return False


def span_reader(options: RecordOptions) -> "_ParquetSpanReader":
    return _ParquetSpanReader(options)


class _ParquetSpanReader:
    """A row group belongs to the span that holds its first byte."""

    def __init__(self, options: RecordOptions) -> None:
        self._fields = options.fields
        self._starts: dict[str, list[int]] = {}
        """Where the row groups of each file begin. If they are large, most spans hold none, and the file need not be
        opened again to find that out."""

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        name = span.file.path
        if name in self._starts and not self._groups(span):
            return
        path = check_unchanged(span.file)
        with readable(path, "Parquet"), open_file(path) as file:
            if len(self._starts) >= _FILES_REMEMBERED:
                self._starts.clear()
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            self._starts[name] = [extent(group)[0] for group in groups]
            columns = record_columns(path, file.schema_arrow.names, self._fields)
            for number in self._groups(span):
                row = sum(group.num_rows for group in groups[:number])
                rows = rows_for(groups[number].num_rows, column_bytes(groups[number], columns), READ_BYTES)
                for batch in file.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False):
                    yield to_records(batch, columns, functools.partial(int, row), report_bad)
                    row += batch.num_rows

    def _groups(self, span: Span) -> list[int]:
        starts = self._starts[span.file.path]
        return [number for number, start in enumerate(starts) if span.start <= start < span.stop]
