"""Numbers into a field's dtype, with a mark on each value that does not fit."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def cast(values: NDArray[Any], dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """The values as `dtype`, and which of them do not convert (None if all do).

    Rounding to a shorter float is fine; 300 as uint8, 1.5 or NaN as int64, 2 as bool and 1e300 as float32 are
    not. Complex numbers go into complex fields only: the caller sees to that.
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
        # The upper limit plus one is a power of two and so exact as a float; the limit itself may not be.
        bad = ~((wide >= float(limits.min)) & (wide < float(limits.max + 1)) & (wide == np.trunc(wide)))
    else:
        limits = np.iinfo(dtype)
        bad = (values < limits.min) | (values > limits.max)
    return converted, (bad if bad.any() else None)


def misfit(name: str, value: Any, dtype: np.dtype[Any]) -> str:
    """Why a value that `cast` marked is bad, for people."""
    return f"{name!r} holds {value!s}, which is not {dtype.name}"
