"""Text files in UTF-8: a document is a file, a line, or the text between separators."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FieldError, SettingsError
from headrace.format.fields import Field, FieldKind
from headrace.readers import ranges
from headrace.readers.bounds import Bound
from headrace.readers.columns import Block, ReportBad, Texts
from headrace.readers.places import Places
from headrace.readers.raw_file import RawFile
from headrace.readers.reader import FoundColumn, ReadOptions, Split
from headrace.readers.spans import (
    PlacesOfFiles,
    Record,
    RecordOptions,
    Span,
    check_unchanged,
    delimited_pieces,
)

TEXT_COLUMN = "text"
fingerprint = ranges.fingerprint


def plan(raw: RawFile, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
    if options.split is Split.FILE:
        return [(0, raw.size())]
    return ranges.cut(raw, target_bytes, _delimiter(options))


def look(raw: RawFile) -> dict[str, FoundColumn]:
    return {TEXT_COLUMN: FoundColumn((Field(FieldKind.BYTES, "uint8"),))}


def read(raw: RawFile, start: int, stop: int, options: ReadOptions, report_bad: ReportBad) -> Iterator[Block]:
    name = options.text_field or TEXT_COLUMN
    places = Places(raw)
    bound = places.bound(options.max_record_bytes, report_bad)
    with places:
        for data, position, texts in _pieces(raw, start, stop, options, bound):
            starts = texts.starts + position

            def locate(record: int, starts: NDArray[np.int64] = starts) -> str:
                return places.describe(int(starts[record]))

            yield drop_invalid_utf8(Block({name: texts}, locate, len(data)), name, report_bad)


def _pieces(
    raw: RawFile, start: int, stop: int, options: ReadOptions, bound: Bound
) -> Iterator[tuple[NDArray[np.uint8], int, Texts]]:
    """Pieces of the range, each with its position and the documents in it."""
    if options.split is Split.FILE:
        content = ranges.read_all(raw, bound)
        if content is not None:
            data = np.frombuffer(content, dtype=np.uint8)
            yield data, 0, _whole(data)
        return
    delimiter = _delimiter(options)
    for data, position in ranges.blocks(raw, start, stop, delimiter, options.block_bytes, bound):
        yield data, position, _between(data, delimiter)


def _whole(data: NDArray[np.uint8]) -> Texts:
    """The file as one document; an empty file is an empty document."""
    return Texts(data, np.zeros(1, np.int64), np.full(1, len(data), np.int64))


def _between(data: NDArray[np.uint8], delimiter: bytes) -> Texts:
    """The texts before each delimiter, and the text after the last one unless it is empty."""
    if len(delimiter) == 1:
        found = np.flatnonzero(data == delimiter[0])
    else:
        found = np.array(list(_occurrences(data.tobytes(), delimiter)), dtype=np.int64)
    starts = np.concatenate([[0], found + len(delimiter)]).astype(np.int64)
    stops = np.concatenate([found, [len(data)]]).astype(np.int64)
    if starts[-1] == len(data):
        starts, stops = starts[:-1], stops[:-1]
    if delimiter == b"\n" and len(stops):
        # Lines of files from Windows end with \r\n.
        stops = stops - ((stops > starts) & (data[stops - 1] == 13))
    return Texts(data, starts, stops)


def _occurrences(content: bytes, delimiter: bytes) -> Iterator[int]:
    found = content.find(delimiter)
    while found >= 0:
        yield found
        found = content.find(delimiter, found + len(delimiter))


def _delimiter(options: ReadOptions) -> bytes:
    if options.split is Split.LINE:
        return b"\n"
    if not options.separator:
        raise SettingsError("split='separator' needs a separator, like separator='<|endoftext|>'")
    return options.separator


def drop_invalid_utf8(block: Block, name: str, report_bad: ReportBad) -> Block:
    """Report records that are not UTF-8 and leave them out. If all are, a single check of the block is enough."""
    texts = block.columns[name]
    if not isinstance(texts, Texts) or _is_utf8(texts.data.tobytes()):
        return block
    keep = np.ones(len(texts), dtype=bool)
    for record in range(len(texts)):
        try:
            texts[record].decode()
        except UnicodeDecodeError as error:
            keep[record] = False
            report_bad(block.locate(record), f"not UTF-8: {error.reason} (byte {error.start} of the record)")
    kept = np.flatnonzero(keep)
    return Block({name: texts.take(keep)}, lambda record: block.locate(int(kept[record])), block.input_bytes)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_whole(raw: RawFile, split: Split) -> bool:
    return split is Split.FILE or ranges.is_compressed(raw)


def span_reader(options: RecordOptions) -> "_TextSpanReader":
    return _TextSpanReader(options)


class _TextSpanReader:
    """A record is `{"text": ...}`."""

    def __init__(self, options: RecordOptions) -> None:
        self._whole_files = options.split is Split.FILE
        self._separator = options.separator if options.split is Split.SEPARATOR else "\n"
        self._most_bytes = options.max_record_bytes
        self._places = PlacesOfFiles()
        if options.fields not in (None, (TEXT_COLUMN,)):
            raise FieldError(f"fields={options.fields}: a text file has only one field, {TEXT_COLUMN!r}")

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        places = self._places.of(span)
        bound = places.bound(self._most_bytes, report_bad)
        if self._whole_files:
            content = ranges.read_all(check_unchanged(span), bound)
            if content is not None:
                yield [{TEXT_COLUMN: text} for text in _decoded([content], 0, 0, places, report_bad)]
            return
        with places:
            for piece, position in delimited_pieces(span, self._separator.encode(), bound):
                yield [{TEXT_COLUMN: text} for text in self._texts(piece, position, places, report_bad)]

    def _texts(self, piece: bytes, position: int, places: Places, report_bad: ReportBad) -> list[str]:
        # If nothing follows the last separator, there is no record after it.
        try:
            texts = piece.decode().split(self._separator)
            if not texts[-1]:
                texts.pop()
        except UnicodeDecodeError:
            separator = self._separator.encode()
            parts = piece.split(separator)
            if not parts[-1]:
                parts.pop()
            texts = list(_decoded(parts, position, len(separator), places, report_bad))
        if self._separator == "\n" and b"\r" in piece:
            # Lines of files from Windows end with \r\n.
            return [text[:-1] if text.endswith("\r") else text for text in texts]
        return texts


def _decoded(
    parts: list[bytes], position: int, gap: int, places: Places, report_bad: ReportBad
) -> Iterator[str]:
    """The parts that are UTF-8, as strings; in the file there are `gap` bytes between the parts."""
    for part in parts:
        try:
            yield part.decode()
        except UnicodeDecodeError as error:
            reason = f"not UTF-8: {error.reason} (byte {error.start} of the record)"
            report_bad(places.describe(position), reason)
        position += len(part) + gap
