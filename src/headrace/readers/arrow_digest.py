"""Checksums of Arrow arrays: of their values, and of no other bytes of their buffers."""

from typing import Any

import numpy as np
import pyarrow as pa

_BITS_OF_A_BYTE = 8
_VIEWS = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}


def update(digest: Any, array: Any) -> None:
    """Add the values of an array to a checksum. Its buffers may continue with values of the next batch, which do not
    count."""
    if isinstance(array.type, pa.BaseExtensionType):
        update(digest, array.storage)
        return
    digest.update(b"%d %d " % (len(array), array.null_count))
    if array.null_count:
        digest.update(array.is_null().to_numpy(zero_copy_only=False))
    _update_by_type(digest, array)


def _update_by_type(digest: Any, array: Any) -> None:
    kind = array.type
    if pa.types.is_dictionary(kind):
        update(digest, array.indices)
        update(digest, array.dictionary)
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            update(digest, array.field(number))
    elif pa.types.is_fixed_size_list(kind):
        update(digest, array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size))
    elif not len(array):
        return
    elif _has_offsets(kind):
        _update_by_offsets(digest, array)
    elif str(kind) in _VIEWS:
        update(digest, array.cast(_VIEWS[str(kind)]))
    elif width := _width(kind):
        buffer = array.buffers()[1] or b""
        digest.update(buffer[array.offset * width : (array.offset + len(array)) * width])
    else:
        # Bits and unusual types: as Arrow writes them to a file, which is without the other values of the buffers.
        digest.update(pa.record_batch([array], ["values"]).serialize())


def _width(kind: Any) -> int:
    """The bytes of one value, or 0 if they are not whole or not always as many."""
    is_fixed = pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind)
    return int(kind.bit_width // _BITS_OF_A_BYTE) if is_fixed else 0


def _has_offsets(kind: Any) -> bool:
    is_plain = str(kind) in ("string", "binary", "large_string", "large_binary")
    return is_plain or _is_list(kind)


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _update_by_offsets(digest: Any, array: Any) -> None:
    """Lists, strings and bytes: the lengths of the items, and then the values in them."""
    kind = array.type
    is_large = pa.types.is_large_list(kind) or str(kind).startswith("large_")
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int64 if is_large else np.int32)
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    digest.update(offsets - offsets[0])
    first, last = int(offsets[0]), int(offsets[-1])
    if _is_list(kind):
        update(digest, array.values.slice(first, last - first))
    elif last > first:
        digest.update(array.buffers()[2][first:last])
