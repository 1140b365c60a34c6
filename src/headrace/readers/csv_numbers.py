"""Which texts of a CSV file are numbers: those that are the same number again when they are written.

501, -3, 0          int64; also float64 below 2^53
0.5, 1.50, 1e-3     float64, rounded to the nearest one as usual
true, True, TRUE    bool, if all values are such words; 0 and 1 are numbers
00501, +5, 1_000    text: as numbers they would lose something
12345678901234567890, 1e400, ' 7'   text: too large, or with a blank
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.format.fields import Field, FieldKind
from headrace.readers.arrow_types import BYTES
from headrace.readers.csv_parser import NULLS
from headrace.readers.numbers import EXACT_FLOATS, is_exact_float
from headrace.readers.reader import FoundColumn

_INT = r"^(?:0|-?[1-9][0-9]*)$"
_FLOAT = r"^-?(?:(?:0|[1-9][0-9]*)\.?|(?:0|[1-9][0-9]*)?\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"
_INFINITE = r"^-?(?:inf|Infinity)$"
_BOOLS = ["true", "True", "TRUE", "false", "False", "FALSE"]
_FEW_DIGITS = 15
"""Integers of so many digits are exact as int64 and as float64."""
_MOST_DIGITS = 400
"""No float64 has more digits before its point."""

_ARROW_TYPES = {"int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}

INT64, FLOAT64, BOOL = (Field(FieldKind.FIXED, dtype) for dtype in ("int64", "float64", "bool"))


def column_of_texts(texts: Any) -> FoundColumn:
    """What a column is that holds these texts (a large_string array)."""
    values = texts.filter(pc.invert(_is_null(texts)))
    if not len(values):
        return FoundColumn((BYTES,), is_missing=True)
    if is_changed_by(values, INT64).any():
        fields = [FLOAT64] if not is_changed_by(values, FLOAT64).any() else []
    else:
        numbers = values.cast(pa.int64()).to_numpy()
        are_floats = bool((np.abs(numbers) <= EXACT_FLOATS).all())
        fields = [INT64, FLOAT64] if are_floats else [INT64]
    if not is_changed_by(values, BOOL).any():
        fields = [BOOL]
    return FoundColumn((*fields, BYTES))


def to_numbers(texts: Any, field: Field) -> tuple[Any, NDArray[np.int64]]:
    """The texts as numbers of the field's type, with null for the missing ones, and the rows whose text is not such a
    number."""
    values = pc.if_else(_is_null(texts), pa.scalar(None, pa.large_string()), texts)
    numbers = _all_at_once(values, field)
    if numbers is not None:
        return numbers, np.zeros(0, dtype=np.int64)
    changed = is_changed_by(values, field)
    values = pc.if_else(pa.array(changed), pa.scalar(None, pa.large_string()), values)
    return values.cast(_ARROW_TYPES[field.dtype]), np.flatnonzero(changed)


def _all_at_once(texts: Any, field: Field) -> Any:
    """The texts as numbers if all of them are the same number again, which takes a third of the time to find out; None
    if that is not certain."""
    try:
        numbers = texts.cast(_ARROW_TYPES[field.dtype])
    except pa.ArrowInvalid:
        return None
    if field == BOOL:
        return None if is_changed_by(texts, BOOL).any() else numbers
    if field == INT64:
        return numbers if _all(pc.equal(numbers.cast(pa.large_string()), texts)) else None
    # An integer below that is exact, so only the way in which the numbers are written is left to look at.
    are_small = _all(pc.less(pc.abs(numbers), float(EXACT_FLOATS)))
    return numbers if are_small and _all(_matches(texts, _FLOAT)) else None


def is_changed_by(texts: Any, field: Field) -> NDArray[np.bool_]:
    """Which texts would not be the same number or truth value again; missing ones would."""
    if field == BOOL:
        # Arrow would also take 0 and 1.
        is_one = pc.is_in(texts, pa.array(_BOOLS, pa.large_string()))
        return _not(pc.or_(is_one, pc.is_null(texts)))
    if field == INT64:
        return _not(_matches(texts, _INT)) | _too_long(texts, lambda value: -(2**63) <= value < 2**63)
    finite = _matches(texts, _FLOAT)
    changed = _not(finite) & _not(_matches(texts, _INFINITE))
    changed |= _too_long(texts, is_exact_float)
    candidates = pc.if_else(pa.array(~changed), texts, pa.scalar(None, pa.large_string()))
    overflows = pc.and_(pc.is_inf(candidates.cast(pa.float64())), finite)
    return changed | _flags(overflows)


def _too_long(texts: Any, holds: Any) -> NDArray[np.bool_]:
    """Which texts are integers of many digits that `holds` refuses. Few have so many digits."""
    long = _flags(_matches(texts, rf"^-?[1-9][0-9]{{{_FEW_DIGITS},}}$"))
    for row in np.flatnonzero(long).tolist():
        text = texts[row].as_py()
        long[row] = len(text) > _MOST_DIGITS or not holds(int(text))
    return long


def _matches(texts: Any, pattern: str) -> Any:
    return pc.match_substring_regex(texts, pattern)


def _is_null(texts: Any) -> Any:
    return pc.is_in(texts, pa.array(NULLS, pa.large_string()))


def _all(flags: Any) -> bool:
    return bool(pc.all(flags).as_py())


def _flags(array: Any) -> NDArray[np.bool_]:
    """As NumPy; null, for a missing text, is false."""
    flags: NDArray[np.bool_] = array.fill_null(False).to_numpy(zero_copy_only=False)
    return flags.copy()


def _not(array: Any) -> NDArray[np.bool_]:
    """The opposite; null, for a missing text, is false as well."""
    return _flags(pc.invert(array))
