"""Arrow files: the file format, a range being some record batches, and the stream format, one range."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from penstock.errors import SettingsError
from penstock.format.checksum import hasher
from penstock.format.fields import Field
from penstock.ingest.columns import Block, ReportBad
from penstock.ingest.readers import ranges
from penstock.ingest.readers.arrow_columns import row_slices, to_block
from penstock.ingest.readers.arrow_types import check_columns, infer_fields, readable, wanted
from penstock.ingest.readers.reader import ReadOptions
from penstock.store.local import read_head


def plan(path: Path, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    with readable(path, "Arrow"):
        footer = _has_footer(path)
        reader = _open_file(path) if footer else _open_stream(path)
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
        reader = _open_file(path)
        digest.update(reader.schema.to_string(show_field_metadata=False, show_schema_metadata=False).encode())
        for number in range(start, stop):
            batch = reader.get_batch(number)
            digest.update(b"batch %d" % batch.num_rows)
            for column in batch.columns:
                _update(digest, column)
    result: str = digest.hexdigest()
    return result


def infer(path: Path) -> dict[str, Field]:
    with readable(path, "Arrow"):
        reader = _open_file(path) if _has_footer(path) else _open_stream(path)
        return infer_fields(path, reader.schema)


def read(path: Path, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    with readable(path, "Arrow"):
        footer = _has_footer(path)
        whole = _open_file(path) if footer else _open_stream(path)
        columns = check_columns(path, whole.schema, options)
        reader = _open_file(path, columns) if footer else _open_stream(path, columns)
        batches = (reader.get_batch(number) for number in range(start, stop)) if footer else iter(reader)
        bytes_per_batch = ranges.file_size(path) / max(reader.num_record_batches, 1) if footer else 0.0
        # Asked for only when a message names a row: a compressed column would be decompressed to count it.
        rows_before = functools.cache(
            lambda: sum(reader.get_batch(n).num_rows for n in range(start)) if footer else 0
        )
        row = 0
        for batch in batches:
            _check_values(batch)
            # In a stream nobody knows how many batches follow: count what was read of the columns.
            input_bytes = bytes_per_batch or batch.nbytes
            for first, part in row_slices(batch, options.block_bytes):
                share = round(input_bytes * part.num_rows / batch.num_rows)
                yield _block(part, row + first, rows_before, options, share, report_bad)
            row += batch.num_rows


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


def _open_file(path: Path, columns: list[int] | None = None) -> Any:
    return pa.ipc.open_file(pa.memory_map(str(path)), options=_options(columns))


def _open_stream(path: Path, columns: list[int] | None = None) -> Any:
    return pa.ipc.open_stream(pa.memory_map(str(path)), options=_options(columns))


def _options(columns: list[int] | None) -> Any:
    return pa.ipc.IpcReadOptions(included_fields=columns, use_threads=False)


def _check_values(batch: Any) -> None:
    """Refuse offsets that point outside their buffer: we would read wild memory."""
    as_bytes = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
    for column in batch.columns:
        name = as_bytes.get(str(column.type))
        # Bad UTF-8 is for the record to answer for, not the file.
        (column if name is None else column.cast(getattr(pa, name)())).validate(full=True)


def _update(digest: Any, array: Any) -> None:
    for buffer in array.buffers():
        digest.update(b"none" if buffer is None else b"%d" % buffer.size)
        digest.update(buffer or b"")
    for dictionary in _dictionaries(array):
        _update(digest, dictionary)


def _dictionaries(array: Any) -> Iterator[Any]:
    """The dictionaries of an array and its children: they are not among its buffers."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        yield from _dictionaries(array.storage)
    elif pa.types.is_dictionary(kind):
        yield array.dictionary
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            yield from _dictionaries(array.field(number))
    elif pa.types.is_map(kind):
        yield from _dictionaries(array.keys)
        yield from _dictionaries(array.items)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _dictionaries(array.values)
