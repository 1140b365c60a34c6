"""Reading records as dicts from any span of a file: what a stream needs from a format.

A span is a range of a file's bytes, and its records are those that start in that range. Spans that cover a file without
overlap give each of its records exactly once, wherever the cuts are, and each span can be read independently.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import StorageError
from headrace.readers import ranges
from headrace.readers.bounds import MAX_RECORD_BYTES, Bound
from headrace.readers.columns import ReportBad
from headrace.readers.inputs import InputFile
from headrace.readers.places import Places
from headrace.readers.reader import Split

READ_BYTES = 2**20
"""About how many bytes of a file are turned into records at once."""

Record = dict[str, Any]


class Span(NamedTuple):
    """The records of a file that start in bytes `start` to `stop`."""

    file: InputFile
    start: int
    stop: int


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


@contextlib.contextmanager
def opened(file: InputFile) -> Iterator[BinaryIO]:
    """The open file, if it still has the size that it had when it was found: its spans depend on that size."""
    try:
        # Unbuffered, because it is read in large pieces at given positions.
        stream = open(file.location, "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise StorageError(f"{file.path}: cannot be read: {error.strerror}") from error
    with stream:
        size = os.fstat(stream.fileno()).st_size
        if size != file.bytes:
            raise StorageError(
                f"{file.path}: has {size:,} bytes now but had {file.bytes:,} when the stream was created; files must "
                "not change while they are being read. Create the stream again"
            )
        yield stream


def check_unchanged(file: InputFile) -> Path:
    """The file's path, for libraries that open it themselves."""
    with opened(file):
        return file.location


def delimited_pieces(span: Span, delimiter: bytes, bound: Bound | None = None) -> Iterator[tuple[bytes, int]]:
    """The records of a span, several complete ones at a time, each time with the byte at which they begin."""
    path = span.file.location
    with opened(span.file) as file:
        if ranges.is_compressed(path):
            # A single span, whose bytes are counted after decompression.
            found = ranges.compressed_blocks(path, delimiter, READ_BYTES, bound)
        else:
            found = _pieces(file, span, delimiter, bound)
        for data, position in found:
            yield data.tobytes(), position


def _pieces(
    file: BinaryIO, span: Span, delimiter: bytes, bound: Bound | None
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    if not span.file.bytes:
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        bounds = ranges.starting_in(content, span.start, span.stop, delimiter)
    if bounds is not None:
        yield from ranges.blocks_of(FileBytes(file, span.file), *bounds, delimiter, READ_BYTES, bound)


class FileBytes:
    """The bytes of an open file, read on demand. It is used like an array, but it is not a map, which would crash the
    process if the file became shorter."""

    def __init__(self, file: BinaryIO, found: InputFile) -> None:
        self._descriptor, self._found = file.fileno(), found

    def __len__(self) -> int:
        return self._found.bytes

    def __getitem__(self, where: slice) -> NDArray[np.uint8]:
        start, stop, _ = where.indices(len(self))
        content = bytearray()
        while len(content) < stop - start:
            piece = os.pread(self._descriptor, stop - start - len(content), start + len(content))
            if not piece:
                raise StorageError(
                    f"{self._found.path}: became shorter while it was being read; create the stream again"
                )
            content += piece
        return np.frombuffer(content, dtype=np.uint8)


class PlacesOfFiles:
    """Remembers the places of the file that was read last, so that its lines are not counted again for each span."""

    def __init__(self) -> None:
        self._name = ""
        self._places: Places | None = None

    def of(self, file: InputFile) -> Places:
        if self._places is None or self._name != file.path:
            self._name, self._places = file.path, Places(file.location)
        return self._places
