"""What a file format must offer.

A format is a member of `InputFormat` (`formats.py`) and a module in this folder. The module is a `Reader`: builds use
it to read columns, streams to read dicts.

For a build, it cuts a file into ranges in a unit of its own (bytes, row groups, batches or rows), which are a pure
function of the file and the target size. Each range can be read on its own, in any process, and has a fingerprint of
the bytes or values in it. For a stream, it gives the records that start in any span of the file's bytes.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from headrace.errors import FieldError, SettingsError
from headrace.format.fields import Field
from headrace.readers.columns import Block, ReportBad
from headrace.readers.formats import InputFormat

if TYPE_CHECKING:
    from headrace.readers.spans import RecordOptions, SpanReader


class Split(StrEnum):
    """What one document of a text file is."""

    FILE = "file"
    LINE = "line"
    SEPARATOR = "separator"


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """With a `text_field`, only that column is handed over, as Texts; otherwise the columns in `fields` are."""

    text_field: str | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)
    split: Split = Split.FILE
    separator: bytes = b""
    block_bytes: int = 8 * 2**20


class Reader(Protocol):
    def plan(self, path: Path, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
        """Cut the file into one or more ranges of about `target_bytes` each."""
        ...

    def fingerprint(self, path: Path, start: int, stop: int) -> str:
        """A checksum of the content of a range: different content has a different fingerprint."""
        ...

    def infer(self, path: Path, columns: Sequence[str] = ()) -> dict[str, Field]:
        """The fields that the file's columns become in a build without a tokenizer; if `columns` are named, only
        those."""
        ...

    def read(
        self, path: Path, start: int, stop: int, options: ReadOptions, report_bad: ReportBad
    ) -> Iterator[Block]:
        """The records of a range, a few megabytes at a time."""
        ...

    def is_whole(self, path: Path, split: Split) -> bool:
        """Whether a stream must read the file from its beginning, so that the whole file is one span."""
        ...

    def span_reader(self, options: "RecordOptions") -> "SpanReader":
        """An object that reads records as dicts, for a stream."""
        ...


def choose_columns(path: Path, there: Sequence[str], columns: Sequence[str]) -> list[str]:
    """The named columns, or all columns of the file if none are named."""
    for name in columns:
        if name not in there:
            listed = ", ".join(map(repr, there[:50])) or "none"
            raise FieldError(f"{path}: no column {name!r}; the columns are {listed}")
    return list(columns or there)


def reader_for(input_format: InputFormat) -> Reader:
    """The module that reads a format. It is imported here, so that a build of text files does not load Arrow."""
    try:
        kind = InputFormat(input_format)
    except ValueError:
        raise SettingsError(f"format {input_format!r}: must be one of {', '.join(InputFormat)}") from None
    return cast(Reader, importlib.import_module(f"headrace.readers.{kind.value}"))
