"""What a file says about its columns, before any record is read for good.

Columns of tables become fields. A file with a schema (Parquet, Arrow, `.npy`) knows its types; of CSV and JSON lines,
the first megabyte is looked at. The same column of several files becomes one field, which must hold all of them:

    1.csv    zip  501, 90210      int64, float64 or bytes would do, int64 best
    2.csv    zip  00501, 02134    only bytes would do, because the numbers 501 and 2134 are not the same
                                  -> bytes
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.errors import FieldError, FormatError, SettingsError
from headrace.format.fields import FIELD_NAME_RULE, Field, is_field_name
from headrace.readers.formats import InputFormat
from headrace.readers.inputs import InputFile, check_is_lines
from headrace.readers.many_files import of_each_file
from headrace.readers.reader import FoundColumn, reader_for

logger = logging.getLogger(__name__)

_WITHOUT_SCHEMA = (InputFormat.JSONL,)
"""Formats in which each record has columns of its own."""


@dataclass(frozen=True, kw_only=True)
class RecordFields:
    """The fields of a dataset of records."""

    fields: dict[str, Field]
    inferred: tuple[str, ...]
    """Those whose type nobody gave."""
    left_out: tuple[str, ...]
    """The columns that were found but are not among the fields."""


class _Look(NamedTuple):
    """What was found in one file."""

    file: InputFile
    columns: Mapping[str, FoundColumn]


def _look(file: InputFile) -> _Look:
    return _Look(file, reader_for(file.format).look(file.raw()))


def find_fields(files: Sequence[InputFile], chosen: Mapping[str, str | None]) -> RecordFields:
    """The chosen columns, or all columns of all files if none are chosen. Types that are not given are inferred."""
    looks = list(of_each_file(_look, files))
    _warn_of_odd_columns(looks)
    there = list(dict.fromkeys(name for look in looks for name in look.columns))
    names = list(chosen) or there
    if not names:
        _check_are_lines(files)
        raise FormatError(
            f"{files[0].path}: no record at its start, nor in any other input, so the fields cannot be inferred; "
            "name them, and their types, with columns="
        )
    _check_field_names(looks, names)
    if not chosen:
        _check_all_there(looks, names)
    inferred = tuple(name for name in names if not chosen.get(name))
    fields = {name: _given(chosen, name) or _merged(looks, name, there) for name in names}
    return RecordFields(
        fields=fields, inferred=inferred, left_out=tuple(name for name in there if name not in fields)
    )


def check_text_field(files: Sequence[InputFile], text_field: str) -> None:
    """Raise an error if no JSON-lines file has the key at its start. Files with a schema are checked when they are
    planned."""
    looks = []
    files = [file for file in files if file.format in _WITHOUT_SCHEMA]
    for file in files:
        look = _look(file)
        found = look.columns.get(text_field)
        if found and (found.has_texts or found.is_missing):
            return
        if look.columns:
            looks.append(look)
    if not looks:
        _check_are_lines(files)
        return
    keys = _listed(list(dict.fromkeys(name for look in looks for name in look.columns)))
    for look in looks:
        if text_field in look.columns:
            raise FieldError(
                f"{look.file.path}: the key {text_field!r} holds no text; the keys are: {keys}. Name the one that "
                "holds the text with text_field=NAME"
            )
    raise FieldError(
        f"{looks[0].file.path}: no key {text_field!r}; the keys are: {keys}. If one of them holds the text, name it "
        "with text_field=NAME"
    )


def _check_are_lines(files: Sequence[InputFile]) -> None:
    """For JSON without a single record: raise an error if a file holds other JSON than JSON lines."""
    for file in files:
        if file.format is InputFormat.JSONL:
            check_is_lines(file.raw(), file.path)


def _given(chosen: Mapping[str, str | None], name: str) -> Field | None:
    notation = chosen.get(name)
    return Field.parse(notation) if notation else None


def _check_field_names(looks: Sequence[_Look], names: Sequence[str]) -> None:
    """Raise an error if a column has a name that no field can have: a dataset with such a field could not be opened."""
    for name in names:
        if is_field_name(name):
            continue
        path = next((look.file.path for look in looks if name in look.columns), looks[0].file.path)
        described = f"the column {name[:300]!r}" if name else "a column without a name"
        raise FieldError(
            f"{path}: {described} cannot be a field, whose name {FIELD_NAME_RULE}; rename the column in the file, or "
            "name the columns to keep with columns="
        )


def _check_all_there(looks: Sequence[_Look], names: Sequence[str]) -> None:
    """Raise an error if a file with a schema lacks a column that another file has."""
    for look in looks:
        if look.file.format in _WITHOUT_SCHEMA or not look.columns:
            continue
        for name in names:
            if name not in look.columns:
                other = next(each.file.path for each in looks if name in each.columns)
                raise FieldError(
                    f"{look.file.path}: no column {name!r}, which {other} has; the columns are: "
                    f"{_listed(list(look.columns))}. Name the columns to keep with columns="
                )


def _merged(looks: Sequence[_Look], name: str, there: list[str]) -> Field:
    """The best field that can hold the column of every file."""
    having = [look for look in looks if name in look.columns]
    if not having:
        raise FieldError(
            f"{looks[0].file.path}: no column {name!r}; the columns are: {_listed(there)}{_if_late(looks, name)}"
        )
    # A file without a single value says nothing about the type, unless there is no other.
    certain = [look for look in having if not look.columns[name].is_missing] or having
    for look in certain:
        if look.columns[name].problem:
            raise SettingsError(f"{look.file.path}: {look.columns[name].problem}")
    fields = certain[0].columns[name].fields
    for look in certain[1:]:
        held = look.columns[name].fields
        both = tuple(field for field in fields if field in held)
        if not both:
            raise SettingsError(
                f"{look.file.path}: {name!r} holds {held[0].notation}, but {fields[0].notation} in "
                f"{certain[0].file.path}; choose a type that fits both with columns=, or leave it "
                "out by naming the others there"
            )
        fields = both
    return fields[0]


def _if_late(looks: Sequence[_Look], name: str) -> str:
    """What to do if the column comes only later in a file, after what was looked at."""
    if not any(look.file.format in _WITHOUT_SCHEMA for look in looks):
        return ""
    return f". If it comes later in a file, give its type, such as {name!r}: 'float64' in columns="


def _warn_of_odd_columns(looks: Sequence[_Look]) -> None:
    odd = [(look.file.path, column.note) for look in looks for column in look.columns.values() if column.note]
    if odd:
        more = f" ({len(odd) - 1:,} more inputs look like that)" if len(odd) > 1 else ""
        logger.warning("%s: %s%s", *odd[0], more)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:50])) or "none"
