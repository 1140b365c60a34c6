"""Arrow arrays as the columns of a block, which the JSONL, CSV, Parquet and Arrow readers have in common.

Strings and plain numbers are handed over without a copy. A record with a value that its field cannot hold is
reported and left out: the arrays are converted once to find such records, and if there are any, the arrays are filtered
and converted again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.errors import FieldError
from headrace.format.fields import Field, FieldKind
from headrace.format.ragged import Ragged
from headrace.format.shard import Column
from headrace.readers import numbers
from headrace.readers.arrow_types import is_bytes, plain_type, wanted
from headrace.readers.columns import Block, ReportBad, Texts
from headrace.readers.raw_file import RawFile
from headrace.readers.reader import ReadOptions, choose_columns
from headrace.readers.remedies import remedy_for_missing

Problems = dict[int, str]
"""What is wrong with each bad record, by its row in the arrays."""
NullReason = Callable[[str, int], str]


def to_block(
    arrays: Mapping[str, Any],
    options: ReadOptions,
    locate: Callable[[int], str],
    input_bytes: int,
    report_bad: ReportBad,
    null_reason: NullReason | None = None,
    known_problems: Problems | None = None,
) -> Block:
    """One block from one Arrow array for each column. Rows with bad values, and those with `known_problems`, are
    reported and left out."""

    def is_null(name: str, row: int) -> str:
        return f"{name!r} is null{remedy_for_missing(options, name)}"

    null_reason = null_reason or is_null
    plain = {name: _plain_array(arrays[name]) for name in wanted(options)}
    columns, problems = _convert(plain, options, null_reason)
    problems |= known_problems or {}
    if not problems:
        return Block(columns, locate, input_bytes)
    for row in sorted(problems):
        report_bad(locate(row), problems[row])
    keep = np.ones(len(next(iter(plain.values()))), dtype=bool)
    keep[list(problems)] = False
    mask = pa.array(keep)
    filtered = {name: array.filter(mask) for name, array in plain.items()}
    columns, _ = _convert(filtered, options, null_reason)
    rows: NDArray[np.int64] = np.flatnonzero(keep)
    return Block(columns, lambda record: locate(int(rows[record])), input_bytes)


def _convert(
    arrays: Mapping[str, Any], options: ReadOptions, null_reason: NullReason
) -> tuple[dict[str, Column | Texts], Problems]:
    columns: dict[str, Column | Texts] = {}
    problems: Problems = {}
    for name, field in wanted(options).items():
        array = arrays[name]
        if field.kind is FieldKind.BYTES:
            columns[name] = _texts(name, array, problems, null_reason)
            if options.text_field is not None:
                _check_utf8(array, columns[name], problems)
        else:
            columns[name] = _numbers(name, field, array, problems, null_reason)
    return columns, problems


def _texts(name: str, array: Any, problems: Problems, null_reason: NullReason) -> Texts:
    for row in _null_rows(array):
        problems.setdefault(row, null_reason(name, row))
    _, offsets_buffer, data_buffer = array.buffers()
    if len(array) == 0 or offsets_buffer is None:
        empty = np.zeros(0, np.int64)
        return Texts(np.zeros(0, np.uint8), empty, empty)
    width = np.int64 if pa.types.is_large_binary(array.type) else np.int32
    bounds = np.frombuffer(offsets_buffer, dtype=width)[array.offset : array.offset + len(array) + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    data = np.zeros(0, np.uint8)
    if last > first:
        data = np.frombuffer(data_buffer, dtype=np.uint8)[first:last]
    offsets = bounds.astype(np.int64) - first
    return Texts(data, offsets[:-1], offsets[1:])


def _check_utf8(array: Any, texts: Any, problems: Problems) -> None:
    # One fast check of all strings; only if it fails is each string checked.
    text_type = pa.large_string() if pa.types.is_large_binary(array.type) else pa.string()
    try:
        array.view(text_type).validate(full=True)
    except pa.ArrowInvalid:
        for row in range(len(texts)):
            if row in problems:
                continue
            try:
                texts[row].decode()
            except UnicodeDecodeError as error:
                problems[row] = f"not UTF-8: {error.reason} (byte {error.start} of the text)"


def _numbers(name: str, field: Field, array: Any, problems: Problems, null_reason: NullReason) -> Column:
    """Fixed and ragged columns: unwrap the lists level by level, then convert the numbers inside."""
    nested = _Nested(name, field, len(array), problems, null_reason)
    leaves = nested.unwrap(array)
    converted = nested.convert(leaves)
    if problems:
        return converted  # perhaps of the wrong shape: the caller converts again without the bad rows
    if field.kind is FieldKind.FIXED:
        return converted.reshape(nested.rows, *field.shape)
    offsets = np.zeros(nested.rows + 1, dtype=np.int64)
    np.cumsum(nested.levels[0], out=offsets[1:])
    return Ragged(converted.reshape(int(offsets[-1]), *field.shape), offsets)


class _Nested:
    """Turns nested lists of numbers into one array. Rows that do not fit are recorded in `problems`."""

    def __init__(
        self, name: str, field: Field, rows: int, problems: Problems, null_reason: NullReason
    ) -> None:
        self._name, self._field, self.rows = name, field, rows
        self._problems, self._null_reason = problems, null_reason
        self.levels: list[NDArray[Any]] = []
        """The lengths of the lists, level by level, the outermost first."""

    def unwrap(self, array: Any) -> Any:
        """The values inside all lists, end to end."""
        first: list[int | None] = [None] if self._field.kind is FieldKind.RAGGED else []
        for size in [*first, *self._field.shape]:
            self._mark_nulls(np.array(_null_rows(array), dtype=np.int64))
            lengths = _lengths(array)
            if size is not None:
                self._mark_wrong_lengths(lengths, size)
            self.levels.append(lengths)
            array = array.flatten()  # leaves out null lists, as the lengths do
        return array

    def convert(self, array: Any) -> NDArray[Any]:
        dtype = self._field.numpy_dtype
        values, nulls = _leaves(array)
        converted, bad = numbers.cast(values, dtype)
        if bad is not None:
            misfits = np.flatnonzero(bad if nulls is None else bad & ~nulls)
            self._mark(misfits, lambda element: numbers.misfit(self._name, values[element], dtype))
        if nulls is None:
            return converted
        if dtype.kind in "fc":
            return np.where(nulls, dtype.type(np.nan), converted).astype(dtype, copy=False)
        self._mark_nulls(np.flatnonzero(nulls))
        return converted

    def _mark_nulls(self, elements: NDArray[Any]) -> None:
        if self.levels:
            self._mark(elements, lambda element: f"{self._name!r} holds a null inside a list")
        else:
            self._mark(elements, lambda element: self._null_reason(self._name, element))

    def _mark_wrong_lengths(self, lengths: NDArray[Any], size: int) -> None:
        def reason(element: int) -> str:
            found, notation = lengths[element], self._field.notation
            return f"{self._name!r} holds a list of length {found}, but {notation} needs length {size}"

        self._mark(np.flatnonzero(lengths != size), reason)

    def _mark(self, elements: NDArray[Any], reason: Callable[[int], str]) -> None:
        """Record a problem for the rows that hold these elements, which are those of the innermost level so far."""
        if not len(elements):
            return
        owners = np.arange(self.rows)
        for lengths in self.levels:
            owners = np.repeat(owners, lengths)
        for element in elements.tolist():
            self._problems.setdefault(int(owners[element]), reason(element))


def _leaves(array: Any) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    nulls = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.float64), np.ones(len(array), dtype=bool)
    if pa.types.is_boolean(array.type):
        return (array if nulls is None else array.fill_null(False)).to_numpy(zero_copy_only=False), nulls
    dtype = np.dtype(array.type.to_pandas_dtype())
    buffer = array.buffers()[1]
    if len(array) == 0 or buffer is None:
        return np.zeros(len(array), dtype), nulls
    return np.frombuffer(buffer, dtype=dtype, count=len(array), offset=array.offset * dtype.itemsize), nulls


def _lengths(array: Any) -> NDArray[np.int64]:
    if len(array) == 0:
        return np.zeros(0, np.int64)
    if pa.types.is_fixed_size_list(array.type):
        lengths = np.full(len(array), array.type.list_size, dtype=np.int64)
    else:
        width = np.int64 if pa.types.is_large_list(array.type) else np.int32
        bounds = np.frombuffer(array.buffers()[1], dtype=width)[array.offset : array.offset + len(array) + 1]
        lengths = np.diff(bounds).astype(np.int64)
    lengths[_null_rows(array)] = 0
    return lengths


def _null_rows(array: Any) -> list[int]:
    if not array.null_count:
        return []
    rows: list[int] = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist()
    return rows


def _plain_array(array: Any) -> Any:
    """The array as numbers, lists, binary or large_binary."""
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    kind = plain_type(array.type)
    if is_bytes(kind):
        if pa.types.is_string(array.type):
            return array.view(pa.binary())
        if pa.types.is_large_string(array.type):
            return array.view(pa.large_binary())
        if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
            return array
        if "string" in str(kind):
            return array.cast(pa.large_string()).view(pa.large_binary())
        return array.cast(kind).cast(pa.large_binary())
    return array.cast(kind) if pa.types.is_dictionary(array.type) else array


def one_array(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def to_records(
    batch: Any, columns: Sequence[str], first_row: Callable[[], int], report_bad: ReportBad
) -> list[dict[str, Any]]:
    """Rows as dicts of Python values; `first_row` gives the number of the first row, which only messages need."""
    chosen = batch.select(list(columns))
    try:
        records: list[dict[str, Any]] = chosen.to_pylist()
    except UnicodeDecodeError:
        records = list(_row_by_row(chosen, first_row(), report_bad))
    return records


def _row_by_row(batch: Any, first: int, report_bad: ReportBad) -> Iterator[dict[str, Any]]:
    for row in range(batch.num_rows):
        try:
            yield batch.slice(row, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            report_bad(f"row {first + row}", f"not UTF-8: {error.reason}")


def record_columns(raw: RawFile, names: Sequence[str], fields: Sequence[str] | None) -> list[str]:
    """The columns that make up a record: the named ones, or all."""
    columns = choose_columns(raw, names, fields or ())
    if len(set(columns)) < len(columns):
        raise FieldError(
            f"{raw}: several columns have the same name: {', '.join(columns)}; choose columns with fields="
        )
    return columns
