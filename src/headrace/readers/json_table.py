"""The columns of JSON lines, for a build of records.

Arrow parses many lines in one call, two to three times as fast as Python's `json` (`docs/log.md` has the numbers). It
is given only lines that look like an object, because it also accepts several objects on one line and one object on
several lines. If it refuses some lines, they are halved until each line that it refuses is on its own, and that line
goes to `json`. So the outcome for a line never depends on its neighbours.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as arrow_json
from numpy.typing import NDArray

from headrace.readers.arrow_columns import one_array
from headrace.readers.arrow_types import MOST_PARSED_BYTES, parsed_type, source, wanted
from headrace.readers.columns import ReportBad
from headrace.readers.json_kinds import kind_of
from headrace.readers.json_lines import CLOSE, OPEN, BadLine, Lines, is_utf8, parse_line, shown
from headrace.readers.numbers import EXACT_FLOATS, is_exact_float
from headrace.readers.reader import ReadOptions
from headrace.readers.remedies import columns_with, remedy_for_large_integer


@dataclass
class _Parsed:
    """Parsed lines: by Arrow in runs, by `json` one by one."""

    runs: list[tuple[NDArray[np.int64], Mapping[str, Any]]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    values: list[Mapping[str, Any]] = field(default_factory=list)


class TableParser:
    def __init__(self, options: ReadOptions) -> None:
        self._schema = pa.schema([(name, parsed_type(field)) for name, field in wanted(options).items()])
        self._options = options
        self._exact = set(options.inferred)
        """The columns whose numbers must not change, since nobody chose their type."""
        self._all_keys = options.all_columns
        unexpected = "error" if options.all_columns else "ignore"
        self._parse_options = arrow_json.ParseOptions(
            explicit_schema=self._schema, unexpected_field_behavior=unexpected
        )

    def parse(self, lines: Lines, report_bad: ReportBad) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """The lines that are records, and their columns. The other lines are reported."""
        parsed = _Parsed()
        self._parse(lines, 0, len(lines), parsed, report_bad)
        return self._joined(parsed)

    def _parse(self, lines: Lines, first: int, last: int, parsed: _Parsed, report_bad: ReportBad) -> None:
        if first >= last:
            return
        columns = self._columns(lines, first, last)
        if columns is not None:
            parsed.runs.append(self._only_exact(lines, first, last, columns, report_bad))
        elif last - first > 1:
            middle = (first + last) // 2
            self._parse(lines, first, middle, parsed, report_bad)
            self._parse(lines, middle, last, parsed, report_bad)
        else:
            try:
                parsed.values.append(self._record(lines[first]))
                parsed.lines.append(first)
            except BadLine as error:
                report_bad(lines.locate(first), str(error))

    def _columns(self, lines: Lines, first: int, last: int) -> dict[str, Any] | None:
        """The columns, parsed by Arrow, or None if Arrow must not, or will not, read these lines."""
        data = lines.data[lines.starts[first] : lines.stops[last - 1]]
        begins = lines.data[lines.starts[first:last]]
        ends = lines.data[lines.stops[first:last] - 1]
        if not ((begins == OPEN) & (ends == CLOSE)).all():
            return None
        if len(data) > MOST_PARSED_BYTES or not is_utf8(data):
            return None
        try:
            table = arrow_json.read_json(
                source(data),
                read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=self._parse_options,
            )
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError):
            return None
        # Each line begins with { and ends with }, and inside an object no } is followed by a {. So if there are as many
        # objects as lines, each line is one object.
        if table.num_rows != last - first:
            return None
        return {name: one_array(table.column(number)) for number, name in enumerate(self._schema.names)}

    def _only_exact(
        self, lines: Lines, first: int, last: int, columns: Mapping[str, Any], report_bad: ReportBad
    ) -> tuple[NDArray[np.int64], Mapping[str, Any]]:
        """The rows without those in which Arrow rounded an integer to the nearest float."""
        rows = np.arange(first, last, dtype=np.int64)
        bad: list[int] = []
        for row in sorted({row for name in self._exact for row in _large_floats(columns[name])}):
            try:
                self._record(lines[first + row])
            except BadLine as error:
                report_bad(lines.locate(first + row), str(error))
                bad.append(row)
        if not bad:
            return rows, columns
        keep = np.ones(len(rows), dtype=bool)
        keep[bad] = False
        mask = pa.array(keep)
        return rows[keep], {name: array.filter(mask) for name, array in columns.items()}

    def _record(self, line: bytes) -> dict[str, Any]:
        """The values of a line, parsed by `json`. Raises BadLine if it is not a record with these columns."""
        record = parse_line(line)
        if self._all_keys:
            for name in record:
                if name not in self._schema.names:
                    raise BadLine(self._late_key(name, record[name]))
        return {
            column.name: self._value(column.name, record.get(column.name), column.type)
            for column in self._schema
        }

    def _late_key(self, name: str, value: Any) -> str:
        late = f"a key {name!r}, which no input has at its start, so that it would be lost"
        if type(value) in (int, float):
            keeps = columns_with(self._options, name, "float64")
            return (
                f"{late}; {keeps} keeps it, as NaN where it is missing. "
                "To leave it out, name only the other columns"
            )
        return (
            f"{late}; only numbers can be missing in some records, so give every record this key, or leave it out by "
            "naming the columns to keep with columns="
        )

    def _value(self, name: str, value: Any, expected: Any) -> Any:
        """A value as Arrow would have parsed it. Raises BadLine for what Arrow would have refused."""
        if value is None:
            return None
        if pa.types.is_list(expected) and type(value) is list:
            return [self._value(name, item, expected.value_type) for item in value]
        try:
            stored = _scalar(value, expected)
        except (UnicodeEncodeError, OverflowError) as error:
            raise BadLine(f"{name!r} cannot be stored: {error}") from None
        if stored is None:
            wanted_kind = "text" if pa.types.is_large_binary(expected) else str(expected)
            raise BadLine(
                f"{name!r} is {kind_of(value)} where {wanted_kind} is expected: {shown(value)}"
                f"{self._remedy(name, value, expected)}"
            )
        becomes_float = type(value) is int and pa.types.is_floating(expected)
        if becomes_float and name in self._exact and not is_exact_float(value):
            remedy = remedy_for_large_integer(self._options, name, value)
            raise BadLine(f"{name!r} holds {value}, which float64 would round{remedy}")
        return stored

    def _remedy(self, name: str, value: Any, expected: Any) -> str:
        """What to do about a value that is not of the type that was inferred."""
        if name not in self._exact:
            return ""
        if pa.types.is_integer(expected) and type(value) is int:
            return remedy_for_large_integer(self._options, name, value)
        if pa.types.is_integer(expected) and type(value) is float:
            return f"; choose {columns_with(self._options, name, 'float64')}"
        return "; leave this column out by naming the columns to keep with columns="

    def _joined(self, parsed: _Parsed) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """All parsed lines in their order."""
        runs = list(parsed.runs)
        if parsed.lines:
            runs.append((np.array(parsed.lines, dtype=np.int64), dict(self._arrays(parsed.values))))
        if len(runs) == 1:
            return runs[0][0], dict(runs[0][1])
        rows = np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in runs)])
        arrays = {
            column.name: pa.concat_arrays(
                [pa.array([], type=column.type), *(columns[column.name] for _, columns in runs)]
            )
            for column in self._schema
        }
        order = np.argsort(rows)
        return rows[order], {name: array.take(pa.array(order)) for name, array in arrays.items()}

    def _arrays(self, values: list[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
        for column in self._schema:
            yield column.name, pa.array([record[column.name] for record in values], type=column.type)


def _large_floats(array: Any) -> list[int]:
    """The rows that hold a float so large that it may be a rounded integer."""
    rows = np.arange(len(array))
    while pa.types.is_list(array.type):
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        rows = np.repeat(rows, lengths)
        array = array.flatten()
    if not pa.types.is_floating(array.type):
        return []
    large = np.abs(array.to_numpy(zero_copy_only=False)) >= EXACT_FLOATS
    found: list[int] = rows[large].tolist()
    return found


def _scalar(value: Any, expected: Any) -> Any:
    """A text or number as it is stored; None if it is of another kind or does not fit."""
    kind = type(value)
    if kind is str and pa.types.is_large_binary(expected):
        return value.encode()
    if kind is bool and pa.types.is_boolean(expected):
        return value
    if kind in (int, float) and pa.types.is_floating(expected):
        return float(value)
    if kind is int and pa.types.is_integer(expected) and _fits(value, expected):
        return value
    return None


def _fits(value: int, integer_type: Any) -> bool:
    if pa.types.is_uint64(integer_type):
        return 0 <= value < 2**64
    return -(2**63) <= value < 2**63
