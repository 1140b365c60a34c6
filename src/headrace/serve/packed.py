"""A batch as bytes, for the way between machines: a head that says what the fields are, and the bytes of their arrays.

    {"tokens": int64 [32, 2048], "names": ["a", "b", ...]}

    head        [[["<i8", [32, 2048], 0, "array"]], {"tokens": array 0, "names": ["a", "b", ...]}]
    body        524,288 bytes

Nothing is pickled. A batch can hold arrays, NumPy scalars, tensors, numbers, texts, bytes, None, and lists, tuples and
dicts of these; anything else is refused where it is made. What comes from the wire is checked before it is used: sizes
against the body, types against a list, the depth and number of values against bounds.
"""

import math
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError, StageError

ALIGNMENT = 64
MOST_HEAD_BYTES = 16 * 2**20
_USUAL_HEAD_BYTES = 4096
MOST_ARRAYS = 2**16
MOST_DIMENSIONS = 32
MOST_DEPTH = 16
_KINDS = "biufcSUMm"
"""The NumPy types that a batch may hold: numbers, fixed texts and times, but no objects and no records."""
_TYPE = re.compile(rf"[<>|][{_KINDS}]\d{{1,9}}(\[\d{{0,9}}[a-zA-Z]{{1,3}}\])?")
"""How NumPy writes them. It takes other texts for types as well, some of them with a warning."""
_FURTHER_TYPES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "int4",
    "uint4",
)
"""Types of the package ml_dtypes, which JAX and others use."""
_ARRAY, _TUPLE, _INTEGER = 1, 2, 3
_MOST_DIGITS = 1000
_NUMBER = struct.Struct("<I")


class DamagedBatchError(HeadraceError, ValueError):
    """Bytes that are not a batch."""


class ArrayHead(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Its first byte in the body."""
    form: str = "array"
    """Or "scalar" for a NumPy scalar, or "tensor" for one of PyTorch."""


class Head(msgspec.Struct, frozen=True, array_like=True):
    arrays: list[ArrayHead]
    fields: dict[str, Any]


class Packed(msgspec.Struct, frozen=True):
    """A batch, ready to be sent: the head, and the arrays whose bytes are the body, each from its `start` on."""

    head: bytes
    arrays: list[NDArray[Any]]
    starts: list[int]
    body_bytes: int

    def write(self, body: NDArray[np.uint8]) -> None:
        """Copy the arrays to where they belong."""
        for array, start in zip(self.arrays, self.starts, strict=True):
            body[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)


def pack(batch: Mapping[str, Any]) -> Packed:
    """A StageError names the field that holds something that cannot be sent."""
    packer = _Packer()
    fields = {str(name): packer.value(str(name), value, 0) for name, value in batch.items()}
    try:
        head = _encoder.encode(Head(packer.heads, fields))
    except (OverflowError, UnicodeEncodeError) as error:
        raise StageError(
            f"a batch with the fields {', '.join(fields)} cannot be sent: {error}; use other values"
        ) from None
    if len(head) > MOST_HEAD_BYTES:
        raise StageError(
            f"the lists and texts of a batch have {len(head):,} bytes: at most {MOST_HEAD_BYTES:,} can be sent; "
            "use arrays instead"
        )
    return Packed(head, packer.arrays, [each.start for each in packer.heads], packer.used)


class _Packer:
    def __init__(self) -> None:
        self.arrays: list[NDArray[Any]] = []
        self.heads: list[ArrayHead] = []
        self.used = 0

    def value(self, field: str, value: Any, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise StageError(
                f"field {field!r}: its values are nested more than {MOST_DEPTH} deep, and cannot be sent"
            )
        kind = type(value)
        if kind in (str, bytes, float, bool) or value is None:
            return value
        if kind is int and abs(value) < 10 ** (_MOST_DIGITS - 2):
            return value if -(2**63) <= value < 2**64 else msgspec.msgpack.Ext(_INTEGER, str(value).encode())
        if kind in (np.ndarray, np.memmap):
            return self._array(field, value, "array")
        if isinstance(value, np.generic):
            return self._array(field, np.asarray(value), "scalar")
        if kind is list:
            return [self.value(field, each, depth + 1) for each in value]
        if kind is tuple:
            inside = [self.value(field, each, depth + 1) for each in value]
            return msgspec.msgpack.Ext(_TUPLE, _encoder.encode(inside))
        if kind is dict and all(type(name) is str for name in value):
            return {name: self.value(field, each, depth + 1) for name, each in value.items()}
        if _is_tensor(value):
            return self._array(field, _numpy_of(field, value), "tensor")
        raise StageError(
            f"field {field!r} holds {kind.__module__}.{kind.__qualname__}, which cannot be sent to another machine; "
            "let the last function return arrays, numbers, texts, bytes, or lists of them"
        )

    def _array(self, field: str, array: NDArray[Any], form: str) -> msgspec.msgpack.Ext:
        try:
            name = _name_of(array.dtype)
        except DamagedBatchError:
            raise StageError(
                f"field {field!r} is an array of {array.dtype}, which cannot be sent to another machine; let the last "
                "function return numbers"
            ) from None
        if len(self.arrays) == MOST_ARRAYS:
            raise StageError(f"field {field!r}: a batch of more than {MOST_ARRAYS:,} arrays cannot be sent")
        # An array of no dimensions would become one of one.
        whole = array if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape)
        self.arrays.append(whole)
        self.heads.append(ArrayHead(name, array.shape, self.used, form))
        self.used += -(-whole.nbytes // ALIGNMENT) * ALIGNMENT
        return msgspec.msgpack.Ext(_ARRAY, _NUMBER.pack(len(self.arrays) - 1))


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _numpy_of(field: str, tensor: Any) -> NDArray[Any]:
    try:
        found: NDArray[Any] = tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise StageError(
            f"field {field!r} is a tensor that cannot be sent to another machine: {error}; let the last function "
            "return a dense tensor on the CPU, of a type that NumPy has"
        ) from None
    return found


def _name_of(dtype: np.dtype[Any]) -> str:
    """How the type is written in a head."""
    if dtype.kind in _KINDS and dtype.names is None and dtype.isbuiltin != 2:
        return dtype.str
    if dtype.name in _FURTHER_TYPES:
        return dtype.name
    raise DamagedBatchError(f"type {dtype}")


# The other way


def unpack(head: bytes, body: NDArray[np.uint8]) -> dict[str, Any]:
    """The batch whose arrays are views of `body`. A DamagedBatchError if the two are not what `pack` makes."""
    parsed = (
        _usual_head(head, len(body)) if len(head) <= _USUAL_HEAD_BYTES else _checked_head(head, len(body))
    )
    arrays = [_view(each, body) for each in parsed.arrays]
    try:
        return {name: _opened(value, arrays, 0) for name, value in parsed.fields.items()}
    except RecursionError:
        raise DamagedBatchError("a batch whose values are nested too deep") from None


def _checked_head(head: bytes, body_bytes: int) -> Head:
    parsed = parse_head(head)
    check_size(parsed, body_bytes)
    return parsed


_usual_head = lru_cache(maxsize=64)(_checked_head)
"""Batches of the same shapes have the same head."""


def parse_head(head: bytes) -> Head:
    if len(head) > MOST_HEAD_BYTES:
        raise DamagedBatchError(f"a head of {len(head):,} bytes: at most {MOST_HEAD_BYTES:,} are expected")
    try:
        parsed = _decoder.decode(head)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise DamagedBatchError(f"a head that cannot be read: {error}") from None
    if len(parsed.arrays) > MOST_ARRAYS:
        raise DamagedBatchError(
            f"a batch of {len(parsed.arrays):,} arrays: at most {MOST_ARRAYS:,} are expected"
        )
    return parsed


def check_size(head: Head, body_bytes: int) -> None:
    """Check that all arrays lie in the body, before anything is done with them."""
    for each in head.arrays:
        if len(each.shape) > MOST_DIMENSIONS or any(side < 0 for side in each.shape):
            raise DamagedBatchError(f"an array of the shape {each.shape[:MOST_DIMENSIONS]}")
        size = math.prod(each.shape) * _dtype_of(each.dtype).itemsize
        if each.start < 0 or each.start % ALIGNMENT or each.start + size > body_bytes:
            raise DamagedBatchError(
                f"an array of {size:,} bytes from byte {each.start:,} on, in a body of {body_bytes:,} bytes"
            )
        if each.form not in ("array", "scalar", "tensor") or (each.form == "scalar" and each.shape):
            raise DamagedBatchError(f"an array of the form {each.form[:20]!r}")


@lru_cache(maxsize=64)
def _dtype_of(name: str) -> np.dtype[Any]:
    if name in _FURTHER_TYPES:
        try:
            import ml_dtypes
        except ImportError:
            raise DamagedBatchError(f"an array of {name}: that needs the package ml_dtypes") from None
        further: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return further
    try:
        dtype = np.dtype(name) if _TYPE.fullmatch(name) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in _KINDS or dtype.names is not None or dtype.subdtype is not None:
        raise DamagedBatchError(f"an array of the type {name[:40]!r}")
    return dtype


def _view(head: ArrayHead, body: NDArray[np.uint8]) -> Any:
    dtype = _dtype_of(head.dtype)
    array = np.ndarray(head.shape, dtype, body, head.start)
    if head.form == "scalar":
        return array[()]
    if head.form == "array":
        return array
    try:
        import torch
    except ImportError:
        raise DamagedBatchError("a batch with tensors: PyTorch is not installed here") from None
    return torch.from_numpy(array)


def _opened(value: Any, arrays: Sequence[Any], depth: int) -> Any:
    if depth > 2 * MOST_DEPTH:
        raise DamagedBatchError("a batch whose values are nested too deep")
    if isinstance(value, list):
        return [_opened(each, arrays, depth + 1) for each in value]
    if isinstance(value, dict):
        return {name: _opened(each, arrays, depth + 1) for name, each in value.items()}
    if not isinstance(value, msgspec.msgpack.Ext):
        return value
    data = bytes(value.data)
    try:
        if value.code == _ARRAY:
            return arrays[_NUMBER.unpack(data)[0]]
        if value.code == _INTEGER and len(data) < _MOST_DIGITS:
            return int(data)
        if value.code == _TUPLE:
            inside = msgspec.msgpack.decode(data, type=list)
            return tuple(_opened(each, arrays, depth + 1) for each in inside)
    except (struct.error, IndexError, ValueError, msgspec.DecodeError) as error:
        raise DamagedBatchError(f"a batch with a damaged value: {error}") from None
    raise DamagedBatchError(f"a batch with a value of an unknown kind, {value.code}")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Head)
