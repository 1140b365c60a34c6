"""`headrace.Writer`: a dataset from a user's own records, with the guarantees of a build.

Records are collected in RAM until they fill a shard; each finished shard has a note in the folder `.build`. `close`
writes the index and the manifest: until then the directory is not a dataset. A writer that dies leaves complete shards,
and `Writer(path, ..., resume=True)` continues after the records in them.

A call may fail at any point: the disk is full, memory runs out, someone presses Ctrl-C. So everything that a Writer
holds is one immutable value, which is replaced in one step after the work for the new value has succeeded. A shard is
written before the call that finds it full adds anything, so a call that fails because of the disk has added nothing.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from types import TracebackType
from typing import Any, NamedTuple, Self

import headrace
from headrace.checks import check_boolean, whole_number
from headrace.errors import BuildError, FieldError, HeadraceError, SettingsError, UnfinishedBuildError
from headrace.format.fields import Field, parse_fields
from headrace.format.finish import finish_dataset
from headrace.format.manifest import MANIFEST_NAME, ShardEntry, read_manifest
from headrace.format.shard import Column, ShardBuilder
from headrace.format.workplace import BUILD_STATE_NAME, COPY_STATE_NAME, Workplace
from headrace.ingest.writer_notes import WriterNotes, WriterState
from headrace.ingest.writer_values import column_of, stacked, value_of
from headrace.public import public
from headrace.rows.unit_counts import RowCounter
from headrace.store.address import open_output
from headrace.store.store import Store

_SHARD_BYTES = 128 * 2**20
_RECORDS_AT_ONCE = 1024
_CLOSED = "the writer is closed, and its dataset is complete; use another writer and another directory"
_ABANDONED = (
    "the writer was left because of an error; continue after the records that are safe with "
    "headrace.Writer(..., resume=True)"
)


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
        self._store, self._fields = open_output(path), parse_fields(fields)
        self._shard_bytes = whole_number("shard_bytes", shard_bytes, 1)
        check_boolean("resume", resume)
        check_boolean("overwrite", overwrite)
        if resume and overwrite:
            raise SettingsError(
                "resume=True and overwrite=True exclude each other: resume continues a writer that was interrupted "
                "(also one that overwrites), overwrite starts again; give one of them"
            )
        self._work = Workplace(self._store)
        self._notes = WriterNotes(self._store, self._work.folder)
        self._is_published = self._is_abandoned = False
        self._waiting_bytes = 0
        self._lock = ExitStack()
        self._store.create()
        self._lock.enter_context(self._store.lock("headrace.Writer"))
        self._holds_lock = True
        try:
            self._held = _Held(self._begin(resume, overwrite))
        except BaseException:
            self._lock.close()
            raise

    def _begin(self, resume: bool, overwrite: bool) -> Sequence[ShardEntry]:
        """The shards to go on after; none if this is a new beginning."""
        found = self._notes.read_state()
        replaces = self._checksum_here()
        unfinished = self._work.folder.exists()
        if not overwrite:
            self._refuse(resume, unfinished, found, replaces)
        if unfinished:
            self._work.claim()
            if found is not None and resume:
                return self._resume(found, replaces)
            self._work.remove()
        self._work.claim()
        self._work.drop_previous()
        self._notes.write_state(WriterState(self._describe_fields(), self._shard_bytes, replaces))
        return []

    def _checksum_here(self) -> str | None:
        """The checksum of the dataset that is here; None if there is none, empty if its manifest is damaged."""
        if not self._store.has(MANIFEST_NAME):
            return None
        try:
            return read_manifest(self._store).checksum
        except HeadraceError:
            return ""

    def _refuse(
        self, resume: bool, unfinished: bool, found: WriterState | None, replaces: str | None
    ) -> None:
        """Refuse to touch what is here, unless it is a writer to be continued."""
        name = self._store.name
        if resume and found is not None:
            return
        if replaces is not None:
            raise BuildError(
                f"{name}: holds a dataset already; choose another directory, or use overwrite=True"
            )
        if self._work.folder.has(BUILD_STATE_NAME):
            raise UnfinishedBuildError(
                f"{name}: a build was interrupted here; complete it by starting the same build again, choose another "
                "directory, or use overwrite=True to discard it"
            )
        if self._work.folder.has(COPY_STATE_NAME):
            raise UnfinishedBuildError(
                f"{name}: a copy was interrupted here; complete it by starting the same copy again, choose another "
                "directory, or use overwrite=True to discard it"
            )
        if unfinished and not resume:
            raise UnfinishedBuildError(
                f"{name}: a writer was interrupted here; use resume=True to continue after the records that are "
                "safe (`len(writer)` is their number), or overwrite=True to start again"
            )

    def _resume(self, found: WriterState, here: str | None) -> Sequence[ShardEntry]:
        if found.fields != self._describe_fields() or found.shard_bytes != self._shard_bytes:
            raise SettingsError(
                f"{self._store.name}: the writer that was interrupted had other fields or another shard_bytes; resume "
                "with the same ones, or start again with overwrite=True instead of resume=True"
            )
        self._work.new.remove_all()
        self._work.claim()
        if here != found.replaces:
            # It had completed its dataset, and died before it could remove its folder.
            return read_manifest(self._store).shards
        return self._notes.shards()

    def _describe_fields(self) -> dict[str, str]:
        return {name: field.notation for name, field in self._fields.items()}

    def __len__(self) -> int:
        """The number of records written so far; right after `resume=True`, of those that are safe on disk."""
        return self._held.records

    @public
    def write(self, records: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Add a record (a dict with a value for each field), or a list of them: all of them, or none if this raises an
        error."""
        self._accept([self._check(record) for record in _listed(records)])

    @public
    def write_columns(self, columns: Mapping[str, Any]) -> None:
        """Add many records at once: for a fixed field, an array with one row for each record; for a ragged field, a
        Ragged or a list of arrays; for a bytes field, a list of bytes. All of them are added, or none if this raises an
        error."""
        self._check_names(columns)
        made = {name: column_of(name, field, columns[name]) for name, field in self._fields.items()}
        self._accept([_Chunk.of(self._fields, made)])

    def close(self) -> None:
        """Write the remaining records, the index and the manifest, which completes the dataset.

        If this raises an error, nothing is lost, and the directory stays locked: call it again when the cause is gone.
        """
        if self._is_abandoned:
            raise BuildError(f"{self._store.name}: {_ABANDONED}")
        if not self._is_published:
            self._settle(everything=True)
            self._publish()
            self._is_published = True
        if self._holds_lock:
            self._work.remove()
            self._holds_lock = False
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._is_abandoned = True
            self._lock.close()

    def _publish(self) -> None:
        # Again, because a close that was interrupted may have begun to remove the folder.
        self._work.claim()
        written_by = f"headrace {headrace.__version__}"
        shards, new = self._held.shards, self._work.new
        counter = RowCounter(self._fields)
        manifest = finish_dataset(self._store, self._fields, shards, written_by, count_rows=counter, into=new)
        self._work.publish(manifest)

    def _check_names(self, record: Mapping[str, Any]) -> None:
        if record.keys() != self._fields.keys():
            raise FieldError(
                f"a record needs the fields {', '.join(self._fields)}; got {', '.join(map(str, record))}"
            )

    def _check(self, record: Mapping[str, Any]) -> "_Single":
        self._check_names(record)
        values = {name: value_of(name, field, record[name]) for name, field in self._fields.items()}
        return _Single(values, sum(value.nbytes for value in values.values()))

    def _accept(self, items: "Sequence[_Single | _Chunk]") -> None:
        """Add records. Whatever can fail comes first; then all of them are added in one step."""
        if self._is_published or self._is_abandoned:
            raise BuildError(f"{self._store.name}: {_ABANDONED if self._is_abandoned else _CLOSED}")
        waiting = self._held.waiting
        if len(waiting) >= _RECORDS_AT_ONCE or self._waiting_bytes >= self._shard_bytes:
            self._settle()
            self._waiting_bytes = 0
        self._held.waiting.extend(items)
        # Only says when to look again, so it may be wrong after an interrupt.
        self._waiting_bytes += sum(item.payload_bytes for item in items)

    def _settle(self, *, everything: bool = False) -> None:
        """Write all shards that are full; with `everything`, the last one too."""
        while self._settle_one(everything):
            pass

    def _settle_one(self, everything: bool) -> bool:
        """Join waiting records into chunks until a shard is full, and write that. Whether there was a shard to write.

        Where a shard ends depends on its records alone, not on when this is called.
        """
        held, taken = self._held, 0
        chunks, payload_bytes = list(held.chunks), sum(chunk.payload_bytes for chunk in held.chunks)
        for chunk, end in self._chunks_of(held.waiting, everything):
            chunks.append(chunk)
            payload_bytes += chunk.payload_bytes
            taken = end
            if payload_bytes >= self._shard_bytes:
                break
        waiting = held.waiting[taken:]
        is_shard = payload_bytes >= self._shard_bytes or (everything and any(c.records for c in chunks))
        if is_shard:
            shards = [*held.shards, self._write_shard(len(held.shards), chunks)]
            self._held = _Held(shards, (), waiting)
        elif taken:
            self._held = _Held(held.shards, chunks, waiting)
        return is_shard

    def _chunks_of(
        self, waiting: "Sequence[_Single | _Chunk]", everything: bool
    ) -> "Iterator[tuple[_Chunk, int]]":
        """Chunks made of what is waiting, each with the number of items up to its end. Single records that are too few
        for a chunk are left, unless `everything` is wanted."""
        group: list[_Single] = []
        group_bytes = 0
        for number, item in enumerate(waiting):
            if isinstance(item, _Chunk):
                if group:
                    yield _stack_all(self._fields, group), number
                yield item, number + 1
                group, group_bytes = [], 0
                continue
            group.append(item)
            group_bytes += item.payload_bytes
            if len(group) >= _RECORDS_AT_ONCE or group_bytes >= self._shard_bytes:
                yield _stack_all(self._fields, group), number + 1
                group, group_bytes = [], 0
        if group and everything:
            yield _stack_all(self._fields, group), len(waiting)

    def _write_shard(self, number: int, chunks: "Sequence[_Chunk]") -> ShardEntry:
        builder = ShardBuilder(self._fields)
        for chunk in chunks:
            builder.append(chunk.columns)
        entry = builder.write(self._work.new)
        self._work.adopt([entry.stored.file])
        self._notes.keep(number, entry)
        return entry


class _Single(NamedTuple):
    """One record, checked."""

    values: Mapping[str, Any]
    payload_bytes: int

    @property
    def records(self) -> int:
        return 1


@dataclass(frozen=True)
class _Chunk:
    """Some records as columns."""

    columns: Mapping[str, Column]
    records: int
    payload_bytes: int

    @staticmethod
    def of(fields: Mapping[str, Field], columns: Mapping[str, Column]) -> "_Chunk":
        builder = ShardBuilder(fields)
        builder.append(columns)
        return _Chunk(columns, builder.records, builder.payload_bytes)


@dataclass(frozen=True)
class _Held:
    """All records of a Writer: in finished shards, in chunks of the next shard, and waiting to become chunks.

    It is replaced as a whole. Only `waiting` grows in place, which is one step as well.
    """

    shards: Sequence[ShardEntry]
    chunks: Sequence[_Chunk] = ()
    waiting: list[_Single | _Chunk] = dataclass_field(default_factory=list)

    @property
    def records(self) -> int:
        return sum(part.records for part in (*self.shards, *self.chunks, *self.waiting))


def _stack_all(fields: Mapping[str, Field], records: Sequence[_Single]) -> _Chunk:
    columns = {
        name: stacked(field, [record.values[name] for record in records]) for name, field in fields.items()
    }
    return _Chunk.of(fields, columns)


def _listed(records: Any) -> list[Mapping[str, Any]]:
    """One record or several, as a list."""
    if isinstance(records, Mapping):
        return [records]
    many = list(records) if isinstance(records, Iterable) else [records]
    for record in many:
        if not isinstance(record, Mapping):
            got = repr(record) if record is records else f"{record!r} in a {type(records).__name__}"
            raise SettingsError(
                f"write({got[:200]}): must be a record (a dict of fields), or a list of records"
            )
    return many
