"""Datasets of several parts in RAM, and what their rows hold, read back from memory."""

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from headrace.dataset.dataset import Dataset
from headrace.format.fields import parse_fields
from headrace.format.index import LengthTable
from headrace.format.ragged import Ragged
from headrace.rows.reference import TYPES
from headrace.rows.token_rows import Stretches


def in_parts(lengths: Sequence[Sequence[int]], dtype: str = "uint16") -> tuple[Dataset, list[list[int]]]:
    """A dataset in RAM with a part for each list, and its documents; no token comes twice."""
    flat = [length for part in lengths for length in part]
    ends = np.cumsum([0, *flat]).tolist()
    documents = [
        list(range(start + 1, start + length + 1)) for start, length in zip(ends, flat, strict=False)
    ]
    columns = []
    for part in lengths:
        first = sum(map(len, columns))
        items = [np.array(each, dtype=dtype) for each in documents[first : first + len(part)]]
        columns.append(Ragged.from_items(items, dtype))
    distinct, counts = np.unique(np.array(flat, dtype=np.int64), return_counts=True)
    table = LengthTable(
        distinct, np.cumsum([0, *counts]), np.argsort(np.array(flat, dtype=np.int64), kind="stable")
    )
    source = SimpleNamespace(
        name="parts in RAM",
        fields=parse_fields({"tokens": f"{dtype}[*]"}),
        part_records=[len(part) for part in lengths],
        elements={"tokens": sum(flat)},
        manifest=None,
        fingerprint="",
        part_elements=lambda field: [sum(part) for part in lengths],
        load_part=lambda number: {"tokens": columns[number]},
        length_table=lambda field: table,
    )
    return Dataset(source), documents


def tokens_at(address: int, code: int, count: int) -> list[int]:
    dtype = np.dtype(TYPES[code])
    return np.frombuffer(ctypes.string_at(address, count * dtype.itemsize), dtype=dtype).tolist()


def read(stretches: Stretches) -> dict[int, list[list[int]]]:
    """What each row holds, stretch by stretch, as memory has it."""
    rows: dict[int, list[list[int]]] = defaultdict(list)
    columns = (stretches.row, stretches.address, stretches.type, stretches.length)
    for row, address, code, length in zip(*(column.tolist() for column in columns), strict=True):
        rows[row].append(tokens_at(address, code, length))
    return dict(rows)


def next_tokens(stretches: Stretches) -> list[int | None]:
    """The token after each stretch, where there is more of its document."""
    columns = (stretches.more, stretches.address, stretches.type, stretches.length)
    return [
        tokens_at(address, code, length + 1)[-1] if more else None
        for more, address, code, length in zip(*(column.tolist() for column in columns), strict=True)
    ]
