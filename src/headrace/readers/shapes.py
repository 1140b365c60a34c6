"""What a file looks like that nobody has named the format of, and JSON that is not JSON lines."""

import csv
import json
import re
from collections.abc import Sequence
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OBJECT_BEGINS = re.compile(rb'\{\s*"')
_ARRAY_BEGINS = re.compile(rb'\[\s*\{\s*"')
_COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_LEAST_LINES = 3
"""A header and two rows: fewer lines say too little."""

JSON_REMEDY = "write one object on each line, as `jq -c '.[]'` does with an array and `jq -c .` with objects"


def is_json_lines(head: bytes, *, is_cut: bool) -> bool:
    """Whether the first line is an object. `is_cut` says that the file goes on after these bytes."""
    line, newline, _ = _content(head).partition(b"\n")
    return isinstance(_parsed(line), dict) or (is_cut and not newline and bool(_OBJECT_BEGINS.match(line)))


def other_json(head: bytes, *, is_cut: bool) -> str:
    """'a JSON array' or 'a JSON object on several lines', if the file begins with that; '' if not."""
    content = _content(head)
    value, lines = _first_value(content)
    if _is_list_of_objects(value) or (is_cut and value is None and _ARRAY_BEGINS.match(content)):
        return "a JSON array"
    is_long_object = is_cut and value is None and b"\n" in content and _OBJECT_BEGINS.match(content)
    if (isinstance(value, dict) and lines > 1) or is_long_object:
        return "a JSON object on several lines"
    return ""


def is_csv(head: bytes, *, is_cut: bool) -> bool:
    """Whether there is a header of plain names, and rows with as many values as names."""
    try:
        lines = _content(head).decode("utf-8", "replace").splitlines()
        rows = list(csv.reader(lines[:-1] if is_cut else lines, strict=True))
    except csv.Error:
        return False
    rows = [row for row in rows if row]
    if len(rows) < _LEAST_LINES or len(rows[0]) < 2 or not _are_names(rows[0]):
        return False
    return all(len(row) == len(rows[0]) for row in rows)


def _are_names(values: Sequence[str]) -> bool:
    return len(set(values)) == len(values) and all(_COLUMN_NAME.fullmatch(value) for value in values)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _content(head: bytes) -> bytes:
    return head.removeprefix(BYTE_ORDER_MARK).lstrip()


def _first_value(text: bytes) -> tuple[Any, int]:
    """The JSON value at the beginning, if nothing but JSON follows it, and the number of its lines; (None, 0) if there
    is none."""
    try:
        decoded = text.decode()
        value, stop = json.JSONDecoder().raw_decode(decoded)
    except (ValueError, RecursionError):
        return None, 0
    follows_json = decoded[stop:].lstrip()[:1] in ("", "{", "[")
    return (value, decoded[:stop].count("\n") + 1) if follows_json else (None, 0)


def _parsed(text: bytes) -> Any:
    """The JSON value; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
