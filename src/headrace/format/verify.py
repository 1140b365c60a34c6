"""Check a whole dataset: every checksum, and that the stored arrays agree with each other.

Each remote file is fetched once, in ranges, several at a time. What is compared across shards after that are their
tables, without their data.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CorruptError, HeadraceError, StorageError
from headrace.format.blocks import checksums_of
from headrace.format.checksum import hasher, header_checksum
from headrace.format.container import StoredFile, parse_head, view_sections
from headrace.format.fields import MAX_LENGTH, FieldKind
from headrace.format.index import check_histogram, check_order, histogram, read_table
from headrace.format.manifest import Manifest, ShardEntry, read_manifest
from headrace.format.ragged import Ragged
from headrace.format.shard import Shard, load_tables
from headrace.format.units import PURPOSE, describe_index, describe_units, read_units
from headrace.public import public
from headrace.store.address import open_store
from headrace.store.fetching import fetching
from headrace.store.store import Store

_BLOCK_BYTES = 16 * 2**20
_RANGE_BYTES = 8 * 2**20
_RANGES_AT_ONCE = 8
_TABLES_AT_ONCE = 32


@dataclass(frozen=True)
class Verified:
    """The result for one file; `problem` is empty if the file is intact."""

    file: str
    bytes: int
    problem: str = ""


@public
def verify(path: str | os.PathLike[str] | Store) -> Iterator[Verified]:
    """Check a dataset file by file, and report each file once. Files are checked while you loop over the result:

        for verified in headrace.verify("data"):
            if verified.problem:
                print(verified.file, verified.problem)

    A damaged manifest raises an error. A damaged file is reported, and the check continues.
    """
    store = open_store(path)
    return _verdicts(store, read_manifest(store))


def _verdicts(store: Store, manifest: Manifest) -> Iterator[Verified]:
    # Two shards with the same content share one file, which is checked once.
    entries: dict[str, list[ShardEntry]] = {}
    for entry in manifest.shards:
        entries.setdefault(entry.stored.file, []).append(entry)
    units = {further.stored.file for further in manifest.further if further.purpose == PURPOSE}
    intact_units: StoredFile | None = None
    damaged: set[str] = set()
    """The shards that are damaged: nothing can be compared with them."""
    for stored in {stored.file: stored for stored in manifest.files}.values():
        if stored.file == manifest.index.file:
            continue
        problem = ""
        try:
            content = _check_file(store, stored)
            if stored.file in entries:
                _check_shard(store, manifest, entries[stored.file], content)
            del content
            if stored.file in units and not damaged:
                _check_units(store, manifest, stored)
                intact_units = stored
        except (HeadraceError, OSError) as error:
            problem = _problem(store, error)
            if stored.file in entries:
                damaged.add(stored.file)
        yield Verified(stored.file, stored.bytes, problem)
    problem = ""
    try:
        content = _check_file(store, manifest.index)
        _check_index(store, manifest, damaged, content)
        if intact_units is not None:
            _check_described(store, intact_units, describe_index(store, manifest.index), manifest.index.file)
    except (HeadraceError, OSError) as error:
        problem = _problem(store, error)
    yield Verified(manifest.index.file, manifest.index.bytes, problem)


def _problem(store: Store, error: Exception) -> str:
    """What to report about a file; if a server does not answer, nothing is known about this file or any other."""
    if store.is_remote and isinstance(error, StorageError) and not isinstance(error, FileNotFoundError):
        raise error
    return str(error)


def _check_file(store: Store, stored: StoredFile) -> NDArray[np.uint8]:
    """The content of the file, once it is certain that it is what the manifest says."""
    path = store.locate(stored.file)
    try:
        head, size = store.head(stored.file, stored.header_bytes)
    except FileNotFoundError:
        raise CorruptError(f"{path}: is missing, although the manifest names it") from None
    if size != stored.bytes:
        raise CorruptError(f"{path}: {size} bytes, but the manifest says {stored.bytes}")
    if store.is_remote:
        content, digest = _fetch(store, stored)
    else:
        digest, done = hasher(), 0
        while block := store.read(stored.file, done, _BLOCK_BYTES):
            digest.update(block)
            done += len(block)
        content = store.view(stored.file)
    if digest.hexdigest() != stored.checksum:
        raise CorruptError(f"{path}: checksum {digest.hexdigest()}, but the manifest says {stored.checksum}")
    if header_checksum(head) != stored.header_checksum:
        raise CorruptError(f"{path}: the checksum of its header does not match the manifest")
    return content


def _fetch(store: Store, stored: StoredFile) -> tuple[NDArray[np.uint8], Any]:
    """All bytes of a remote file, and the digest of them."""
    content, digest = np.empty(stored.bytes, dtype=np.uint8), hasher()

    def fetch(start: int) -> None:
        stop = min(start + _RANGE_BYTES, stored.bytes)
        content[start:stop] = np.frombuffer(store.fetch(stored.file, start, stop), dtype=np.uint8)

    together = _RANGE_BYTES * _RANGES_AT_ONCE
    for begin in range(0, stored.bytes, together):
        end = min(begin + together, stored.bytes)
        fetching().urgent([partial(fetch, start) for start in range(begin, end, _RANGE_BYTES)])
        digest.update(content[begin:end].data)
    return content, digest


def _tables(store: Store, manifest: Manifest) -> Iterator[Shard]:
    """The shards without their data, in order; of remote ones, several are fetched at a time."""
    files = [entry.stored for entry in manifest.shards]
    at_once = _TABLES_AT_ONCE if store.is_remote else 1
    for first in range(0, len(files), at_once):
        some = files[first : first + at_once]
        yield from fetching().urgent([partial(load_tables, store, each, manifest.fields) for each in some])


def _check_shard(
    store: Store, manifest: Manifest, entries: list[ShardEntry], content: NDArray[np.uint8]
) -> None:
    stored = entries[0].stored
    name = store.locate(stored.file)
    header = parse_head(content[: stored.header_bytes].tobytes(), len(content), name)
    shard = Shard(content, header, manifest.fields, name)
    held = {name: len(shard.part(name, "data")) for name in manifest.fields}
    for entry in entries:
        if shard.records != entry.records or held != dict(entry.elements):
            raise CorruptError(
                f"{store.locate(stored.file)}: {shard.records} records and {held} elements, "
                f"but the manifest says {entry.records} and {dict(entry.elements)}"
            )
    _check_blocks(shard, store.locate(stored.file))
    for name, field in manifest.fields.items():
        column = shard[name]
        if isinstance(column, Ragged):
            _check_column(shard, name, column, field.kind, store.locate(stored.file))


def _check_blocks(shard: Shard, path: str) -> None:
    if shard.blocks is not None and not np.array_equal(shard.blocks, checksums_of(shard.before_blocks)):
        raise CorruptError(f"{path}: the checksums of its blocks do not match its content")


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


def _check_units(store: Store, manifest: Manifest, stored: StoredFile) -> None:
    """Describe the units once more, from the shards, one at a time, and compare."""
    path = store.locate(stored.file)
    buffer, header = view_sections(store, stored, lambda _: True)
    units = read_units(buffer, header, manifest.fields, manifest.shards, path)
    shards = ((shard, units.edges(number)) for number, shard in enumerate(_tables(store, manifest)))
    expected = describe_units(manifest.fields, shards)
    if expected is None:
        raise CorruptError(f"{path}: a shard has no checksums of its blocks")
    _check_described(store, stored, expected, "the shards")


def _check_described(
    store: Store, units: StoredFile, expected: Mapping[str, NDArray[np.uint64]], described: str
) -> None:
    buffer, header = view_sections(store, units, lambda _: True)
    for name, array in expected.items():
        if not np.array_equal(header.sections[name].view(buffer), array):
            raise CorruptError(f"{store.locate(units.file)}: {name!r} does not match {described}")


def _check_index(store: Store, manifest: Manifest, damaged: set[str], buffer: NDArray[np.uint8]) -> None:
    """Compare the index with the shards, one at a time; if a shard is damaged, compare only its sums."""
    path = store.locate(manifest.index.file)
    header = parse_head(buffer[: manifest.index.header_bytes].tobytes(), len(buffer), path)
    for name in (name for name, field in manifest.fields.items() if field.kind is FieldKind.RAGGED):
        table = read_table(buffer, header, name, manifest.records, path)
        elements = sum(entry.elements[name] for entry in manifest.shards)
        check_histogram(table, manifest.records, elements, path)
        if not damaged:
            check_order(
                table,
                (shard.histogram(name) for shard in _tables(store, manifest)),
                (shard.lengths(name) for shard in _tables(store, manifest)),
                f"{path}: '{name}'",
            )
