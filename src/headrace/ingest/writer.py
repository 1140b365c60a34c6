"""`headrace.Writer`: a dataset from a user's own records, with the guarantees of a build.

Records are collected in RAM until they fill a shard; each finished shard has a note in the folder `.build`. `close`
writes the index and the manifest: until then the directory is not a dataset. A writer that dies leaves complete shards,
and `Writer(path, ..., resume=True)` continues after the records in them.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

import headrace
from headrace.errors import BuildError, FieldError, SettingsError, UnfinishedBuildError
from headrace.format.fields import MAX_LENGTH, Field, FieldKind, parse_fields
from headrace.format.finish import finish_dataset, remove_strays
from headrace.format.manifest import BUILD_NAME, MANIFEST_NAME, ShardEntry
from headrace.format.ragged import Ragged
from headrace.format.shard import Column, ShardBuilder
from headrace.public import public
from headrace.store.address import open_store
from headrace.store.store import Store, write_file

_SHARD_BYTES = 128 * 2**20
_RECORDS_AT_ONCE = 1024


class Writer:
    """Use it in a `with` block: leaving the block normally completes the dataset, an exception leaves it unfinished.

    with headrace.Writer("data", fields={"x": "float32[8]", "y": "int64"}) as writer:
        writer.write({"x": x, "y": 3})            # one record
        writer.write([{"x": x, "y": 3}, ...])     # many
        writer.write_columns({"x": X, "y": ys})   # many, as arrays: the fastest
    """

    @public
    def __init__(
        self,
        path: str | os.PathLike[str] | Store,
        fields: Mapping[str, str | Field],
        *,
        shard_bytes: int = _SHARD_BYTES,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self._store, self._fields = open_store(path), parse_fields(fields)
        if shard_bytes < 1:
            raise SettingsError(f"shard_bytes={shard_bytes}: must be at least 1")
        self._shard_bytes = shard_bytes
        self._owned = ExitStack()
        self._store.create()
        self._owned.enter_context(self._store.lock("headrace.Writer"))
        try:
            self._shards = self._begin(resume, overwrite)
        except BaseException:
            self._owned.close()
            raise
        self._builder = ShardBuilder(self._fields)
        self._waiting: list[Mapping[str, Any]] = []
        self._waiting_bytes = 0

    @property
    def _folder(self) -> Store:
        return self._store.folder(BUILD_NAME)

    @property
    def _notes(self) -> Store:
        return self._folder.folder("shards")

    def _begin(self, resume: bool, overwrite: bool) -> list[ShardEntry]:
        name = self._store.name
        if self._store.has(MANIFEST_NAME) and not overwrite:
            raise BuildError(
                f"{name}: holds a dataset already; choose another directory, or use overwrite=True"
            )
        if self._folder.exists() and not resume:
            if not overwrite:
                raise UnfinishedBuildError(
                    f"{name}: a writer was interrupted here; use resume=True to continue after the records that are "
                    "safe (`len(writer)` is their number), or overwrite=True to start again"
                )
            self._folder.remove_all()
        self._store.remove_leftovers()
        self._notes.create()
        notes = list(self._read_notes())
        described = self._describe_fields()
        if any(note.fields != described or note.shard_bytes != self._shard_bytes for note in notes):
            raise SettingsError(
                f"{name}: the writer that was interrupted had other fields or another shard_bytes; resume with "
                "the same ones, or start again with overwrite=True instead of resume=True"
            )
        return [note.entry for note in notes]

    def _read_notes(self) -> "Iterator[_Note]":
        """The notes of the shards that are safe: those before the first note that is missing or damaged."""
        for number in itertools.count():
            try:
                yield msgspec.json.decode(self._notes.read(_note_name(number)), type=_Note)
            except (OSError, ValueError):
                return

    def _describe_fields(self) -> dict[str, str]:
        return {name: field.notation for name, field in self._fields.items()}

    def __len__(self) -> int:
        """The number of records written so far; right after `resume=True`, of those that are safe on disk."""
        return sum(shard.records for shard in self._shards) + self._builder.records + len(self._waiting)

    @public
    def write(self, records: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Add a record (a dict with a value for each field), or a list of them."""
        many = [records] if isinstance(records, Mapping) else list(records)
        checked = [self._check(record) for record in many]
        for record in checked:
            self._waiting.append(record)
            self._waiting_bytes += sum(value.nbytes for value in record.values())
            if len(self._waiting) >= _RECORDS_AT_ONCE or self._waiting_bytes >= self._shard_bytes:
                self._flush()

    @public
    def write_columns(self, columns: Mapping[str, Any]) -> None:
        """Add many records at once: for a fixed field, an array with one row for each record; for a ragged field, a
        Ragged or a list of arrays; for a bytes field, a list of bytes."""
        self._check_names(columns)
        made = {name: _column(name, field, columns[name]) for name, field in self._fields.items()}
        self._flush()
        self._append(made)

    def close(self) -> None:
        """Write the remaining records, the index and the manifest, which completes the dataset."""
        try:
            self._flush()
            if self._builder.records:
                self._finish_shard()
            written_by = f"headrace {headrace.__version__}"
            manifest = finish_dataset(self._store, self._fields, self._shards, written_by)
            remove_strays(self._store, manifest)
            self._folder.remove_all()
        finally:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._owned.close()

    def _check_names(self, record: Mapping[str, Any]) -> None:
        if record.keys() != self._fields.keys():
            raise FieldError(
                f"a record needs the fields {', '.join(self._fields)}; got {', '.join(map(str, record))}"
            )

    def _check(self, record: Mapping[str, Any]) -> dict[str, Any]:
        self._check_names(record)
        return {name: _value(name, field, record[name]) for name, field in self._fields.items()}

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
            columns = {
                name: _stack(field, [record[name] for record in waiting])
                for name, field in self._fields.items()
            }
            self._append(columns)

    def _append(self, columns: Mapping[str, Column]) -> None:
        self._builder.append(columns)
        if self._builder.payload_bytes >= self._shard_bytes:
            self._finish_shard()

    def _finish_shard(self) -> None:
        builder, self._builder = self._builder, ShardBuilder(self._fields)
        entry = builder.write(self._store)
        note = _Note(entry, self._describe_fields(), self._shard_bytes)
        write_file(self._notes, _note_name(len(self._shards)), [msgspec.json.encode(note)])
        self._shards.append(entry)


class _Note(msgspec.Struct):
    """What is kept about a finished shard until the dataset is complete."""

    entry: ShardEntry
    fields: dict[str, str]
    shard_bytes: int


def _note_name(number: int) -> str:
    return f"{number:08d}.json"


def _value(name: str, field: Field, value: Any) -> Any:
    """One record's value in the form of its field; a private copy, since the caller may reuse the buffer."""
    if field.kind is FieldKind.BYTES:
        content = value.encode() if isinstance(value, str) else bytes(value)
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
    return array.astype(dtype)


def _stack(field: Field, values: list[Any]) -> Column:
    if field.variable:
        return Ragged.from_items(values, field.numpy_dtype, field.shape)
    return np.stack(values)


def _column(name: str, field: Field, values: Any) -> Column:
    if not field.variable:
        array: Any = _converted(name, field, values)
        if array.ndim == 0 or array.shape[1:] != field.shape:
            raise SettingsError(f"field {name!r} is {field.notation}: got an array of shape {array.shape}")
        return array  # type: ignore[no-any-return]
    if isinstance(values, Ragged):
        return Ragged(_converted(name, field, values.values), np.asarray(values.offsets).astype(np.int64))
    return _stack(field, [_value(name, field, value) for value in values])
