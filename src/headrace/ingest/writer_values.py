"""Values as users give them to a Writer, in the form of their fields; nothing is changed silently."""

from typing import Any

import numpy as np

from headrace.errors import SettingsError
from headrace.format.fields import MAX_LENGTH, Field, FieldKind
from headrace.format.ragged import Ragged
from headrace.format.shard import Column


def value_of(name: str, field: Field, value: Any) -> Any:
    """One record's value in the form of its field; a private copy, since the caller may reuse the buffer."""
    if field.kind is FieldKind.BYTES:
        content = _bytes(name, value)
        if len(content) > MAX_LENGTH:
            raise SettingsError(
                f"field {name!r}: {len(content):,} bytes in one record; the maximum is {MAX_LENGTH:,}"
            )
        return np.frombuffer(content, dtype=np.uint8)
    array = _converted(name, field, value)
    free_dimensions = 1 if field.kind is FieldKind.RAGGED else 0
    if array.ndim < free_dimensions or array.shape[free_dimensions:] != field.shape:
        raise SettingsError(f"field {name!r} is {field.notation}: got shape {np.shape(value)}")
    return array


def _bytes(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise SettingsError(f"field {name!r} is bytes: the string has no UTF-8 form: {error}") from None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        return value.tobytes()
    # `bytes(5)` would be five zeros.
    raise SettingsError(
        f"field {name!r} is bytes: got {type(value).__name__}; give bytes, a string, or an array of uint8"
    )


def _converted(name: str, field: Field, value: Any) -> Any:
    """The value in the field's dtype, if nothing is lost: integers must fit, and floats may be rounded but
    not to integers."""
    array, dtype = np.asarray(value), field.numpy_dtype
    if array.size == 0:
        return array.astype(dtype)
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            worst = array.min() if int(array.min()) < limits.min else array.max()
            raise SettingsError(f"field {name!r} is {field.notation}: the value {worst} does not fit")
    elif not np.can_cast(array.dtype, dtype, casting="same_kind"):
        raise SettingsError(f"field {name!r} is {field.notation}: got values of dtype {array.dtype}")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if dtype.kind in "fc" and (overflows := np.isfinite(array) & ~np.isfinite(converted)).any():
        raise SettingsError(
            f"field {name!r} is {field.notation}: the value {array[overflows].flat[0]} does not fit"
        )
    return converted


def stacked(field: Field, values: list[Any]) -> Column:
    if field.variable:
        return Ragged.from_items(values, field.numpy_dtype, field.shape)
    return np.stack(values)


def column_of(name: str, field: Field, values: Any) -> Column:
    if not field.variable:
        array: Any = _converted(name, field, values)
        if array.ndim == 0 or array.shape[1:] != field.shape:
            raise SettingsError(f"field {name!r} is {field.notation}: got an array of shape {array.shape}")
        return array  # type: ignore[no-any-return]
    if isinstance(values, Ragged):
        return Ragged(_converted(name, field, values.values), np.asarray(values.offsets).astype(np.int64))
    return stacked(field, [value_of(name, field, value) for value in values])
