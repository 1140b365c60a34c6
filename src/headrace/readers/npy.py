"""NumPy's .npy files: each row of the first dimension is a record, and a range is a number of rows.

A plain array becomes one field, `data`; an array with a structured dtype becomes one field for each column.
"""

import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FieldError, FormatError, HeadraceError, SettingsError
from headrace.format.checksum import hasher
from headrace.format.fields import DTYPES, Field, FieldKind
from headrace.readers import numbers
from headrace.readers.bounds import too_long
from headrace.readers.columns import Block, ReportBad
from headrace.readers.raw_file import ByteRange, Content, RawFile
from headrace.readers.reader import FoundColumn, ReadOptions, Split, choose_columns, widening
from headrace.readers.spans import READ_BYTES, Record, RecordOptions, Span, check_unchanged

COLUMN = "data"
_FILES_REMEMBERED = 1024
_HEAD_BYTES = 2**16
"""NumPy reads no longer headers by itself, since a hostile one could crash Python's parser."""


@dataclass(frozen=True, eq=False)
class _Layout:
    """What the header of a file says about its array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begins: int
    """Where the first row begins in the file."""

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Rows of zero bytes count as one byte each."""
        return max(1, self._stored_bytes)

    @property
    def _stored_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns, without rows: their dtypes and shapes."""
        return _columns(np.empty((0, *self.shape[1:]), self.dtype))

    def byte_range(self, start: int, stop: int) -> ByteRange:
        """Where some rows are in the file."""
        return self.begins + start * self._stored_bytes, self.begins + stop * self._stored_bytes

    def rows(self, content: Content, start: int, stop: int) -> NDArray[Any]:
        """Some rows of the array in this file."""
        first, last = self.byte_range(start, stop)
        shape = (stop - start, *self.shape[1:])
        if first == last:
            return np.empty(shape, self.dtype)
        found: NDArray[Any] = content[first:last].view(self.dtype).reshape(shape)
        return found


def plan(raw: RawFile, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    array = _open(raw)
    if options.fields or options.text_field is not None:
        _check_fields(raw, array, options)
    step = max(1, target_bytes // array.row_bytes)
    return [(first, min(first + step, len(array))) for first in range(0, len(array), step)] or [(0, 0)]


def fingerprint(raw: RawFile, start: int, stop: int) -> str:
    array = _open(raw)
    rows = array.rows(raw.content(), start, stop)
    digest = hasher()
    digest.update(f"{array.dtype.descr} {array.shape[1:]}".encode())
    digest.update(rows.reshape(-1).view(np.uint8))
    result: str = digest.hexdigest()
    return result


def look(raw: RawFile) -> dict[str, FoundColumn]:
    return {name: _found(name, column) for name, column in _open(raw).columns.items()}


def read(raw: RawFile, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    array = _open(raw)
    _check_fields(raw, array, options)
    step = max(1, options.block_bytes // array.row_bytes)
    if array.row_bytes > options.max_record_bytes:
        _report_all(start, stop, array.row_bytes, options.max_record_bytes, report_bad)
        return
    raw.expect([array.byte_range(start, stop)])
    content = raw.content()
    for first in range(start, stop, step):
        rows = array.rows(content, first, min(first + step, stop))
        yield _block(rows, first, options, array.row_bytes * len(rows), report_bad)


def _report_all(start: int, stop: int, row_bytes: int, most: int, report_bad: ReportBad) -> None:
    for row in range(start, stop):
        report_bad(f"row {row}", too_long(row_bytes, most))


def _block(
    rows: NDArray[Any], first: int, options: ReadOptions, input_bytes: int, report_bad: ReportBad
) -> Block:
    columns = _columns(rows)
    converted = {}
    problems: dict[int, str] = {}
    for name, field in options.fields.items():
        values = columns[name]
        converted[name], bad = numbers.cast(values, field.numpy_dtype)
        if bad is not None:
            # A record is bad if any of its values is bad; the first one is reported.
            for row, value in zip(*_first_bad(values, bad), strict=True):
                problems.setdefault(row, numbers.misfit(name, value, field.numpy_dtype))
    if not problems:
        return Block(converted, lambda record: f"row {first + record}", input_bytes)
    for row in sorted(problems):
        report_bad(f"row {first + row}", problems[row])
    kept = np.setdiff1d(np.arange(len(rows)), list(problems))
    columns_kept = {name: column[kept] for name, column in converted.items()}
    return Block(columns_kept, lambda record: f"row {first + kept[record]}", input_bytes)


def _first_bad(values: NDArray[Any], bad: NDArray[np.bool_]) -> tuple[list[int], list[Any]]:
    flat = bad.reshape(len(bad), -1)
    rows = np.flatnonzero(flat.any(axis=1))
    return rows.tolist(), list(values.reshape(len(bad), -1)[rows, flat[rows].argmax(axis=1)])


def _open(raw: RawFile) -> _Layout:
    size = raw.size()
    with raw.reading() as content:
        head = content[:_HEAD_BYTES].tobytes()
    if head.startswith(b"PK"):
        raise FormatError(
            f"{raw}: is a zip of arrays (.npz); save each array with np.save, and give those files"
        )
    try:
        # Not np.load, which treats any unknown content as a pickle.
        shape, in_fortran_order, dtype, begins = _read_header(head)
        if dtype.hasobject:
            raise SettingsError(
                f"{raw}: holds an array of Python objects, which cannot be read; save it with a numeric dtype"
            )
        end = begins + dtype.itemsize * int(np.prod([int(count) for count in shape], dtype=object))
        if end > size:
            raise EOFError(f"it should have {end:,} bytes, but has {size:,}")
    except (
        ValueError,
        EOFError,
        OSError,
        SyntaxError,
        TypeError,
        OverflowError,
        tokenize.TokenError,
    ) as error:
        if isinstance(error, HeadraceError):
            raise
        raise FormatError(
            f"{raw}: not a complete .npy file: {str(error).splitlines()[0]}. "
            "Check that it was written and copied completely"
        ) from error
    if not shape:
        raise SettingsError(
            f"{raw}: holds a single number, not an array of records; save an array of at least one dimension"
        )
    has_several_dimensions = sum(count != 1 for count in shape) > 1 and 0 not in shape
    if in_fortran_order and has_several_dimensions:
        raise SettingsError(
            f"{raw}: the array is in Fortran order, so its records are not contiguous; "
            "save np.ascontiguousarray(array)"
        )
    return _Layout(dtype, shape, begins)


def _read_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """The shape, whether it is in Fortran order, the dtype, and where the first row begins."""
    file = io.BytesIO(head)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return *np.lib.format.read_array_header_1_0(file), file.tell()
    if version == (3, 0):
        # Like version 2, but in UTF-8, for which NumPy has no function. Python's escapes mean the same in both.
        count = int.from_bytes(file.read(4), "little")
        escaped = file.read(count).decode().encode("ascii", "backslashreplace")
        as_version_2 = io.BytesIO(len(escaped).to_bytes(4, "little") + escaped)
        return *np.lib.format.read_array_header_2_0(as_version_2), file.tell()
    return *np.lib.format.read_array_header_2_0(file), file.tell()


def _columns(array: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {name: array[name] for name in array.dtype.names} if array.dtype.names else {COLUMN: array}


def _found(name: str, column: NDArray[Any]) -> FoundColumn:
    if column.dtype.kind not in "biufc" or column.dtype.name not in DTYPES:
        return FoundColumn(
            problem=f"{name!r} has dtype {column.dtype}, which no field can hold; "
            f"fields can have the dtypes {', '.join(DTYPES)}. "
            "Convert it first, or leave it out by naming the columns to keep with columns="
        )
    return FoundColumn(widening(Field(FieldKind.FIXED, column.dtype.name, column.shape[1:])))


def _check_fields(raw: RawFile, array: _Layout, options: ReadOptions) -> None:
    columns = array.columns
    there = ", ".join(columns)
    if options.text_field is not None:
        raise FieldError(
            f"{raw}: a .npy file holds numbers, not text (its columns are: {there}); "
            f"leave text_field= out, or give files that hold text"
        )
    for name, field in options.fields.items():
        if name not in columns:
            raise FieldError(f"{raw}: no column {name!r}; the columns are: {there}. Name these with columns=")
        column = _found(name, columns[name])
        if column.problem:
            raise SettingsError(f"{raw}: {column.problem}")
        found = column.fields[0]
        same_shape = field.kind is FieldKind.FIXED and field.shape == found.shape
        loses_imaginary_part = columns[name].dtype.kind == "c" and field.numpy_dtype.kind != "c"
        if not same_shape or loses_imaginary_part:
            raise FieldError(
                f"{raw}: {name!r} is {found.notation}, which cannot become {field.notation}; "
                "choose a matching type with columns="
            )


def is_whole(raw: RawFile, split: Split) -> bool:
    return False


def span_reader(options: RecordOptions) -> "_NpySpanReader":
    return _NpySpanReader(options)


class _NpySpanReader:
    """A record is a dict of NumPy values, one for each column. It belongs to the span that holds its first byte."""

    def __init__(self, options: RecordOptions) -> None:
        self._fields = options.fields
        self._most_bytes = options.max_record_bytes
        self._layouts: dict[str, _Layout] = {}
        """Those of remote files: their headers need not be fetched again for each of their spans."""

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        raw = check_unchanged(span)
        array = self._layout(span)
        chosen = choose_columns(raw, list(array.columns), self._fields or ())
        # Rows of zero bytes have no first byte; they count as one byte each, following the header.
        first = _rows_before(span.start - array.begins, array.row_bytes, len(array))
        last = _rows_before(span.stop - array.begins, array.row_bytes, len(array))
        if span.stop == span.file.bytes:
            last = len(array)
        step = max(1, READ_BYTES // array.row_bytes)
        if array.row_bytes > self._most_bytes:
            _report_all(first, last, array.row_bytes, self._most_bytes, report_bad)
            return
        content = raw.content()
        for begin in range(first, last, step):
            end = min(begin + step, last)
            columns = _columns(array.rows(content, begin, end))
            # Copies, because a record that is kept must not keep the file mapped, and may be changed.
            copies = {name: columns[name].copy() for name in chosen}
            yield [{name: values[row] for name, values in copies.items()} for row in range(end - begin)]

    def _layout(self, span: Span) -> _Layout:
        known = self._layouts.get(span.file.path)
        if known is not None:
            return known
        found = _open(span.raw)
        if span.file.is_remote:
            if len(self._layouts) >= _FILES_REMEMBERED:
                self._layouts.clear()
            self._layouts[span.file.path] = found
        return found


def _rows_before(byte: int, row_bytes: int, count: int) -> int:
    """How many rows begin before a byte, which is counted from the start of the first row."""
    return min(max(0, -(-byte // row_bytes)), count)
