"""NumPy's .npy files: each row of the first dimension is a record, and a range is a number of rows.

A plain array becomes one field, `data`; an array with a structured dtype becomes one field for each column.
"""

import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FieldError, FormatError, SettingsError
from headrace.format.checksum import hasher
from headrace.format.fields import DTYPES, Field, FieldKind
from headrace.readers import numbers, ranges
from headrace.readers.bounds import too_long
from headrace.readers.columns import Block, ReportBad
from headrace.readers.reader import FoundColumn, ReadOptions, Split, choose_columns, widening
from headrace.readers.spans import READ_BYTES, Record, RecordOptions, Span, check_unchanged
from headrace.store.files import read_head

COLUMN = "data"


def plan(path: Path, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    array = _open(path)
    if options.fields or options.text_field is not None:
        _check_fields(path, array, options)
    step = max(1, target_bytes // _row_bytes(array))
    return [(first, min(first + step, len(array))) for first in range(0, len(array), step)] or [(0, 0)]


def fingerprint(path: Path, start: int, stop: int) -> str:
    array = _open(path)
    digest = hasher()
    digest.update(f"{array.dtype.descr} {array.shape[1:]}".encode())
    digest.update(array[start:stop].reshape(-1).view(np.uint8))
    result: str = digest.hexdigest()
    return result


def look(path: Path) -> dict[str, FoundColumn]:
    return {name: _found(name, column) for name, column in _columns(_open(path)).items()}


def read(path: Path, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    array = _open(path)
    _check_fields(path, array, options)
    row_bytes = _row_bytes(array)
    step = max(1, options.block_bytes // row_bytes)
    if row_bytes > options.max_record_bytes:
        _report_all(start, stop, row_bytes, options.max_record_bytes, report_bad)
        return
    for first in range(start, stop, step):
        rows = array[first : min(first + step, stop)]
        yield _block(rows, first, options, row_bytes * len(rows), report_bad)


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


def _open(path: Path) -> NDArray[Any]:
    ranges.file_size(path)
    if read_head(path, 2)[0] == b"PK":
        raise FormatError(
            f"{path}: is a zip of arrays (.npz); save each array with np.save, and give those files"
        )
    try:
        # Not np.load, which treats any unknown content as a pickle.
        array = np.lib.format.open_memmap(path, mode="r")
    except (
        ValueError,
        EOFError,
        OSError,
        SyntaxError,
        TypeError,
        OverflowError,
        tokenize.TokenError,
    ) as error:
        if "Python objects" in str(error):
            raise SettingsError(
                f"{path}: holds an array of Python objects, which cannot be read; save it with a numeric dtype"
            ) from error
        raise FormatError(
            f"{path}: not a complete .npy file: {str(error).splitlines()[0]}. "
            "Check that it was written and copied completely"
        ) from error
    if array.ndim == 0:
        raise SettingsError(
            f"{path}: holds a single number, not an array of records; save an array of at least one dimension"
        )
    if not array.flags.c_contiguous:
        raise SettingsError(
            f"{path}: the array is in Fortran order, so its records are not contiguous; "
            "save np.ascontiguousarray(array)"
        )
    # A plain view: slices of np.memmap are slow to make.
    return array.view(np.ndarray)


def _columns(array: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {name: array[name] for name in array.dtype.names} if array.dtype.names else {COLUMN: array}


def _row_bytes(array: NDArray[Any]) -> int:
    return max(1, array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64)))


def _found(name: str, column: NDArray[Any]) -> FoundColumn:
    if column.dtype.kind not in "biufc" or column.dtype.name not in DTYPES:
        return FoundColumn(
            problem=f"{name!r} has dtype {column.dtype}, which no field can hold; "
            f"fields can have the dtypes {', '.join(DTYPES)}. "
            "Convert it first, or leave it out by naming the columns to keep with columns="
        )
    return FoundColumn(widening(Field(FieldKind.FIXED, column.dtype.name, column.shape[1:])))


def _check_fields(path: Path, array: NDArray[Any], options: ReadOptions) -> None:
    columns = _columns(array)
    there = ", ".join(columns)
    if options.text_field is not None:
        raise FieldError(
            f"{path}: a .npy file holds numbers, not text (its columns are: {there}); "
            f"leave text_field= out, or give files that hold text"
        )
    for name, field in options.fields.items():
        if name not in columns:
            raise FieldError(
                f"{path}: no column {name!r}; the columns are: {there}. Name these with columns="
            )
        column = _found(name, columns[name])
        if column.problem:
            raise SettingsError(f"{path}: {column.problem}")
        found = column.fields[0]
        same_shape = field.kind is FieldKind.FIXED and field.shape == found.shape
        loses_imaginary_part = columns[name].dtype.kind == "c" and field.numpy_dtype.kind != "c"
        if not same_shape or loses_imaginary_part:
            raise FieldError(
                f"{path}: {name!r} is {found.notation}, which cannot become {field.notation}; "
                "choose a matching type with columns="
            )


def is_whole(path: Path, split: Split) -> bool:
    return False


def span_reader(options: RecordOptions) -> "_NpySpanReader":
    return _NpySpanReader(options)


class _NpySpanReader:
    """A record is a dict of NumPy values, one for each column. It belongs to the span that holds its first byte."""

    def __init__(self, options: RecordOptions) -> None:
        self._fields = options.fields
        self._most_bytes = options.max_record_bytes

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        path = check_unchanged(span.file)
        array = _open(path)
        columns = {name: _columns(array)[name] for name in self._chosen(path, array)}
        row_bytes, begins = _row_bytes(array), _data_begins(path)
        # Rows of zero bytes have no first byte; they count as one byte each, following the header.
        first = _rows_before(span.start - begins, row_bytes, len(array))
        last = _rows_before(span.stop - begins, row_bytes, len(array))
        if span.stop == span.file.bytes:
            last = len(array)
        step = max(1, READ_BYTES // row_bytes)
        if row_bytes > self._most_bytes:
            _report_all(first, last, row_bytes, self._most_bytes, report_bad)
            return
        for begin in range(first, last, step):
            end = min(begin + step, last)
            # Copies, because a record that is kept must not keep the file mapped, and may be changed.
            copies = {name: column[begin:end].copy() for name, column in columns.items()}
            yield [{name: values[row] for name, values in copies.items()} for row in range(end - begin)]

    def _chosen(self, path: Path, array: NDArray[Any]) -> list[str]:
        return choose_columns(path, list(_columns(array)), self._fields or ())


def _data_begins(path: Path) -> int:
    with open(path, "rb") as file:
        if np.lib.format.read_magic(file) == (1, 0):
            np.lib.format.read_array_header_1_0(file)
        else:
            np.lib.format.read_array_header_2_0(file)
        return file.tell()


def _rows_before(byte: int, row_bytes: int, count: int) -> int:
    """How many rows begin before a byte, which is counted from the start of the first row."""
    return min(max(0, -(-byte // row_bytes)), count)
