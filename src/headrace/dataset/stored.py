"""A dataset in a store as a source of parts: each shard is checked and mapped on first use."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Histogram, Part, join_lengths
from headrace.errors import CorruptError, DatasetNotFoundError, HeadraceError, RebuiltError
from headrace.format.checksum import checksum, header_checksum
from headrace.format.container import Header, StoredFile, check_preamble, parse_head
from headrace.format.fields import Field, FieldKind
from headrace.format.index import LengthTable, check_histogram, read_table
from headrace.format.manifest import Manifest, read_manifest, read_version
from headrace.format.shard import Shard
from headrace.store.store import Store


class StoredSource:
    """Opening reads the manifest and checks the size and the header of the index; no shard is touched.

    A build may replace the dataset at any time. The files of this version then stay until the next build that changes
    something; after that, a file that is missing means that the dataset was rebuilt, not that it is damaged.
    """

    def __init__(self, store: Store, in_memory: bool = False, expected_checksum: str | None = None) -> None:
        self.store, self.in_memory = store, in_memory
        self.name = store.name
        self.manifest: Manifest
        self._loaded: list[Shard] | None = None
        self._read_version(expected_checksum)
        while not self._has_opened():
            # Two builds have ended since the manifest was read: open what is there now.
            self._read_version(expected_checksum)

    def _read_version(self, expected_checksum: str | None) -> None:
        if expected_checksum is None:
            self.manifest = read_manifest(self.store)
            return
        manifest = read_version(self.store, expected_checksum)
        if manifest is None:
            raise self._rebuilt()
        self.manifest = manifest

    def _has_opened(self) -> bool:
        try:
            self._check(self.manifest.index)
            numbers = range(len(self.manifest.shards))
            self._loaded = [self._shard(number) for number in numbers] if self.in_memory else None
        except RebuiltError:
            return False
        return True

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

    def load_part(self, number: int) -> Part:
        return self._loaded[number] if self._loaded else self._shard(number)

    def histogram(self, field: str) -> Histogram:
        if self.fields[field].kind is not FieldKind.RAGGED:
            columns = (self.load_part(number)[field] for number in range(len(self.manifest.shards)))
            return np.unique(join_lengths(columns, self.name), return_counts=True)
        table = self.length_table(field)
        return table.lengths.astype(np.int64), table.counts

    def length_table(self, field: str) -> LengthTable:
        """The by-length table of a ragged field, mapped; `format/index.py` says how to read it."""
        buffer, header = self._open(self.manifest.index)
        name = self.store.locate(self.manifest.index.file)
        table = read_table(buffer, header, field, self.manifest.records, name)
        check_histogram(table, self.manifest.records, self.elements[field], name)
        return table

    def _shard(self, number: int) -> Shard:
        entry = self.manifest.shards[number]
        self._check(entry.stored)
        buffer, header = self._open(entry.stored)
        name = self.store.locate(entry.stored.file)
        shard = Shard(buffer, header, self.manifest.fields, name)
        held = {name: len(shard.part(name, "data")) for name in self.fields}
        if shard.records != entry.records or held != dict(entry.elements):
            raise CorruptError(
                f"{name}: its counts do not match the manifest; restore the file or rebuild the dataset"
            )
        return shard

    def _open(self, stored: StoredFile) -> tuple[NDArray[np.uint8], Header]:
        name = self.store.locate(stored.file)
        try:
            buffer = self.store.view(stored.file, in_memory=self.in_memory)
        except FileNotFoundError:
            raise self._gone(stored) from None
        return buffer, parse_head(buffer[: stored.header_bytes].tobytes(), len(buffer), name)

    def _check(self, stored: StoredFile) -> None:
        """Compare size and header with the manifest: a few system calls, and no parsing unless something is wrong."""
        name = self.store.locate(stored.file)
        try:
            head, size = self.store.head(stored.file, stored.header_bytes)
        except FileNotFoundError:
            raise self._gone(stored) from None
        if size == stored.bytes and header_checksum(head) == stored.header_checksum:
            return
        if size != stored.bytes:
            raise CorruptError(
                f"{name}: {size} bytes, but the manifest says {stored.bytes}: the file was truncated or overwritten"
            )
        check_preamble(head, size, name)
        raise CorruptError(
            f"{name}: its header does not match the manifest: the file was damaged or overwritten"
        )

    def _gone(self, stored: StoredFile) -> HeadraceError:
        """Why a file is not there: it was lost, or it belongs to a version that was replaced."""
        if self._is_replaced():
            return self._rebuilt()
        return DatasetNotFoundError(
            f"{self.store.locate(stored.file)}: missing, although the manifest names it; "
            "restore it or rebuild the dataset"
        )

    def _is_replaced(self) -> bool:
        """Whether our manifest is neither the current one nor the one before, whose files are kept."""
        try:
            return read_version(self.store, self.manifest.checksum) is None
        except HeadraceError:
            return False  # there is no dataset any more

    def _rebuilt(self) -> RebuiltError:
        return RebuiltError(
            f"{self.name}: the dataset was rebuilt since it was opened, and the version that was opened is not kept "
            "any longer; open it again"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredSource, (self.store, self.in_memory, self.manifest.checksum)
