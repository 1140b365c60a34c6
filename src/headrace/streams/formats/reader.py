"""What a format must offer: the records of a block, some at a time."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from headrace.errors import StorageError
from headrace.readers.columns import ReportBad
from headrace.readers.inputs import InputFile
from headrace.readers.reader import InputFormat
from headrace.streams.blocks import Block
from headrace.streams.settings import StreamSettings

Record = dict[str, Any]


class BlockReader(Protocol):
    """One consumer's, for one iteration: it may remember what it has seen of the files."""

    def read(self, block: Block, report_bad: ReportBad) -> Iterator[list[Record]]: ...


class Readers:
    """The reader of each format, made when it is first asked for: so text does not load Arrow."""

    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings
        self._made: dict[InputFormat, BlockReader] = {}

    def __getitem__(self, format: InputFormat) -> BlockReader:
        if format not in self._made:
            module = importlib.import_module(f"headrace.streams.formats.{format.value}")
            self._made[format] = module.Reader(self._settings)
        return self._made[format]


@contextlib.contextmanager
def opened(file: InputFile) -> Iterator[BinaryIO]:
    """The file, if it is still the one that was found: its blocks are cut by the size it had then."""
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
