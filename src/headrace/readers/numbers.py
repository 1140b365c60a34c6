"""Converting numbers to a field's dtype, and finding the values that do not fit."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def cast(values: NDArray[Any], dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """The values as `dtype`, and which of them cannot be converted (None if all can).

    Rounding to a shorter float is allowed; 300 as uint8, 1.5 or NaN as int64, 2 as bool and 1e300 as float32 are not.
    The caller makes sure that complex numbers go only into complex fields.
    """
    source = values.dtype
    if source == dtype:
        return values, None
    with np.errstate(all="ignore"):
        converted = values.astype(dtype)
    if np.can_cast(source, dtype, "safe"):
        return converted, None
    if dtype.kind in "fc":
        bad = ~np.isfinite(converted) & np.isfinite(values)
    elif dtype.kind == "b":
        bad = (values != 0) & (values != 1)
    elif source.kind == "f":
        limits = np.iinfo(dtype)
        wide = values.astype(np.float64)
        # The upper limit plus one is a power of two and therefore exact as a float; the limit itself may not be.
        in_range = (wide >= float(limits.min)) & (wide < float(limits.max + 1))
        is_integer = wide == np.trunc(wide)
        bad = ~(in_range & is_integer)
    else:
        limits = np.iinfo(dtype)
        bad = (values < limits.min) | (values > limits.max)
    return converted, (bad if bad.any() else None)


def misfit(name: str, value: Any, dtype: np.dtype[Any]) -> str:
    """Why a value that `cast` marked is bad, for messages to people."""
    return f"{name!r} holds {value!s}, which is not {dtype.name}"


EXACT_FLOATS = 2**53
"""Below it, every integer is a float64."""


def is_exact_float(value: int) -> bool:
    """Whether an integer is a float64, without rounding."""
    return -EXACT_FLOATS <= value <= EXACT_FLOATS or _survives(value)


def _survives(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False
