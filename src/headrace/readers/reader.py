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
from typing import TYPE_CHECKING, Protocol, cast

from headrace.errors import FieldError, SettingsError
from headrace.format.fields import Field, FieldKind
from headrace.readers.bounds import MAX_RECORD_BYTES
from headrace.readers.columns import Block, ReportBad
from headrace.readers.formats import InputFormat
from headrace.readers.raw_file import RawFile

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
    inferred: tuple[str, ...] = ()
    """The fields whose type was inferred: values that the type would change are bad."""
    all_columns: bool = False
    """Whether the fields are all columns that were found: a record with another one is bad."""
    max_record_bytes: int = MAX_RECORD_BYTES
    split: Split = Split.FILE
    separator: bytes = b""
    block_bytes: int = 8 * 2**20


@dataclass(frozen=True)
class FoundColumn:
    """What a file says about one of its columns."""

    fields: tuple[Field, ...] = ()
    """The fields that can hold it without changing a value, the best one first."""
    problem: str = ""
    """Why no field can hold it."""
    is_missing: bool = False
    """Whether all values are missing: then any field of another file will do."""
    has_texts: bool = False
    """Whether some values are texts. Only formats in which each value has a type of its own say so."""
    note: str = ""
    """What seems odd about it, if anything, and what to do."""


_WIDER = {
    "int8": ("int16", "int32", "int64"),
    "int16": ("int32", "int64"),
    "int32": ("int64",),
    "uint8": ("uint16", "uint32", "uint64"),
    "uint16": ("uint32", "uint64"),
    "uint32": ("uint64",),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
    "complex64": ("complex128",),
}
"""For each dtype, those of the same kind that hold all of its values."""


def widening(field: Field) -> tuple[Field, ...]:
    """A field, and the wider ones that hold the same values."""
    if field.kind is FieldKind.BYTES:
        return (field,)
    dtypes = (field.dtype, *_WIDER.get(field.dtype, ()))
    return tuple(Field(field.kind, dtype, field.shape) for dtype in dtypes)


class Reader(Protocol):
    def plan(self, raw: RawFile, target_bytes: int, options: ReadOptions) -> list[tuple[int, int]]:
        """Cut the file into one or more ranges of about `target_bytes` each."""
        ...

    def fingerprint(self, raw: RawFile, start: int, stop: int) -> str:
        """A checksum of the content of a range: different content has a different fingerprint."""
        ...

    def look(self, raw: RawFile) -> dict[str, FoundColumn]:
        """The columns of the file, and the fields that they can become in a build without a tokenizer."""
        ...

    def read(
        self, raw: RawFile, start: int, stop: int, options: ReadOptions, report_bad: ReportBad
    ) -> Iterator[Block]:
        """The records of a range, a few megabytes at a time."""
        ...

    def is_whole(self, raw: RawFile, split: Split) -> bool:
        """Whether a stream must read the file from its beginning, so that the whole file is one span."""
        ...

    def span_reader(self, options: "RecordOptions") -> "SpanReader":
        """An object that reads records as dicts, for a stream."""
        ...


def choose_columns(raw: RawFile, there: Sequence[str], columns: Sequence[str]) -> list[str]:
    """The named columns, or all columns of the file if none are named."""
    for name in columns:
        if name not in there:
            listed = ", ".join(map(repr, there[:50])) or "none"
            raise FieldError(f"{raw}: no column {name!r}; the columns are {listed}")
    return list(columns or there)


def reader_for(input_format: InputFormat) -> Reader:
    """The module that reads a format. It is imported here, so that a build of text files does not load Arrow."""
    try:
        kind = InputFormat(input_format)
    except ValueError:
        raise SettingsError(f"format {input_format!r}: must be one of {', '.join(InputFormat)}") from None
    return cast(Reader, importlib.import_module(f"headrace.readers.{kind.value}"))
