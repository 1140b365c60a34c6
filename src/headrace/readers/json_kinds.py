"""The kinds of JSON values, as messages name them, and the fields that they become."""

from dataclasses import replace
from typing import Any

from headrace.format.fields import Field, FieldKind
from headrace.readers.arrow_types import BYTES
from headrace.readers.numbers import is_exact_float
from headrace.readers.reader import FoundColumn

_LARGE_INT = "large int"
"""One that float64 would round."""
_KINDS = {type(None): "null", bool: "bool", float: "float", str: "string"}
_DTYPES = {
    frozenset({"bool"}): ("bool",),
    frozenset({"int"}): ("int64", "float64"),
    frozenset({_LARGE_INT}): ("int64",),
    frozenset({"int", _LARGE_INT}): ("int64",),
    frozenset({"float"}): ("float64",),
    frozenset({"int", "float"}): ("float64",),
}
"""The dtypes that hold numbers of these kinds without changing one, the best first."""
_LIST = "list of "
_DEEPEST = 8
"""How many lists inside lists are told apart."""


def kind_of(value: Any, depth: int = 0) -> str:
    if isinstance(value, list):
        if depth == _DEEPEST:
            return "list"
        inner = {kind_of(item, depth + 1) for item in value} or {"nothing"}
        return _LIST + " and ".join(sorted(inner))
    if type(value) is int:
        return "int" if is_exact_float(value) else _LARGE_INT
    return _KINDS.get(type(value), "object")


def column_of_kinds(name: str, kinds: set[str]) -> FoundColumn:
    """What a column is whose values are of these kinds."""
    return replace(_column(name, kinds - {"null"}), has_texts="string" in kinds)


def _column(name: str, kinds: set[str]) -> FoundColumn:
    if not kinds:
        return FoundColumn(problem=_no_field(name, "nothing but null"), is_missing=True)
    if kinds == {"string"}:
        return FoundColumn((BYTES,))
    if dtypes := _DTYPES.get(frozenset(kinds)):
        return FoundColumn(tuple(Field(FieldKind.FIXED, dtype) for dtype in dtypes))
    if all(kind.startswith(_LIST) for kind in kinds):
        inner = {part for kind in kinds for part in kind.removeprefix(_LIST).split(" and ")} - {"nothing"}
        if dtypes := _DTYPES.get(frozenset(inner)):
            return FoundColumn(tuple(Field(FieldKind.RAGGED, dtype) for dtype in dtypes))
    is_missing = kinds == {f"{_LIST}nothing"}
    return FoundColumn(problem=_no_field(name, ", ".join(sorted(kinds))), is_missing=is_missing)


def _no_field(name: str, held: str) -> str:
    return (
        f"key {name!r} holds {held}, which no field can hold. "
        "Leave it out by naming the keys to keep with columns="
    )
