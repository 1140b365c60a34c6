"""Reading a file back through a reader as people would want to look at it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.format.ragged import Ragged
from headrace.readers.columns import Strings, Texts
from headrace.readers.formats import format_of
from headrace.readers.raw_file import LocalRawFile
from headrace.readers.reader import ReadOptions, reader_for


@dataclass
class Gathered:
    columns: dict[str, list[Any]] = field(default_factory=dict)
    where: list[str] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    blocks: list[Any] = field(default_factory=list)
    input_bytes: int = 0


def gather_file(path: Path, target_bytes: int = 2**40, **settings: Any) -> Gathered:
    """All records of all ranges, as Python values: bytes, numbers, or lists."""
    options = ReadOptions(**settings)
    kind = format_of(path)
    assert kind is not None
    reader = reader_for(kind)
    gathered = Gathered()
    raw = LocalRawFile(path)
    ranges = reader.plan(raw, target_bytes, options)
    assert ranges
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))
    for start, stop in ranges:
        for block in reader.read(raw, start, stop, options, lambda *bad: gathered.bad.append(bad)):
            gathered.blocks.append(block)
            gathered.input_bytes += block.input_bytes
            gathered.where += [block.locate(record) for record in range(len(block))]
            for name, column in block.columns.items():
                values = gathered.columns.setdefault(name, [])
                values += _values(column)
                assert len(column) == len(block)
    return gathered


def _values(column: Any) -> list[Any]:
    if isinstance(column, Texts):
        assert column.starts.dtype == column.stops.dtype == np.int64
        return [column[i] for i in range(len(column))]
    if isinstance(column, Strings):
        return [item.encode() for item in column.items]
    if isinstance(column, Ragged):
        assert column.offsets.dtype == np.int64
        return [item.tolist() for item in column]
    return list(column.tolist())


@pytest.fixture(scope="session")
def gather() -> Callable[..., Gathered]:
    return gather_file


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bytes], Path]:
    """Write a file anew. The old one is unlinked first, not shortened: someone may still have it mapped."""
    folder = tmp_path_factory.mktemp("files")

    def write_file(name: str, content: bytes) -> Path:
        path = folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        return path

    return write_file
