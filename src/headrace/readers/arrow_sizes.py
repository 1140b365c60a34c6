"""How many bytes rows of Arrow arrays have when they are decoded, and parts of a batch by that size.

The bytes of an array do not tell: a dictionary with one text of a megabyte and a million references to it has five
megabytes, and a terabyte when each row has its own text.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.readers.bounds import Bound

_MOST_ROWS = 2**15
"""The most rows in one part."""
_BITS_OF_A_BYTE = 8


def row_slices(batch: Any, block_bytes: int, bound: Bound) -> Iterator[tuple[int, Any]]:
    """Parts of a batch of about `block_bytes` when decoded, each with its first row, without the rows that are beyond
    the bound. Nothing is copied. `bound.tell` is called with the row in the batch instead of a position."""
    sizes = None
    if _may_grow(batch) or batch.nbytes > min(block_bytes, bound.most):
        sizes = row_sizes(batch)
    first = 0
    while first < batch.num_rows:
        rows = _MOST_ROWS if sizes is None else _rows_that_fit(sizes[first:], block_bytes)
        if rows == 1 and sizes is not None and sizes[first] > bound.most:
            bound.tell(first, int(sizes[first]))
        else:
            part = batch.slice(first, rows)
            yield from _within(part, first, None if sizes is None else sizes[first : first + rows], bound)
        first += rows


def _rows_that_fit(sizes: NDArray[np.int64], block_bytes: int) -> int:
    """How many rows are about `block_bytes`, and at least one."""
    totals = np.cumsum(sizes[:_MOST_ROWS])
    return max(1, int(np.searchsorted(totals, block_bytes, side="right")))


def _within(
    part: Any, first: int, sizes: NDArray[np.int64] | None, bound: Bound
) -> Iterator[tuple[int, Any]]:
    """The runs of rows between those that are beyond the bound; usually the whole part."""
    long = [] if sizes is None else np.flatnonzero(sizes > bound.most).tolist()
    begin = 0
    for row in long:
        if row > begin:
            yield first + begin, part.slice(begin, row - begin)
        bound.tell(first + row, int(sizes[row]) if sizes is not None else 0)
        begin = row + 1
    if begin < part.num_rows:
        yield first + begin, part.slice(begin)


def row_sizes(batch: Any) -> NDArray[np.int64]:
    """The decoded size of each row."""
    total = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        total += _sizes(column)
    return total


def _sizes(array: Any) -> NDArray[np.int64]:
    if isinstance(array.type, pa.BaseExtensionType):
        return _sizes(array.storage)
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _of_dictionary(array)
    if pa.types.is_struct(kind):
        total = np.zeros(len(array), dtype=np.int64)
        for child in array.flatten():
            total += _sizes(child)
        return total
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return _of_lists(array)
    if pa.types.is_fixed_size_list(kind):
        inner = _sizes(array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size))
        of_lists: NDArray[np.int64] = inner.reshape(len(array), kind.list_size).sum(axis=1)
        return of_lists
    return _of_values(array)


def _of_dictionary(array: Any) -> NDArray[np.int64]:
    if not len(array.dictionary):
        return np.zeros(len(array), dtype=np.int64)
    indices = array.indices.fill_null(0) if array.indices.null_count else array.indices
    numbers = indices.to_numpy(zero_copy_only=False)
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(array.dictionary):
        raise pa.ArrowInvalid("an index into a dictionary is beyond its end")
    sizes: NDArray[np.int64] = _sizes(array.dictionary)[numbers]
    return sizes


def _of_lists(array: Any) -> NDArray[np.int64]:
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    totals = np.concatenate([[0], np.cumsum(_sizes(array.values.slice(first, last - first)))])
    sizes: NDArray[np.int64] = totals[offsets[1:] - first] - totals[offsets[:-1] - first]
    return sizes


def _of_values(array: Any) -> NDArray[np.int64]:
    name = str(array.type)
    if name in ("string_view", "binary_view"):
        array = array.cast(pa.large_string() if name == "string_view" else pa.large_binary())
    if name.removeprefix("large_") in ("string", "binary", "string_view", "binary_view"):
        return _byte_lengths(array)
    return np.full(len(array), _width(array), dtype=np.int64)


def _byte_lengths(array: Any) -> NDArray[np.int64]:
    if not len(array):
        return np.zeros(0, np.int64)
    width = np.int64 if str(array.type).startswith("large_") else np.int32
    offsets = np.frombuffer(array.buffers()[1], dtype=width)[array.offset : array.offset + len(array) + 1]
    return np.diff(offsets).astype(np.int64)


def _width(array: Any) -> int:
    try:
        return int(-(-array.type.bit_width // _BITS_OF_A_BYTE))
    except ValueError:
        return int(array.nbytes // max(len(array), 1))  # an unusual type: the average


def _may_grow(batch: Any) -> bool:
    return any(_has_dictionary(column.type) for column in batch.schema)


def _has_dictionary(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return bool(pa.types.is_dictionary(kind)) or any(map(_has_dictionary, inner))


def longest_in_dictionaries(array: Any) -> tuple[int, int]:
    """The most bytes of one value in the dictionaries of an array, and the number of values in the smallest one."""
    if isinstance(array.type, pa.BaseExtensionType):
        return longest_in_dictionaries(array.storage)
    if pa.types.is_dictionary(array.type):
        sizes = _sizes(array.dictionary)
        return int(sizes.max(initial=0)), len(sizes)
    children = _children(array)
    found = [longest_in_dictionaries(child) for child in children]
    return max((most for most, _ in found), default=0), min((count for _, count in found), default=2**62)


def _children(array: Any) -> list[Any]:
    if pa.types.is_struct(array.type):
        return list(array.flatten())
    is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    return [array.values] if is_list or pa.types.is_fixed_size_list(array.type) else []
