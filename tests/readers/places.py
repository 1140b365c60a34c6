"""What tests of readers need beside the files: the fields of one file, and places as messages name them."""

from pathlib import Path

from headrace.format.fields import Field
from headrace.readers.formats import InputFormat, format_of
from headrace.readers.found import find_fields
from headrace.readers.inputs import InputFile


def infer(path: Path, kind: InputFormat | None = None) -> dict[str, Field]:
    """The fields that a build would infer from this file alone."""
    found = kind or format_of(path)
    assert found is not None
    return find_fields([InputFile(str(path), found, 0)], {}).fields


def place(content: bytes, position: int) -> str:
    line = content[:position].count(b"\n") + 1
    return f"line {line:,}, byte {position}"


def byte_of(where: str) -> int:
    """'line 3, byte 17' -> 17."""
    return int(where.rpartition("byte ")[2])


def without_remedies(bad: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Bad records with what is wrong, but not what to do about it."""
    return [(where, reason.partition(";")[0]) for where, reason in bad]
