"""A dataset's directory as a source of parts: each shard is mapped when it is first touched."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Histogram, join_lengths
from headrace.errors import CorruptError, DatasetNotFoundError, FormatError
from headrace.format.checksum import checksum, header_checksum
from headrace.format.container import Header, StoredFile, check_preamble, parse_head
from headrace.format.fields import Field, FieldKind
from headrace.format.index import LengthTable, check_histogram, read_table
from headrace.format.manifest import Manifest, read_manifest
from headrace.format.shard import Shard
from headrace.store.local import map_bytes, read_bytes, read_head


class DirectorySource:
    """Reads the manifest and checks each file's size and header; touches no data."""

    def __init__(self, path: str, in_memory: bool = False, expected_checksum: str | None = None) -> None:
        # Absolute from the start: files are opened later, perhaps from another working directory.
        self._path, self._in_memory = Path(path).absolute(), in_memory
        self.name = str(path)
        self.manifest: Manifest = read_manifest(self._path)
        if expected_checksum not in (None, self.manifest.checksum):
            raise FormatError(
                f"{path}: the dataset was rebuilt since it was opened elsewhere; open it again there"
            )
        for stored in (*(shard.stored for shard in self.manifest.shards), self.manifest.index):
            check_stored(self._path, stored)
        numbers = range(len(self.manifest.shards))
        self._loaded = [self._shard(number) for number in numbers] if in_memory else None

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.manifest.fields

    @property
    def part_records(self) -> Sequence[int]:
        return [shard.records for shard in self.manifest.shards]

    @property
    def elements(self) -> Mapping[str, int]:
        return {name: sum(shard.elements[name] for shard in self.manifest.shards) for name in self.fields}

    def part_elements(self, field: str) -> Sequence[int]:
        return [shard.elements[field] for shard in self.manifest.shards]

    @property
    def fingerprint(self) -> str:
        return checksum("".join(shard.stored.checksum for shard in self.manifest.shards).encode())

    def load_part(self, number: int) -> Shard:
        return self._loaded[number] if self._loaded else self._shard(number)

    def histogram(self, field: str) -> Histogram:
        if self.fields[field].kind is not FieldKind.RAGGED:
            columns = [self.load_part(number)[field] for number in range(len(self.manifest.shards))]
            return np.unique(join_lengths(columns, self.name), return_counts=True)
        table = self.length_table(field)
        return table.lengths.astype(np.int64), table.counts

    def length_table(self, field: str) -> LengthTable:
        """The by-length table of a ragged field, mapped; `format/index.py` says how to read it."""
        buffer, header = self._open(self.manifest.index)
        name = str(self._path / self.manifest.index.file)
        table = read_table(buffer, header, field, self.manifest.records, name)
        check_histogram(table, self.manifest.records, self.elements[field], name)
        return table

    def _shard(self, number: int) -> Shard:
        entry = self.manifest.shards[number]
        buffer, header = self._open(entry.stored)
        shard = Shard(buffer, header, self.manifest.fields, str(self._path / entry.stored.file))
        held = {name: len(shard.part(name, "data")) for name in self.fields}
        if shard.records != entry.records or held != dict(entry.elements):
            raise CorruptError(f"{self._path / entry.stored.file}: its counts are not those of the manifest")
        return shard

    def _open(self, stored: StoredFile) -> tuple[NDArray[np.uint8], Header]:
        path = self._path / stored.file
        try:
            buffer = read_bytes(path) if self._in_memory else map_bytes(path)
        except FileNotFoundError:
            raise _missing(path) from None
        return buffer, parse_head(buffer[: stored.header_bytes].tobytes(), len(buffer), str(path))

    def __reduce__(self) -> tuple[Any, ...]:
        return DirectorySource, (str(self._path), self._in_memory, self.manifest.checksum)


def check_stored(directory: Path, stored: StoredFile) -> None:
    """Size and header against the manifest: a few system calls a file, no parsing unless something is off."""
    path = directory / stored.file
    try:
        head, size = read_head(path, stored.header_bytes)
    except FileNotFoundError:
        raise _missing(path) from None
    if size == stored.bytes and header_checksum(head) == stored.header_checksum:
        return
    if size != stored.bytes:
        raise CorruptError(
            f"{path}: {size} bytes, the manifest says {stored.bytes}: truncated or overwritten"
        )
    check_preamble(head, size, str(path))
    raise CorruptError(f"{path}: its header does not match the manifest: damaged or overwritten")


def _missing(path: Path) -> DatasetNotFoundError:
    return DatasetNotFoundError(
        f"{path}: missing, though the manifest names it; restore it or rebuild the dataset"
    )
