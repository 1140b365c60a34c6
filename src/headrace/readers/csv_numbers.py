"""Which texts of a CSV file are numbers: those that are the same number again when they are written.

501, -3, 0          int64; also float64 below 2^53
0.5, 1.50, 1e-3     float64, rounded to the nearest one as usual
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
    if _all(pc.is_in(values, pa.array(_BOOLS, pa.large_string()))):
        fields = [BOOL]
    return FoundColumn((*fields, BYTES))


def to_numbers(texts: Any, field: Field) -> tuple[Any, NDArray[np.int64]]:
    """The texts as numbers of the field's type, with null for the missing ones, and the rows whose text is not such a
    number."""
    nulls = _is_null(texts)
    values = pc.if_else(nulls, pa.scalar(None, pa.large_string()), texts)
    changed = is_changed_by(values, field)
    if changed.any():
        values = pc.if_else(pa.array(changed), pa.scalar(None, pa.large_string()), values)
    kind = pa.int64() if field == INT64 else pa.float64()
    return values.cast(kind), np.flatnonzero(changed)


def is_changed_by(texts: Any, field: Field) -> NDArray[np.bool_]:
    """Which texts would not be the same number again; missing ones would."""
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
