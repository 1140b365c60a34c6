"""Which Arrow types become which fields, and the errors for files that do not hold the columns that were asked for."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import FieldError, FormatError, HeadraceError, StorageError
from headrace.format.fields import Field, FieldKind
from headrace.readers.raw_file import RawFile
from headrace.readers.reader import FoundColumn, ReadOptions, widening

BYTES = Field(FieldKind.BYTES, "uint8")
MOST_PARSED_BYTES = 2**31 - 2**16
"""Arrow's parsers of text formats count the bytes of a block in 32 bits."""


_BYTES_TYPES = {
    "string",
    "large_string",
    "string_view",
    "binary",
    "large_binary",
    "binary_view",
    "fixed_size_binary",
}


@contextlib.contextmanager
def readable(raw: RawFile, what: str) -> Iterator[None]:
    """Turn the exceptions that Arrow raises for a damaged file into our own errors."""
    try:
        yield
    except HeadraceError:
        raise
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise StorageError(f"{raw}: cannot be read: {error.strerror}") from error
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise FormatError(
            f"{raw}: not a complete {what} file: {reason}. Check that it was written and "
            "copied completely, and that its name matches its format"
        ) from error


def wanted(options: ReadOptions) -> dict[str, Field]:
    """The columns to hand over; a text column is a bytes field that must be valid UTF-8."""
    return {options.text_field: BYTES} if options.text_field is not None else dict(options.fields)


def found_columns(schema: Any) -> dict[str, FoundColumn]:
    """What a schema says about the columns."""
    found = {column.name: _found(column.name, column.type) for column in schema}
    for name in schema.names:
        if schema.names.count(name) > 1:
            found[name] = FoundColumn(problem=f"several columns are named {name!r}; rename them")
    return found


def check_columns(raw: RawFile, schema: Any, options: ReadOptions) -> list[int]:
    """The places of the wanted columns in a schema. Raises FieldError if one is missing or of the wrong kind."""
    places = []
    for name, field in wanted(options).items():
        place = schema.get_field_index(name)
        if place < 0:
            raise missing_column(raw, name, schema.names, options)
        _check_type(raw, name, field, schema.field(place).type, options)
        places.append(place)
    return places


def missing_column(
    raw: RawFile, name: str, names: list[str], options: ReadOptions, hint: str = ""
) -> FieldError:
    there = ", ".join(names[:50]) or "none"
    if name in names:
        return FieldError(
            f"{raw}: several columns are named {name!r}; rename them so that each has its own name"
        )
    remedy = "Name the columns to keep, out of these, with columns="
    if options.text_field is not None:
        remedy = "If one of them holds the text, name it with text_field=NAME"
    return FieldError(f"{raw}: no column {name!r}; {hint or f'the columns are: {there}. {remedy}'}")


def plain_type(kind: Any) -> Any:
    """The type below dictionaries and extensions."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def is_bytes(kind: Any) -> bool:
    # By name, because older versions of pyarrow have no test for string_view.
    return str(kind).split("[")[0] in _BYTES_TYPES


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _found(name: str, column_type: Any) -> FoundColumn:
    kind = plain_type(column_type)
    if is_bytes(kind):
        return FoundColumn((BYTES,))
    ragged = _is_list(kind) and not pa.types.is_fixed_size_list(kind)
    leaf = kind.value_type if ragged else kind
    shape = []
    while pa.types.is_fixed_size_list(leaf):
        shape.append(leaf.list_size)
        leaf = leaf.value_type
    if not _is_number(leaf):
        return FoundColumn(
            problem=f"column {name!r} is of type {column_type}, which no field can hold. Leave it out by naming the "
            "columns to keep with columns=, or convert it to numbers or bytes first",
            is_missing=bool(pa.types.is_null(leaf)),
        )
    dtype = np.dtype(leaf.to_pandas_dtype()).name
    field = Field(FieldKind.RAGGED if ragged else FieldKind.FIXED, dtype, tuple(shape))
    return FoundColumn(widening(field))


def _check_type(raw: RawFile, name: str, field: Field, column_type: Any, options: ReadOptions) -> None:
    kind = plain_type(column_type)
    if options.text_field is not None:
        if not is_bytes(kind):
            raise FieldError(
                f"{raw}: column {name!r} is of type {column_type}, not text; choose another column "
                "with text_field=NAME"
            )
        return
    if not _fits(kind, field):
        raise FieldError(
            f"{raw}: column {name!r} is of type {column_type}, which cannot become {field.notation}; "
            "choose another type with columns=, or convert the column first"
        )


def _fits(kind: Any, field: Field) -> bool:
    """Whether a column of this type can become the field: bytes, or numbers in as many lists as the field."""
    if field.kind is FieldKind.BYTES:
        return is_bytes(kind)
    depth = 0
    while _is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth == _levels(field) and (_is_number(kind) or pa.types.is_null(kind))


def _levels(field: Field) -> int:
    """How many lists a value of the field is nested in."""
    return len(field.shape) + (field.kind is FieldKind.RAGGED)


def parsed_type(field: Field) -> Any:
    """The type that a field's values are parsed as. Numbers are parsed as wide types and converted to the field's own
    after a check: a number that is too large can then be told from invalid input, and all parsers round alike."""
    if field.kind is FieldKind.BYTES:
        return pa.large_binary()
    integer = pa.uint64() if field.dtype == "uint64" else pa.int64()
    kind: Any = {"b": pa.bool_(), "i": integer, "u": integer}.get(field.numpy_dtype.kind, pa.float64())
    for _ in range(_levels(field)):
        kind = pa.list_(kind)
    return kind


def source(data: Any) -> Any:
    """Bytes as a file that Arrow's parsers can read, without a copy."""
    return pa.BufferReader(pa.py_buffer(data))
