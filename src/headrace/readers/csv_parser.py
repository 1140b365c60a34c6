"""Arrow's CSV parser, extended to say which records it refuses and why.

A block of records is parsed in one call. If Arrow refuses it, the block is halved until each bad record is on its own,
so the outcome for a record never depends on its neighbours.
"""

import csv
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv

from headrace.readers.arrow_types import MOST_PARSED_BYTES, source
from headrace.readers.quotes import CsvRecords

NULLS = ["", "NA", "N/A", "NaN", "nan", "null", "NULL"]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONE_RETURN = "a carriage return without a newline, outside quotes"
UNCLOSED = "a quote is opened but never closed; everything up to the end of the file is left out"


class Parser:
    """Arrow's CSV parser for some columns of one file."""

    def __init__(
        self, parse_options: Any, names: list[str], columns: dict[str, int], types: dict[str, Any]
    ) -> None:
        """`columns` maps each wanted column to its place among the `names` of the header, and `types` to its Arrow
        type."""
        # Arrow sees numbers instead of names, so that columns with equal names do no harm unless they are wanted.
        self.columns, self._parse_options, self._names = columns, parse_options, names
        self._read_names = [str(number) for number in range(len(names))]
        by_place = {str(place): types[name] for name, place in columns.items()}
        self.schema = pa.schema(list(by_place.items()))
        self._convert_options = arrow_csv.ConvertOptions(
            column_types=by_place,
            include_columns=list(by_place),
            null_values=NULLS,
            strings_can_be_null=False,
            true_values=["true", "True", "TRUE", "1"],
            false_values=["false", "False", "FALSE", "0"],
        )

    def runs(self, records: CsvRecords, first: int, last: int) -> Iterator[tuple[int, int, Any, str]]:
        """The records from `first` to `last`, in order, as (first, last, table, reason): runs of good records with
        their table, and bad records one by one with the reason."""
        if first >= last:
            return
        data = records.data[records.starts[first] : records.stops[last - 1]]
        try:
            table = self._parse(data)
            if table.num_rows != last - first:
                raise pa.ArrowInvalid(_LONE_RETURN)
            yield first, last, table, ""
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            # UnicodeDecodeError: Arrow's message quotes bytes that are not valid UTF-8.
            if last - first == 1:
                yield first, last, None, self._reason(data.tobytes(), str(error))
                return
            middle = (first + last) // 2
            yield from self.runs(records, first, middle)
            yield from self.runs(records, middle, last)

    def _parse(self, data: Any) -> Any:
        if len(data) > MOST_PARSED_BYTES:
            raise pa.ArrowInvalid(f"a record of {len(data):,} bytes; the maximum is {MOST_PARSED_BYTES:,}")
        if data[: len(BYTE_ORDER_MARK)].tobytes() == BYTE_ORDER_MARK:
            # Arrow would drop it, but here it is text: a byte order mark precedes the header, which is not parsed here.
            data = np.concatenate([np.frombuffer(b"\n", dtype=np.uint8), data])
        options = arrow_csv.ReadOptions(
            use_threads=False, column_names=self._read_names, block_size=len(data) + 1
        )
        return arrow_csv.read_csv(
            source(data),
            read_options=options,
            parse_options=self._parse_options,
            convert_options=self._convert_options,
        )

    def value(self, records: CsvRecords, record: int, name: str) -> str | None:
        """The text of one value, as the file has it; None if the record is longer than Python's parser allows."""
        row = records.data[records.starts[record] : records.stops[record]].tobytes()
        try:
            values = split_values(row, self._parse_options.delimiter)
        except csv.Error:
            return None
        place = self.columns[name]
        return values[place] if place < len(values) else ""

    def _reason(self, record: bytes, error: str) -> str:
        """Why a single record is bad, naming its columns and values where possible."""
        if "invalid UTF8" in error:
            return "not UTF-8"
        try:
            values = split_values(record, self._parse_options.delimiter)
        except csv.Error:
            return error
        if not values:
            return _LONE_RETURN
        if len(values) != len(self._names):
            found = "1 value" if len(values) == 1 else f"{len(values)} values"
            named = "1 column" if len(self._names) == 1 else f"{len(self._names)} columns"
            return f"{found}, but the header names {named}"
        return self._misfit(values, error) or error

    def _misfit(self, values: list[str], error: str) -> str | None:
        """Which value Arrow's error is about, and what is wrong with it, if that can be found out."""
        for name, place in self.columns.items():
            kind = self.schema.field(str(place)).type
            text = values[place].strip()[:100]
            if pa.types.is_integer(kind) and not _is_int(text) and _is_float(text):
                return (
                    f"{name!r} holds {text}, a float where {kind} is expected; if the column holds floats, "
                    "choose float64 for it with columns="
                )
            if f"'{values[place]}'" in error:
                return f"{name!r} holds {values[place]!r}, which is not {kind}"
        return None


def _is_int(text: str) -> bool:
    return text.lstrip("-").isdecimal()


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def split_values(record: bytes, delimiter: str) -> list[str]:
    rows = list(csv.reader(io.StringIO(record.decode("utf-8", "replace"), newline=""), delimiter=delimiter))
    return rows[0] if len(rows) == 1 else []
