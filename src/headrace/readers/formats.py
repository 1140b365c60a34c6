"""The formats that files can have, and how their names tell. A format is a member here, and a module of its name."""

from enum import StrEnum
from pathlib import Path
from typing import Self


class InputFormat(StrEnum):
    """The name of a format, which is also that of its module, and the endings of its files."""

    endings: tuple[str, ...]

    def __new__(cls, name: str, *endings: str) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.endings = endings
        return member

    TEXT = "text", ".txt", ".md", ".text"
    JSONL = "jsonl", ".jsonl", ".ndjson", ".json"
    CSV = "csv", ".csv", ".tsv"
    PARQUET = "parquet", ".parquet", ".pq"
    ARROW = "arrow", ".arrow", ".feather", ".ipc"
    NPY = "npy", ".npy"


_ENDINGS = {ending: kind for kind in InputFormat for ending in kind.endings}
COMPRESSED = (".gz", ".zst")


def format_of(path: Path) -> InputFormat | None:
    """The format that a file's name indicates, or None."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return _ENDINGS.get(suffixes[-1]) if suffixes else None
