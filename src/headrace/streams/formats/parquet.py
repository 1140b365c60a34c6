"""Parquet: a row group belongs to the block in which its first byte lies, so whoever opens a file can tell its own.

Row groups are decoded some rows at a time, and only the columns that are wanted.
"""

from collections.abc import Iterator
from typing import Any

from headrace.errors import FieldError
from headrace.readers.arrow_columns import rows_for
from headrace.readers.arrow_types import readable
from headrace.readers.columns import ReportBad
from headrace.readers.parquet import column_bytes, extent, open_file
from headrace.readers.reader import choose_columns
from headrace.streams.blocks import Block
from headrace.streams.formats.reader import Record, check_unchanged
from headrace.streams.settings import StreamSettings

_BYTES_AT_ONCE = 2**20
_FILES_REMEMBERED = 1024


class Reader:
    def __init__(self, settings: StreamSettings) -> None:
        self._fields = settings.fields
        self._starts: dict[str, list[int]] = {}
        """Where the row groups begin, by file: most blocks of a file with large ones hold none, and are told so
        without opening it again."""

    def read(self, block: Block, report_bad: ReportBad) -> Iterator[list[Record]]:
        name = block.file.path
        if name in self._starts and not self._groups(block):
            return
        path = check_unchanged(block.file)
        with readable(path, "Parquet"), open_file(path) as file:
            if len(self._starts) >= _FILES_REMEMBERED:
                self._starts.clear()
            metadata = file.metadata
            self._starts[name] = [
                extent(metadata.row_group(group))[0] for group in range(metadata.num_row_groups)
            ]
            columns = choose_columns(path, file.schema_arrow.names, self._fields or ())
            if len(set(columns)) < len(columns):
                raise FieldError(
                    f"{path}: several columns have one name: {', '.join(columns)}; choose with fields="
                )
            for group in self._groups(block):
                yield from _row_group(file, group, columns, report_bad)

    def _groups(self, block: Block) -> list[int]:
        return [
            group
            for group, start in enumerate(self._starts[block.file.path])
            if block.cut <= start < block.limit
        ]


def _row_group(file: Any, number: int, columns: list[str], report_bad: ReportBad) -> Iterator[list[Record]]:
    group = file.metadata.row_group(number)
    rows = rows_for(group.num_rows, column_bytes(group, columns), _BYTES_AT_ONCE)
    row = 0
    for batch in file.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False):
        chosen = batch.select(columns)
        try:
            records = chosen.to_pylist()
        except UnicodeDecodeError:
            records = list(_row_by_row(chosen, f"row group {number}, row", row, report_bad))
        yield records
        row += batch.num_rows


def _row_by_row(batch: Any, where: str, first: int, report_bad: ReportBad) -> Iterator[Record]:
    for row in range(batch.num_rows):
        try:
            yield batch.slice(row, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            report_bad(f"{where} {first + row}", f"not UTF-8: {error.reason}")
