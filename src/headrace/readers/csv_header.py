"""The first row of a CSV file, which names its columns, and the delimiter between its values."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.csv as arrow_csv

from headrace.errors import FormatError
from headrace.readers import quotes, ranges
from headrace.readers.bounds import MAX_RECORD_BYTES, Bound
from headrace.readers.csv_parser import BYTE_ORDER_MARK, split_values
from headrace.readers.quotes import CsvRecords

_HEAD_BYTES = 2**20
_OTHER_DELIMITERS = (";", "\t", "|")


@dataclass(frozen=True)
class CsvHeader:
    names: list[str]
    stop: int
    """Where the first record after the header begins."""


def read_header(path: Path) -> CsvHeader | None:
    """The header row, or None if the file is empty."""
    head = read_head_records(path)
    if head is None or not len(head.starts):
        return None
    row = head.data[head.starts[0] : head.stops[0]].tobytes()
    try:
        row.decode()
        names = split_values(row.removeprefix(BYTE_ORDER_MARK), delimiter_of(path).decode())
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(
            f"{path}: the header row cannot be read: {error}. The first line must name the columns, in UTF-8"
        ) from error
    if not names:
        raise FormatError(
            f"{path}: the header row cannot be read: it contains a carriage return; end lines with a newline"
        )
    return CsvHeader(names, int(head.stops[0]))


def hint_at_delimiter(names: list[str]) -> str:
    """What to do if a header with a single name looks as if it had several, with another delimiter between them."""
    if len(names) != 1:
        return ""
    found = next((each for each in _OTHER_DELIMITERS if each in names[0]), None)
    if found is None:
        return ""
    return (
        f"the whole header is one column, {names[0][:100]!r}; if {found!r} separates its columns, write the file with "
        "commas, or with tabs as .tsv"
    )


def read_head_records(path: Path) -> CsvRecords | None:
    """The header and the first records, or None if the file is empty."""

    def tell(position: int, size: int) -> None:
        # Other records are read again later, and reported then.
        if position == 0:
            raise FormatError(
                f"{path}: the header row has {size:,} bytes. The first line must name the columns"
            )

    bound = Bound(MAX_RECORD_BYTES, tell)
    size = ranges.file_size(path)
    return next(quotes.records(path, 0, size, delimiter_of(path), _HEAD_BYTES, bound), None)


def delimiter_of(path: Path) -> bytes:
    endings = [suffix.lower() for suffix in path.suffixes[-2:]]
    if not ranges.is_compressed(path):
        endings = endings[-1:]
    return b"\t" if ".tsv" in endings else b","


def parse_options(path: Path) -> Any:
    return arrow_csv.ParseOptions(delimiter=delimiter_of(path).decode(), newlines_in_values=True)
