"""Check a whole dataset: every checksum, and that the stored arrays say the same as one another."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.errors import CorruptError, PenstockError
from penstock.format.checksum import hasher
from penstock.format.container import StoredFile, parse_head
from penstock.format.fields import FieldKind
from penstock.format.index import PARTS, merge_histograms, read_table
from penstock.format.manifest import Manifest, ShardEntry, read_manifest
from penstock.format.ragged import Ragged
from penstock.format.shard import Shard, by_length
from penstock.store.local import map_bytes

_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Verified:
    """One file's verdict; `problem` is empty if it is whole."""

    file: str
    bytes: int
    problem: str = ""


def verify(path: str | os.PathLike[str]) -> Iterator[Verified]:
    """Check a dataset file by file. A damaged manifest raises; a damaged file is reported and the rest goes on."""
    directory = Path(path)
    manifest = read_manifest(directory)
    # The same file may stand for two shards of the same content: check it once.
    for stored in {stored.file: stored for stored in manifest.files}.values():
        try:
            _check_file(directory, stored)
            for entry in manifest.shards:
                if entry.stored == stored:
                    _check_shard(directory, manifest, entry)
                    break
            problem = ""
        except (PenstockError, OSError) as error:
            problem = str(error)
        yield Verified(stored.file, stored.bytes, problem)
    try:
        _check_index(directory, manifest)
    except (PenstockError, OSError) as error:
        yield Verified(manifest.index.file, manifest.index.bytes, str(error))


def _check_file(directory: Path, stored: StoredFile) -> None:
    path = directory / stored.file
    digest, size = hasher(), 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    if size != stored.bytes:
        raise CorruptError(f"{path}: {size} bytes, the manifest says {stored.bytes}")
    if digest.hexdigest() != stored.checksum:
        raise CorruptError(f"{path}: checksum {digest.hexdigest()}, the manifest says {stored.checksum}")


def _load(directory: Path, manifest: Manifest, entry: ShardEntry) -> Shard:
    path = directory / entry.stored.file
    buffer = map_bytes(path)
    header = parse_head(buffer[: entry.stored.header_bytes].tobytes(), len(buffer), str(path))
    return Shard(buffer, header, manifest.fields, str(path))


def _check_shard(directory: Path, manifest: Manifest, entry: ShardEntry) -> None:
    shard = _load(directory, manifest, entry)
    if shard.records != entry.records:
        raise CorruptError(f"{entry.stored.file}: {shard.records} records, the manifest says {entry.records}")
    for name, field in manifest.fields.items():
        column = shard[name]
        if len(shard.part(name, "data")) != entry.elements[name]:
            raise CorruptError(f"{entry.stored.file}: '{name}' has another number of elements than the manifest says")
        if not isinstance(column, Ragged):
            continue
        if (column.offsets[1:] < column.offsets[:-1]).any():
            raise CorruptError(f"{entry.stored.file}: offsets of '{name}' go backwards")
        if field.kind is FieldKind.RAGGED:
            for part, expected in by_length(column.lengths).items():
                if not np.array_equal(shard.part(name, part), expected):
                    raise CorruptError(f"{entry.stored.file}: '{name}/{part}' does not follow from the offsets")


def _check_index(directory: Path, manifest: Manifest) -> None:
    path = directory / manifest.index.file
    buffer = map_bytes(path)
    header = parse_head(buffer[: manifest.index.header_bytes].tobytes(), len(buffer), str(path))
    shards = [_load(directory, manifest, entry) for entry in manifest.shards]
    for name, field in manifest.fields.items():
        if field.kind is not FieldKind.RAGGED:
            continue
        table = read_table(buffer, header, name, str(path))
        expected = merge_histograms([(shard.part(name, "lengths"), shard.part(name, "counts")) for shard in shards])
        for part in PARTS:
            if not np.array_equal(table[part], expected[part]):
                raise CorruptError(f"{path}: '{name}/{part}' does not follow from the shards' histograms")
