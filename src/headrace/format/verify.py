"""Check a whole dataset: every checksum, and that the stored arrays agree with each other."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.errors import CorruptError, HeadraceError
from headrace.format.checksum import hasher, header_checksum
from headrace.format.container import StoredFile, parse_head
from headrace.format.fields import MAX_LENGTH, FieldKind
from headrace.format.index import check_histogram, check_order, histogram, read_table
from headrace.format.manifest import Manifest, ShardEntry, read_manifest
from headrace.format.ragged import Ragged
from headrace.format.shard import Shard, load_shard
from headrace.public import public
from headrace.store.address import open_store
from headrace.store.store import Store

_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Verified:
    """The result for one file; `problem` is empty if the file is intact."""

    file: str
    bytes: int
    problem: str = ""


@public
def verify(path: str | os.PathLike[str] | Store) -> Iterator[Verified]:
    """Check a dataset file by file, and report each file once.

    A damaged manifest raises an error. A damaged file is reported, and the check continues.
    """
    store = open_store(path)
    return _verdicts(store, read_manifest(store))


def _verdicts(store: Store, manifest: Manifest) -> Iterator[Verified]:
    # Two shards with the same content share one file, which is checked once.
    entries: dict[str, list[ShardEntry]] = {}
    for entry in manifest.shards:
        entries.setdefault(entry.stored.file, []).append(entry)
    damaged: set[str] = set()
    for stored in {stored.file: stored for stored in manifest.files}.values():
        if stored.file == manifest.index.file:
            continue
        problem = ""
        try:
            _check_file(store, stored)
            if stored.file in entries:
                _check_shard(store, manifest, entries[stored.file])
        except (HeadraceError, OSError) as error:
            problem = str(error)
            damaged.add(stored.file)
        yield Verified(stored.file, stored.bytes, problem)
    problem = ""
    try:
        _check_file(store, manifest.index)
        _check_index(store, manifest, damaged)
    except (HeadraceError, OSError) as error:
        problem = str(error)
    yield Verified(manifest.index.file, manifest.index.bytes, problem)


def _check_file(store: Store, stored: StoredFile) -> None:
    path = store.locate(stored.file)
    head, _ = store.head(stored.file, stored.header_bytes)
    digest, size = hasher(), 0
    while block := store.read(stored.file, size, _BLOCK_BYTES):
        digest.update(block)
        size += len(block)
    if size != stored.bytes:
        raise CorruptError(f"{path}: {size} bytes, but the manifest says {stored.bytes}")
    if digest.hexdigest() != stored.checksum:
        raise CorruptError(f"{path}: checksum {digest.hexdigest()}, but the manifest says {stored.checksum}")
    if header_checksum(head) != stored.header_checksum:
        raise CorruptError(f"{path}: the checksum of its header does not match the manifest")


def _check_shard(store: Store, manifest: Manifest, entries: list[ShardEntry]) -> None:
    stored = entries[0].stored
    shard = load_shard(store, stored, manifest.fields)
    held = {name: len(shard.part(name, "data")) for name in manifest.fields}
    for entry in entries:
        if shard.records != entry.records or held != dict(entry.elements):
            raise CorruptError(
                f"{store.locate(stored.file)}: {shard.records} records and {held} elements, "
                f"but the manifest says {entry.records} and {dict(entry.elements)}"
            )
    for name, field in manifest.fields.items():
        column = shard[name]
        if isinstance(column, Ragged):
            _check_column(shard, name, column, field.kind, store.locate(stored.file))


def _check_column(shard: Shard, name: str, column: Ragged, kind: FieldKind, path: str) -> None:
    if (column.offsets[1:] < column.offsets[:-1]).any():
        raise CorruptError(f"{path}: the offsets of '{name}' decrease")
    lengths = column.lengths
    if lengths.max(initial=0) > MAX_LENGTH:
        raise CorruptError(
            f"{path}: '{name}' has a record of {lengths.max()} elements; the maximum is {MAX_LENGTH}"
        )
    if kind is not FieldKind.RAGGED:
        return
    for part, expected in zip(("lengths", "counts"), histogram(lengths), strict=True):
        if not np.array_equal(shard.part(name, part), expected):
            raise CorruptError(f"{path}: '{name}/{part}' does not match the offsets")


def _check_index(store: Store, manifest: Manifest, damaged: set[str]) -> None:
    """Compare the index with the shards, one at a time; if a shard is damaged, compare only its sums."""
    path = store.locate(manifest.index.file)
    buffer = store.view(manifest.index.file)
    header = parse_head(buffer[: manifest.index.header_bytes].tobytes(), len(buffer), path)
    for name in (name for name, field in manifest.fields.items() if field.kind is FieldKind.RAGGED):
        table = read_table(buffer, header, name, manifest.records, path)
        elements = sum(entry.elements[name] for entry in manifest.shards)
        check_histogram(table, manifest.records, elements, path)
        if not damaged:
            stored = [entry.stored for entry in manifest.shards]
            check_order(
                table,
                (load_shard(store, file, manifest.fields).histogram(name) for file in stored),
                (load_shard(store, file, manifest.fields).lengths(name) for file in stored),
                f"{path}: '{name}'",
            )
