"""Reading records as dicts from any stretch of a file: what a stream asks of a format.

A span is some bytes of a file, and its records are those that start in them. Spans that cover a file without overlap
give each of its records exactly once, wherever they are cut; each can be read alone, without asking anyone.
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
from headrace.readers.columns import ReportBad
from headrace.readers.inputs import InputFile
from headrace.readers.reader import Split

READ_BYTES = 2**20
"""How much of a file is made into records at once, about."""

Record = dict[str, Any]


class Span(NamedTuple):
    """The records of a file that start in bytes `start` to `stop`."""

    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    fields: tuple[str, ...] | None = None
    """The fields of a record; all of them if not said."""
    types: Mapping[str, Callable[[str], Any]] | None = None
    """What makes a value of the text of a CSV column, by the column's name."""
    split: Split = Split.LINE
    separator: str = ""
    span_bytes: int = READ_BYTES
    """How large the spans are: every file is cut at its multiples."""
    scan_csv: bool = False
    """Whether CSV files are read from their beginning, to find out what is quoted."""


class SpanReader(Protocol):
    """One consumer's, for one iteration: it may remember what it has seen of the files."""

    def read(self, span: Span, report_bad: ReportBad) -> Iterator[list[Record]]:
        """The records of a span, some at a time."""
        ...


@contextlib.contextmanager
def opened(file: InputFile) -> Iterator[BinaryIO]:
    """The file, if it is still the one that was found: its spans are cut by the size it had then."""
    try:
        # Unbuffered: it is read in large pieces, at places that are told.
        stream = open(file.path, "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise StorageError(f"{file.path}: cannot be read: {error.strerror}") from error
    with stream:
        size = os.fstat(stream.fileno()).st_size
        if size != file.bytes:
            raise StorageError(
                f"{file.path}: has {size:,} bytes now and had {file.bytes:,} when the stream was made; files must stay "
                "as they are while they are read. Make the stream again"
            )
        yield stream


def check_unchanged(file: InputFile) -> Path:
    """The file's path, for libraries that open it themselves."""
    with opened(file):
        return Path(file.path)


def delimited_pieces(span: Span, delimiter: bytes) -> Iterator[tuple[bytes, int]]:
    """The records of a span of a file of bytes, some whole ones at a time, and the byte at which they begin."""
    path = Path(span.file.path)
    with opened(span.file) as file:
        if ranges.is_compressed(path):
            # One span, whose bytes are counted after decompression.
            found = ranges.compressed_blocks(path, delimiter, READ_BYTES)
        else:
            found = _pieces(file, span, delimiter)
        for data, position in found:
            yield data.tobytes(), position


def _pieces(file: BinaryIO, span: Span, delimiter: bytes) -> Iterator[tuple[NDArray[np.uint8], int]]:
    if not span.file.bytes:
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        bounds = ranges.starting_in(content, span.start, span.stop, delimiter)
    if bounds is not None:
        yield from ranges.blocks_of(FileBytes(file, span.file), *bounds, delimiter, READ_BYTES)


class FileBytes:
    """The bytes of an open file, read where they are asked for: as an array of them, but no map, which would end the
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
                    f"{self._found.path}: became shorter while it was read; make the stream again"
                )
            content += piece
        return np.frombuffer(content, dtype=np.uint8)
