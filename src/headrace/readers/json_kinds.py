"""The kinds of JSON values, as messages name them, and the fields that they become."""

from pathlib import Path
from typing import Any

from headrace.errors import SettingsError
from headrace.format.fields import Field, FieldKind
from headrace.readers.arrow_types import BYTES

_KINDS = {type(None): "null", bool: "bool", int: "int", float: "float", str: "string"}
_DTYPES = {"bool": "bool", "int": "int64", "float": "float64"}
"""The dtype of the field for each kind of number."""
_LIST = "list of "


def kind_of(value: Any) -> str:
    if isinstance(value, list):
        inner = {kind_of(item) for item in value} or {"nothing"}
        return _LIST + " and ".join(sorted(_widened(inner)))
    return _KINDS.get(type(value), "object")


def _widened(kinds: set[str]) -> set[str]:
    """Integers among floats count as floats."""
    return kinds - {"int"} if "float" in kinds else kinds


def field_for(path: Path, name: str, kinds: set[str]) -> Field:
    kinds = _widened(kinds)
    if kinds == {"string"}:
        return BYTES
    number = _common_dtype(kinds)
    if number is not None:
        return Field(FieldKind.FIXED, number)
    if all(kind.startswith(_LIST) for kind in kinds):
        inner = {kind.removeprefix(_LIST) for kind in kinds} - {"nothing"}
        element = _common_dtype(_widened(inner))
        if element is not None:
            return Field(FieldKind.RAGGED, element)
    raise SettingsError(
        f"{path}: key {name!r} holds {', '.join(sorted(kinds)) or 'nothing but null'}, which no field can hold. "
        "Leave it out by naming the keys you want with --columns"
    )


def _common_dtype(kinds: set[str]) -> str | None:
    """The dtype of a field for values of these kinds; None unless there is one kind, and it is a number."""
    if len(kinds) != 1:
        return None
    return _DTYPES.get(next(iter(kinds)))
