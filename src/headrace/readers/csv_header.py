"""The first row of a CSV file, which names its columns, and the delimiter between its values."""

import csv
from dataclasses import dataclass
from typing import Any

import pyarrow.csv as arrow_csv

from headrace.errors import FormatError
from headrace.readers import quotes, ranges
from headrace.readers.bounds import MAX_RECORD_BYTES, Bound
from headrace.readers.csv_parser import BYTE_ORDER_MARK, split_values
from headrace.readers.quotes import CsvRecords, QuoteScanner
from headrace.readers.raw_file import RawFile

_HEADER_BYTES, _HEAD_BYTES = 2**16, 2**20
_OTHER_DELIMITERS = (";", "\t", "|")


@dataclass(frozen=True)
class CsvHeader:
    names: list[str]
    stop: int
    """Where the first record after the header begins."""


def read_header(raw: RawFile) -> CsvHeader | None:
    """The header row, or None if the file is empty."""
    head = _first_records(raw, _HEADER_BYTES)
    if head is None:
        return None
    row = head.data[head.starts[0] : head.stops[0]].tobytes()
    try:
        row.decode()
        names = split_values(row.removeprefix(BYTE_ORDER_MARK), delimiter_of(raw).decode())
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(
            f"{raw}: the header row cannot be read: {error}. The first line must name the columns, in UTF-8"
        ) from error
    if not names:
        raise FormatError(
            f"{raw}: the header row cannot be read: it contains a carriage return; end lines with a newline"
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


def read_head_records(raw: RawFile) -> CsvRecords | None:
    """The header and the first records, or None if the file is empty."""
    return _first_records(raw, _HEAD_BYTES)


def _first_records(raw: RawFile, count: int) -> CsvRecords | None:
    """The records at the beginning, about so many bytes, but at least the first one; None if there is none."""

    def tell(position: int, size: int) -> None:
        # Other records are read again later, and reported then.
        if position == 0:
            raise FormatError(
                f"{raw}: the header row has {size:,} bytes. The first line must name the columns"
            )

    bound = Bound(MAX_RECORD_BYTES, tell)
    size = raw.size()
    blocks = quotes.records(raw, 0, size, QuoteScanner(delimiter_of(raw)), count, bound)
    return next((records for records in blocks if len(records.starts)), None)


def delimiter_of(raw: RawFile) -> bytes:
    endings = raw.endings[-2:]
    if not ranges.is_compressed(raw):
        endings = endings[-1:]
    return b"\t" if ".tsv" in endings else b","


def parse_options(raw: RawFile) -> Any:
    return arrow_csv.ParseOptions(delimiter=delimiter_of(raw).decode(), newlines_in_values=True)
