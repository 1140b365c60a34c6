"""The lines of a JSON-lines file, and Python's parser, which has the last word on what a record is."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.readers.json_kinds import kind_of
from headrace.readers.places import Places
from headrace.readers.shapes import JSON_REMEDY

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
OPEN, CLOSE = b"{}"
_NEWLINE, _RETURN = b"\n\r"
_BLANK = b" \t\r"
_MOST_DIGITS = 4300
"""Python reads no longer integers, because that takes quadratic time."""


class BadLine(ValueError):
    """A line that is not a record; the message says why."""


@dataclass(frozen=True, eq=False)
class Lines:
    """The lines of a block that are not blank, without the blanks around them."""

    data: NDArray[np.uint8]
    begins: NDArray[np.int64]
    """Where the lines begin, with the blanks."""
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    position: int
    places: Places

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, line: int) -> bytes:
        return self.data[self.starts[line] : self.stops[line]].tobytes()

    def locate(self, line: int) -> str:
        return self.places.describe(self.position + int(self.begins[line]))


def split_lines(data: NDArray[np.uint8], position: int, places: Places) -> Lines:
    newlines = np.flatnonzero(data == _NEWLINE)
    begins = np.concatenate([[0], newlines + 1]).astype(np.int64)
    stops = np.concatenate([newlines, [len(data)]]).astype(np.int64)
    full = stops > begins
    begins, stops = begins[full], stops[full]
    stops = stops - (data[stops - 1] == _RETURN)
    starts = begins.copy()
    if position == 0 and data[:3].tobytes() == BYTE_ORDER_MARK:
        starts[0] = 3
    _strip(data, starts, stops)
    full = stops > starts
    return Lines(data, begins[full], starts[full], stops[full], position, places)


def _strip(data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
    """Move the starts and stops of lines that begin or end with blanks. Few lines do."""
    blank = np.zeros(256, dtype=bool)
    blank[list(_BLANK)] = True
    full = np.flatnonzero(stops > starts)
    with_blanks = blank[data[starts[full]]] | blank[data[stops[full] - 1]]
    for line in full[with_blanks].tolist():
        content = data[starts[line] : stops[line]].tobytes()
        starts[line] += len(content) - len(content.lstrip(_BLANK))
        stops[line] = max(starts[line], starts[line] + len(content.strip(_BLANK)))


def parse_line(line: bytes) -> dict[str, Any]:
    """The record on a line. Raises BadLine if there is none."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8: {error.reason} (byte {error.start} of the record)") from None
    except RecursionError:
        raise BadLine("lists or objects are nested too deeply") from None
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg} (character {error.pos} of the line)"
        raise BadLine(f"{reason}{_hint(line)}") from None
    except ValueError:
        raise BadLine(f"a number of more than {_MOST_DIGITS:,} digits") from None
    if not isinstance(record, dict):
        raise BadLine(f"not a JSON object, but {kind_of(record)}{_hint(line)}")
    return record


def _hint(line: bytes) -> str:
    """What may be wrong with a line that begins as an array or an object does."""
    if line.lstrip()[:1] not in (b"[", b"{") or line.rstrip()[-1:] in (b"}",):
        return ""
    return f"; if this is an array, or an object on several lines, {JSON_REMEDY}"


def missing_key(name: str, record: Iterable[str]) -> str:
    present = ", ".join(map(repr, list(record)[:20])) or "none"
    return f"no key {name!r}; the record has: {present}"


def shown(value: Any) -> str:
    """The beginning of a value as JSON writes it."""
    try:
        return json.dumps(value)[:60]
    except RecursionError:
        return "..."


def is_utf8(data: Any) -> bool:
    ends: Any = np.array([0, len(data)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    try:
        pa.Array.from_buffers(pa.large_string(), 1, buffers).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def objects(data: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int] | None:
    """The same bytes without a newline at their end, and the number of lines; None if a line cannot be an object.

    msgspec also accepts several objects on one line, and one object on several lines. But inside an object, no } is
    followed by a {, so a newline between the two can only end an object. Here no newline is the first or last byte.
    """
    newlines = np.flatnonzero(data == _NEWLINE)
    if len(newlines) and newlines[-1] == len(data) - 1:
        newlines, data = newlines[:-1], data[:-1]
    if not len(data) or data[0] != OPEN or data[-1] != CLOSE:
        return None
    between = (data[newlines - 1] == CLOSE) & (data[newlines + 1] == OPEN)
    return (data, len(newlines) + 1) if between.all() else None
