"""What the kernel does, in NumPy: used where there is no compiler, and to test the kernel against."""

import ctypes
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.order import permutation
from headrace.order.distinct import distinct
from headrace.pack.documents import DocumentPacking, PackedDocuments, Pieces

TYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
"""Stored types of tokens; the type of a piece is an index into this list."""

_DTYPES = [np.dtype(name) for name in TYPES]


def view(address: int, dtype: Any, count: int) -> NDArray[Any]:
    """The array at an address, whose memory the caller must keep alive."""
    dtype = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def bounds(
    record: NDArray[np.int64],
    part: NDArray[np.int64],
    first_record: NDArray[np.int64],
    offsets: NDArray[np.uint64],
    elements: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
) -> int:
    """Where each record's elements lie within its part. Returns -1, or the first record with damaged offsets."""
    for number in distinct(part):
        where = np.flatnonzero(part == number)
        table = view(
            int(offsets[number]), np.uint64, int(first_record[number + 1] - first_record[number]) + 1
        )
        local = record[where] - first_record[number]
        begin[where], end[where] = table[local], table[local + 1]
    damaged = (begin < 0) | (begin > end) | (end > elements[part])
    return int(np.argmax(damaged)) if damaged.any() else -1


def search(
    element: NDArray[np.int64],
    part: NDArray[np.int64],
    first_record: NDArray[np.int64],
    offsets: NDArray[np.uint64],
    document: NDArray[np.int64],
) -> int:
    """The number within its part of the last document that begins at or before each element."""
    for number in distinct(part):
        where = np.flatnonzero(part == number)
        count = int(first_record[number + 1] - first_record[number])
        if not count:
            return int(where[0])
        starts = view(int(offsets[number]), np.uint64, count)
        document[where] = np.searchsorted(starts, element[where].astype(np.uint64), side="right") - 1
    return -1


def locate(
    record: NDArray[np.int64],
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    whole: NDArray[np.int64],
    first_record: NDArray[np.int64],
    offsets: NDArray[np.uint64],
    values: NDArray[np.uint64],
    elements: NDArray[np.int64],
    itemsize: int,
    address: NDArray[np.uint64],
    more: NDArray[np.bool_],
) -> int:
    """Where `length` elements of each record lie, from its `start` on. Returns -1, or the first that is not found."""
    parts = np.searchsorted(first_record, record, side="right") - 1
    known = (record >= 0) & (parts < len(offsets))
    known[known] = offsets[parts[known]] != 0
    begin, end = np.zeros_like(record), np.full_like(record, -1)
    some = np.flatnonzero(known)
    found, to = begin[some], end[some]
    damaged = bounds(record[some], parts[some], first_record, offsets, elements, found, to)
    begin[some], end[some] = found, to
    if damaged >= 0:
        end[some[damaged]] = begin[some[damaged]] - 1
    wrong = (end - begin != whole) | (start < 0) | (length < 0) | (start + length > whole)
    if wrong.any():
        return int(np.argmax(wrong))
    address[:] = values[parts] + (begin + start).astype(np.uint64) * np.uint64(itemsize)
    more[:] = start + length < whole
    return -1


def permute(
    position: NDArray[np.int64], size: NDArray[np.int64], key: NDArray[np.uint64], out: NDArray[np.int64]
) -> int:
    """A permutation for each position, or one for all. Returns -1, or the first that is out of range."""
    outside = (position < 0) | (position >= size)
    if outside.any():
        return int(np.argmax(outside))
    out[:] = permutation.permute(position, size, key)
    return -1


def pack_groups(
    groups: Sequence[DocumentPacking],
    which: NDArray[np.int64],
    rows: NDArray[np.int64],
    keys: NDArray[np.uint64] | None,
) -> Pieces:
    """The pieces of rows of several packings: row i is the row `rows[i]` of `groups[which[i]]`."""
    if len(groups) == 1:
        return groups[0].pieces_of(rows, keys)
    nothing = np.empty(0, dtype=np.int64)
    columns: list[list[NDArray[np.int64]]] = [[nothing] for _ in fields(Pieces)]
    for number, documents in enumerate(groups):
        where = np.flatnonzero(which == number)
        found = documents.pieces_of(rows[where], None if keys is None else keys[where])
        in_rows = replace(found, row=where[found.row])
        for column, values in zip(columns, vars(in_rows).values(), strict=True):
            column.append(values)
    joined = [np.concatenate(column) for column in columns]
    order = np.argsort(joined[0], kind="stable")
    return Pieces(*(column[order] for column in joined))


def look_up(
    tables: Sequence[NDArray[np.int64]],
    which: NDArray[np.int64],
    index: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    """out[i] = tables[which[i]][index[i]]. Returns -1, or the first that is in no table."""
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    outside = (which < 0) | (which >= len(sizes))
    outside[~outside] = (index[~outside] < 0) | (index[~outside] >= sizes[which[~outside]])
    if outside.any():
        return int(np.argmax(outside))
    for number in distinct(which):
        where = np.flatnonzero(which == number)
        out[where] = tables[number][index[where]]
    return -1


def count_rows(
    lengths: NDArray[np.int64],
    bounds: NDArray[np.int64],
    seq_lens: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """How many rows the documents bounds[u] to bounds[u + 1] make, by best fit, for each unit u and each seq_len."""
    for unit, (first, last) in enumerate(pairwise(bounds.tolist())):
        histogram = np.unique(lengths[first:last], return_counts=True)
        rows[unit] = [PackedDocuments(*histogram, seq_len).rows for seq_len in seq_lens.tolist()]


def copy(address: NDArray[np.uint64], bytes: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Copy the bytes at these addresses, end to end."""
    at = 0
    for start, size in zip(address.tolist(), bytes.tolist(), strict=True):
        out[at : at + size] = view(start, np.uint8, size)
        at += size


def fill(
    rows: int,
    seq_len: int,
    first: int,
    begin: int,
    end: int,
    row: NDArray[np.int64],
    length: NDArray[np.int64],
    address: NDArray[np.uint64],
    type: NDArray[np.uint8],
    more: NDArray[np.bool_],
    shifted: bool,
    pad: int,
    ignore: int,
    tokens: NDArray[Any] | None,
    labels: NDArray[Any] | None,
    position_ids: NDArray[Any] | None,
    segment_ids: NDArray[np.int32] | None,
    loss_mask: NDArray[np.bool_] | None,
    bounds: NDArray[np.int32] | None,
) -> tuple[int, int]:
    """Copy pieces of documents into rows, and fill the other fields.

    Returns how many bounds were written, and the longest distance between two of them.
    """
    rows_of = _RowWriter(
        seq_len,
        {
            "tokens": tokens,
            "labels": labels,
            "position_ids": position_ids,
            "segment_ids": segment_ids,
            "loss_mask": loss_mask,
        },
    )
    narrow = _are_narrow(tokens, labels)
    columns = (column[begin:end].tolist() for column in (row, length, address, type, more))
    for to, count, start, code, goes_on in zip(*columns, strict=True):
        while rows_of.current < to - first:
            rows_of.end(pad, ignore)
        stored = view(start, _DTYPES[code], count + bool(goes_on and shifted))
        limits = np.iinfo(np.int32)
        if narrow and (stored.min() < limits.min or stored.max() > limits.max):
            raise OverflowError("a token does not fit into int32")
        labelled = slice(0, len(stored) - 1) if shifted else slice(1, count)
        known, counted = np.full(count, ignore, dtype=np.int64), np.zeros(count, dtype=bool)
        known[labelled], counted[labelled] = stored[1:], True
        rows_of.put(stored[:count], known, counted)
    while rows_of.current < rows:
        rows_of.end(pad, ignore)
    return rows_of.write_bounds(bounds), rows_of.longest


def _are_narrow(*arrays: NDArray[Any] | None) -> bool:
    return any(array is not None and array.itemsize == 4 for array in arrays)


class _RowWriter:
    """The rows of a batch while they are being filled, one stretch after another."""

    def __init__(self, seq_len: int, arrays: dict[str, NDArray[Any] | None]) -> None:
        self._seq_len = seq_len
        self._flat = {name: array.reshape(-1) for name, array in arrays.items() if array is not None}
        self.ends, self.longest, self.current, self._segment = [0], 0, 0, 0

    def put(self, tokens: Any, labels: Any, counted: Any) -> None:
        """Write a document, or a piece of one."""
        self._segment += 1
        self._write(len(labels), tokens, labels, counted, self._segment)

    def end(self, pad: int, ignore: int) -> None:
        """Pad the current row to its end."""
        self._write((self.current + 1) * self._seq_len - self.ends[-1], pad, ignore, False, 0)
        self.current, self._segment = self.current + 1, 0

    def write_bounds(self, bounds: NDArray[np.int32] | None) -> int:
        """Write where the stretches end, if that is asked for, and return how many bounds were written."""
        if bounds is None:
            return 0
        bounds[: len(self.ends)] = self.ends
        return len(self.ends)

    def _write(self, count: int, tokens: Any, labels: Any, counted: Any, segment: int) -> None:
        if not count:
            return
        values = {"tokens": tokens, "labels": labels, "position_ids": np.arange(count)}
        values |= {"segment_ids": segment, "loss_mask": counted}
        at = self.ends[-1]
        for name, array in self._flat.items():
            array[at : at + count] = values[name]
        self.ends.append(at + count)
        self.longest = max(self.longest, count)
