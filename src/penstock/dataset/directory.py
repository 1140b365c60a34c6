"""A dataset's directory as a source of parts: each shard is mapped when it is first touched."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset.dataset import Histogram
from penstock.errors import CorruptError, DatasetNotFoundError, FormatError
from penstock.format.checksum import checksum, header_checksum
from penstock.format.container import ALIGNMENT, Header, StoredFile, check_preamble, parse_head
from penstock.format.fields import Field, FieldKind
from penstock.format.index import read_table
from penstock.format.manifest import Manifest, read_manifest
from penstock.format.ragged import Ragged
from penstock.format.shard import Shard
from penstock.store.local import map_bytes, read_bytes, read_head


class DirectorySource:
    """Reads the manifest and checks each file's size and header; touches no data."""

    def __init__(self, path: str, in_memory: bool = False, expected_checksum: str | None = None) -> None:
        self._path, self._in_memory = Path(path), in_memory
        self.manifest: Manifest = read_manifest(self._path)
        if expected_checksum not in (None, self.manifest.checksum):
            raise FormatError(f"{path}: the dataset was rebuilt since it was opened elsewhere; open it again there")
        for stored in (*(shard.stored for shard in self.manifest.shards), self.manifest.index):
            check_stored(self._path, stored)
        self._loaded = [self._shard(number) for number in range(len(self.manifest.shards))] if in_memory else None

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.manifest.fields

    @property
    def part_records(self) -> Sequence[int]:
        return [shard.records for shard in self.manifest.shards]

    @property
    def elements(self) -> Mapping[str, int]:
        return {name: sum(shard.elements[name] for shard in self.manifest.shards) for name in self.fields}

    @property
    def fingerprint(self) -> str:
        return checksum("".join(shard.stored.checksum for shard in self.manifest.shards))

    def load_part(self, number: int) -> Shard:
        return self._loaded[number] if self._loaded else self._shard(number)

    def histogram(self, field: str) -> Histogram:
        if self.fields[field].kind is not FieldKind.RAGGED:
            columns = [self.load_part(number)[field] for number in range(len(self.manifest.shards))]
            lengths = [column.lengths for column in columns if isinstance(column, Ragged)]
            return np.unique(np.concatenate([np.empty(0, np.int64), *lengths]), return_counts=True)
        table = self.length_table(field)
        return np.asarray(table["lengths"]), np.diff(table["starts"]).astype(np.int64)

    def length_table(self, field: str) -> dict[str, NDArray[Any]]:
        """The by-length table of a ragged field, mapped; `format/index.py` says how to read it."""
        buffer, header = self._open(self.manifest.index)
        return read_table(buffer, header, field, self.manifest.index.file)

    def _shard(self, number: int) -> Shard:
        entry = self.manifest.shards[number]
        buffer, header = self._open(entry.stored)
        shard = Shard(buffer, header, self.manifest.fields, entry.stored.file)
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
        return DirectorySource, (str(self._path.absolute()), self._in_memory, self.manifest.checksum)


def check_stored(directory: Path, stored: StoredFile) -> None:
    """Size and header against the manifest: a few system calls a file, no parsing unless something is wrong."""
    path = directory / stored.file
    try:
        head, size = read_head(path, stored.header_bytes)
    except FileNotFoundError:
        raise _missing(path) from None
    if size == stored.bytes and header_checksum(head) == stored.header_checksum:
        return
    if size < ALIGNMENT:
        raise CorruptError(f"{path}: {size} bytes, the manifest says {stored.bytes}: truncated or overwritten")
    check_preamble(head, size, str(path))
    raise CorruptError(f"{path}: its header or size ({size} bytes, the manifest says {stored.bytes}) does not match")


def _missing(path: Path) -> DatasetNotFoundError:
    return DatasetNotFoundError(f"{path}: missing, though the manifest names it; restore it or rebuild the dataset")
