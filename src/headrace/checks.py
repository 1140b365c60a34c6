"""Checks of what users give as settings: the value, or an error that says what was given and what must be."""

import re
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from headrace.errors import SettingsError

_Kind = TypeVar("_Kind", bound=StrEnum)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def choice(name: str, value: Any, kind: type[_Kind]) -> _Kind:
    try:
        return kind(value)
    except ValueError:
        raise SettingsError(
            f"{name}={value!r}: must be one of {', '.join(repr(each.value) for each in kind)}"
        ) from None


def whole_number(
    name: str, value: Any, least: int | None = None, hint: str = "", *, kind: str = "a whole number"
) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise SettingsError(f"{name}={value!r}: must be {kind}{hint}")
    if least is not None and value < least:
        raise SettingsError(f"{name}={value}: must be at least {least}{hint}")
    return int(value)


def optional_number(name: str, value: Any, least: int | None = None, hint: str = "") -> int | None:
    if value is None:
        return None
    return whole_number(name, value, least, hint, kind="a whole number or None")


def check_text(name: str, value: Any) -> None:
    """A string that can be stored as UTF-8, which those with lone surrogates cannot."""
    if not isinstance(value, str):
        raise SettingsError(f"{name}={value!r}: must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SettingsError(f"{name}={value!r}: is not valid Unicode text; give one that is") from None


def check_boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise SettingsError(f"{name}={value!r}: must be True or False")


def parse_size(text: str) -> int:
    """'64MB' -> 67108864."""
    match = re.fullmatch(r"([0-9]+)\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise SettingsError(f"size {text!r}: must be a number with an optional unit, such as 64MB")
    return int(match[1]) * _UNITS[match[2].upper()]
