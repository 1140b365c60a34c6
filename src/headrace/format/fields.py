"""What a dataset's records are made of.

A field has one of three kinds, and a short notation, which users type and errors print:

    fixed    "float32[3,32,32]", "int64"     the same shape in every record
    ragged   "uint16[*]", "float32[*,80]"    a first dimension that differs from record to record
    bytes    "bytes"                         an opaque string: an encoded image, a text

>>> Field.parse("float32[*,80]")
Field(kind=<FieldKind.RAGGED: 'ragged'>, dtype='float32', shape=(80,))
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from headrace.errors import FormatError, SettingsError

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
MAX_DIMENSIONS = 16
MAX_RECORDS = 2**32 - 1
"""The most records that one shard can have."""

MAX_LENGTH = 2**32 - 1
"""The longest record of a ragged or bytes field, in elements."""
MAX_SIZE = 2**48
"""The largest size of a dimension, and the most bytes of an element."""

# A lone surrogate cannot be encoded as UTF-8, so such a name could be neither printed nor stored.
_NAME = re.compile(r"[^/\x00-\x1f\x7f\ud800-\udfff]{1,255}")
FIELD_NAME_RULE = "must be 1 to 255 characters without '/' or control characters"
_NOTATION = re.compile(r"(?P<dtype>[a-z0-9]+)(\[(?P<dims>[^\]]*)\])?")


class FieldKind(StrEnum):
    FIXED = "fixed"
    RAGGED = "ragged"
    BYTES = "bytes"


@dataclass(frozen=True)
class Field:
    """`shape` is one record's shape; for a ragged field, the shape after the first, free dimension."""

    kind: FieldKind
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in list(FieldKind):
            raise SettingsError(f"kind {self.kind!r}: must be one of {', '.join(FieldKind)}")
        object.__setattr__(self, "kind", FieldKind(self.kind))
        object.__setattr__(self, "shape", tuple(self.shape))
        # A NumPy dtype is equal to its name, but is not the string that goes into the header.
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise SettingsError(f"dtype {str(self.dtype)[:80]!r}: must be one of {', '.join(DTYPES)}")
        self._check_shape()
        if self.kind is FieldKind.BYTES and (self.dtype, self.shape) != ("uint8", ()):
            raise SettingsError("a bytes field must have dtype uint8 and no shape")

    def _check_shape(self) -> None:
        if len(self.shape) > MAX_DIMENSIONS or not all(_is_size(size) for size in self.shape):
            raise SettingsError(
                f"shape {str(self.shape)[:200]}: must have at most {MAX_DIMENSIONS} dimensions, "
                "each of size 0 to 2^48 - 1"
            )
        # Zeros are left out: NumPy refuses shapes whose other sizes multiply to more than it can address.
        if math.prod(size or 1 for size in self.shape) * self.numpy_dtype.itemsize > MAX_SIZE:
            raise SettingsError(f"shape {self.shape} of {self.dtype}: an element has more than 2^48 bytes")

    @staticmethod
    def parse(notation: "str | Field") -> "Field":
        if isinstance(notation, Field):
            return notation
        compact = str(notation).replace(" ", "")
        if compact == "bytes":
            return Field(FieldKind.BYTES, "uint8")
        match = _NOTATION.fullmatch(compact)
        if not match:
            raise SettingsError(
                f"field {notation!r}: write it like 'int64', 'float32[3,32,32]', 'uint16[*]' or 'bytes'"
            )
        dims = match["dims"].split(",") if match["dims"] else []
        kind = FieldKind.RAGGED if dims[:1] == ["*"] else FieldKind.FIXED
        sizes = dims[1:] if kind is FieldKind.RAGGED else dims
        if not all(re.fullmatch("[0-9]{1,15}", size) for size in sizes):
            raise SettingsError(
                f"field {notation!r}: sizes must be whole numbers, and only the first may be '*'"
            )
        return Field(kind, match["dtype"], tuple(map(int, sizes)))

    @property
    def notation(self) -> str:
        if self.kind is FieldKind.BYTES:
            return "bytes"
        dims = (["*"] if self.kind is FieldKind.RAGGED else []) + [str(size) for size in self.shape]
        return f"{self.dtype}[{','.join(dims)}]" if dims else self.dtype

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as stored on disk: little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def element_bytes(self) -> int:
        """The size of one element; for a fixed field, of one record."""
        return self.numpy_dtype.itemsize * math.prod(self.shape)

    @property
    def variable(self) -> bool:
        return self.kind is not FieldKind.FIXED

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "dtype": self.dtype, "shape": list(self.shape)}

    @staticmethod
    def from_json(value: Any) -> "Field":
        try:
            shape = value["shape"]
            if not (isinstance(shape, list) and all(type(size) is int for size in shape)):
                raise FormatError(f"shape {shape!r}: must be a list of whole numbers")
            if unknown := set(value) - {"name", "kind", "dtype", "shape"}:
                raise FormatError(f"unknown keys {sorted(unknown)}")
            return Field(value["kind"], value["dtype"], tuple(shape))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"damaged field description {str(value)[:200]}: {error}") from None


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 0 <= size < MAX_SIZE


def is_field_name(name: Any) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def parse_fields(fields: "Mapping[str, str | Field]") -> dict[str, Field]:
    """Check the fields that a user gave. Names may have any characters except '/' and control characters."""
    if not isinstance(fields, Mapping) or not fields:
        raise SettingsError(f"fields={fields!r}: must name at least one field, like {{'x': 'float32[8]'}}")
    for name in fields:
        if not is_field_name(name):
            raise SettingsError(f"field name {name!r}: {FIELD_NAME_RULE}")
    return {name: Field.parse(field) for name, field in fields.items()}
