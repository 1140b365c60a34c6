"""The texts under one key of JSON lines, for a build with a tokenizer.

msgspec parses a whole block in one call, two to three times as fast as Python's `json` (`docs/log.md` has the numbers).
It is given only blocks in which each line looks like an object, because it also accepts several objects on one line and
one object on several lines. A block that it refuses goes through the same parser line by line, and the lines that it
refuses then go to `json`. So the outcome for a line never depends on its neighbours.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.readers.columns import Block, ReportBad, Strings
from headrace.readers.json_kinds import kind_of
from headrace.readers.json_lines import (
    BadLine,
    Lines,
    is_utf8,
    missing_key,
    objects,
    parse_line,
    shown,
    split_lines,
)
from headrace.readers.places import Places

REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def texts_block(
    data: NDArray[np.uint8], position: int, text_field: str, places: Places, report_bad: ReportBad
) -> Block:
    texts = _at_once(data, text_field)
    if texts is not None:
        return Block({text_field: texts}, _locator(data, position, places), len(data))
    return _line_by_line(split_lines(data, position, places), text_field, report_bad)


def _at_once(data: NDArray[np.uint8], text_field: str) -> Strings | None:
    """The texts of a block, or None if one of its lines is not a record with a text."""
    decoder, found = _decoder(text_field), objects(data)
    if decoder is None or found is None or not is_utf8(data):
        return None
    lines, count = found
    try:
        records = decoder.decode_lines(lines)
    except REFUSED:
        return None
    return Strings([record.text for record in records]) if len(records) == count else None


@cache
def _decoder(text_field: str) -> Any:
    """A decoder that reads one key and skips the others; a value that is not a string is an error. None if msgspec
    cannot look for this key, because JSON writes it with a backslash."""
    if json.dumps(text_field, ensure_ascii=False) != f'"{text_field}"':
        return None
    # In the struct that msgspec fills, `text` stands for the key.
    record: Any = msgspec.defstruct("Record", [("text", str)], rename={"text": text_field}, gc=False)
    return msgspec.json.Decoder(record)


def _locator(data: NDArray[np.uint8], position: int, places: Places) -> Callable[[int], str]:
    """A `locate` that looks for the lines only when it is called."""
    found: list[Lines] = []

    def locate(record: int) -> str:
        if not found:
            found.append(split_lines(data, position, places))
        return found[0].locate(record)

    return locate


def _line_by_line(lines: Lines, text_field: str, report_bad: ReportBad) -> Block:
    texts: list[str] = []
    kept: list[int] = []
    for line in range(len(lines)):
        try:
            text = _text(lines[line], text_field)
        except BadLine as error:
            report_bad(lines.locate(line), str(error))
            continue
        texts.append(text)
        kept.append(line)
    return Block({text_field: Strings(texts)}, lambda record: lines.locate(kept[record]), len(lines.data))


def _text(line: bytes, text_field: str) -> str:
    decoder = _decoder(text_field)
    if decoder is None:
        return _text_of(parse_line(line), text_field)
    try:
        line.decode()  # values that are skipped must be UTF-8 as well
        text: str = decoder.decode(line).text
        return text
    except REFUSED:
        return _text_of(parse_line(line), text_field)


def _text_of(record: dict[str, Any], text_field: str) -> str:
    if text_field not in record:
        raise BadLine(f"{missing_key(text_field, record)}; choose a key with text_field=NAME")
    text = record[text_field]
    if text is None:
        raise BadLine(f"{text_field!r} is null")
    if not isinstance(text, str):
        raise BadLine(f"{text_field!r} is {kind_of(text)} where text is expected: {shown(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadLine(f"{text_field!r} cannot be stored: {error}") from None
    return text
