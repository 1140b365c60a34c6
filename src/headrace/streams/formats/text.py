"""Text files: a record a line, a file, or what stands between separators; `{"text": ...}`. UTF-8."""

from collections.abc import Iterator

from headrace.errors import FieldError
from headrace.readers import ranges
from headrace.readers.columns import ReportBad
from headrace.readers.reader import Split
from headrace.readers.text import TEXT_COLUMN
from headrace.streams.blocks import Block
from headrace.streams.formats.delimited import pieces
from headrace.streams.formats.reader import Record, check_unchanged
from headrace.streams.settings import StreamSettings


class Reader:
    def __init__(self, settings: StreamSettings) -> None:
        self._whole_files = settings.split is Split.FILE
        self._separator = settings.separator if settings.split is Split.SEPARATOR else "\n"
        if settings.fields not in (None, (TEXT_COLUMN,)):
            raise FieldError(f"fields={settings.fields}: a text file has one, {TEXT_COLUMN!r}")

    def read(self, block: Block, report_bad: ReportBad) -> Iterator[list[Record]]:
        if self._whole_files:
            content = ranges.read_all(check_unchanged(block.file))
            yield [{TEXT_COLUMN: text} for text in _decoded([content], 0, 0, report_bad)]
            return
        for piece, position in pieces(block, self._separator.encode()):
            yield [{TEXT_COLUMN: text} for text in self._texts(piece, position, report_bad)]

    def _texts(self, piece: bytes, position: int, report_bad: ReportBad) -> list[str]:
        # What follows the last separator is no record if it is empty.
        try:
            texts = piece.decode().split(self._separator)
            if not texts[-1]:
                texts.pop()
        except UnicodeDecodeError:
            separator = self._separator.encode()
            parts = piece.split(separator)
            if not parts[-1]:
                parts.pop()
            texts = list(_decoded(parts, position, len(separator), report_bad))
        if self._separator == "\n" and b"\r" in piece:
            # Lines of files made on Windows end with \r\n.
            return [text[:-1] if text.endswith("\r") else text for text in texts]
        return texts


def _decoded(parts: list[bytes], position: int, gap: int, report_bad: ReportBad) -> Iterator[str]:
    """Those that are UTF-8; `gap` bytes stand between them in the file."""
    for part in parts:
        try:
            yield part.decode()
        except UnicodeDecodeError as error:
            report_bad(f"byte {position}", f"not UTF-8: {error.reason} (byte {error.start} of the record)")
        position += len(part) + gap
