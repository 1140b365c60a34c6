"""Reading records as dicts from any span of a file: what a stream needs from a format.

A span is a range of a file's bytes, and its records are those that start in that range. Spans that cover a file without
overlap give each of its records exactly once, wherever the cuts are, and each span can be read independently.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from headrace.errors import StorageError
from headrace.readers import ranges
from headrace.readers.bounds import MAX_RECORD_BYTES, Bound
from headrace.readers.columns import ReportBad
from headrace.readers.formats import InputFormat
from headrace.readers.inputs import InputFile
from headrace.readers.places import Places
from headrace.readers.raw_file import Content, RawFile
from headrace.readers.reader import Split

READ_BYTES = 2**20
"""About how many bytes of a file are turned into records at once."""

_AROUND_BYTES = 2**15
"""How much is fetched before and after a span of a remote file: enough to find where records begin and end there."""
_CHOOSES_BYTES = (InputFormat.PARQUET, InputFormat.ARROW)
"""Formats that need only some of the bytes between the first and the last that belong to a span."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """The records of a file that start in bytes `start` to `stop`."""

    file: InputFile
    start: int
    stop: int
    shared: RawFile | None = None
    """The bytes of the file, if they are fetched together with those of other spans."""

    @cached_property
    def raw(self) -> RawFile:
        return self.shared or self.file.raw()


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    fields: tuple[str, ...] | None = None
    """The fields of a record; None for all of them."""
    types: Mapping[str, Callable[[str], Any]] | None = None
    """By the name of a CSV column: the function that converts its text to a value."""
    split: Split = Split.LINE
    separator: str = ""
    max_record_bytes: int = MAX_RECORD_BYTES
    span_bytes: int = READ_BYTES
    """The size of the spans: every file is cut at multiples of it."""
    scan_csv: bool = False
    """Whether CSV files are read from their beginning to find out what is quoted."""


class SpanReader(Protocol):
    """Reads for one consumer during one iteration, and may remember what it has seen of the files."""

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        """The records of a span, in several lists."""
        ...


def expect_together(spans: Sequence[Span]) -> list[Span]:
    """Spans that follow each other in a file, and will be read in this order. If it is remote, they are fetched."""
    file = spans[0].file
    raw = file.raw()
    if file.format not in _CHOOSES_BYTES or file.is_small:
        raw.expect([(spans[0].start - _AROUND_BYTES, spans[-1].stop + _AROUND_BYTES)])
    return [replace(span, shared=raw) for span in spans]


@contextlib.contextmanager
def opened(span: Span) -> Iterator[Content]:
    """The content of the span's file, if it still has the size that it had when it was found: spans depend on that."""
    with span.raw.reading() as content:
        if len(content) != span.file.bytes:
            raise StorageError(
                f"{span.file.path}: has {len(content):,} bytes now but had {span.file.bytes:,} when the stream was "
                "created; files must not change while they are being read. Create the stream again"
            )
        yield content


def check_unchanged(span: Span) -> RawFile:
    """The span's file, for libraries that open it themselves."""
    with opened(span):
        return span.raw


def delimited_pieces(span: Span, delimiter: bytes, bound: Bound | None = None) -> Iterator[tuple[bytes, int]]:
    """The records of a span, several complete ones at a time, each time with the byte at which they begin."""
    with opened(span) as content:
        if ranges.is_compressed(span.raw):
            # A single span, whose bytes are counted after decompression.
            found = ranges.compressed_blocks(span.raw, delimiter, READ_BYTES, bound)
        else:
            bounds = ranges.starting_in(content, span.start, span.stop, delimiter)
            found = (
                iter(())
                if bounds is None
                else ranges.blocks_of(content, *bounds, delimiter, READ_BYTES, bound)
            )
        for data, position in found:
            yield data.tobytes(), position


class PlacesOfFiles:
    """Remembers the places of the file that was read last, so that its lines are not counted again for each span."""

    def __init__(self) -> None:
        self._name = ""
        self._places: Places | None = None

    def of(self, span: Span) -> Places:
        if self._places is None or self._name != span.file.path:
            self._name, self._places = span.file.path, Places(span.file.raw())
        return self._places
