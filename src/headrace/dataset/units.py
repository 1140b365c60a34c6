"""A dataset in a store as a source of units: what is fetched over a network, and checked before it is used.

Opening reads the manifest and the units, whatever the number of shards: two requests. A unit is fetched when it is
first needed, or ahead of need. Local datasets can be opened in this way too, to have every byte checked on first use.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Histogram, join_lengths
from headrace.dataset.reads import FetchedReads, MappedReads, Reads
from headrace.dataset.sparse_index import SparseIndex
from headrace.dataset.stored import StoredSource
from headrace.dataset.unit_part import UnitPart
from headrace.errors import CorruptError, FormatError, RebuiltError
from headrace.format.checksum import checksum
from headrace.format.container import StoredFile, parse_head, view_sections
from headrace.format.fields import FieldKind
from headrace.format.index import LengthTable
from headrace.format.shard import Column, read_histogram
from headrace.format.units import PURPOSE, Units, read_units
from headrace.store.cache import Cache
from headrace.store.fetching import fetching
from headrace.store.store import Store

_OPENED_AT_ONCE = 256
_READ_EARLY_BYTES = 2**23
MOST_UNITS = 128
"""How many units stay loaded, apart from those that someone uses or has asked for ahead."""


class UnitSource(StoredSource):
    """Parts are units."""

    most_parts = MOST_UNITS

    @property
    def is_sparse(self) -> bool:
        """Whether units are worth opening without their data: a local file is mapped at no cost."""
        return self.store.is_remote

    def __init__(
        self,
        store: Store,
        cache: Cache | None = None,
        expected_checksum: str | None = None,
        check: bool = True,
    ) -> None:
        self.cache, self.check = cache, check
        self._further: dict[str, bytes] = {}
        """The further files that were read, by purpose."""
        self.units: Units
        self.reads: Reads
        super().__init__(store, expected_checksum=expected_checksum)

    def _has_opened(self) -> bool:
        try:
            fetching().urgent([partial(self.further, purpose) for purpose in (PURPOSE, *self._read_early())])
            self.units = self._read_units()
        except RebuiltError:
            return False
        files = [entry.stored for entry in self.manifest.shards]
        if self.store.is_remote:
            if self.cache is not None:
                groups = sorted({stored.checksum for stored in files})
                self.cache.for_dataset(self.manifest.checksum, groups, self.store.name)
            self.reads = FetchedReads(self.store, files, self._gone, self.cache)
        else:
            self.reads = MappedReads(self.store, files, self._gone, self.check)
        return True

    def further(self, purpose: str) -> tuple[StoredFile, bytes] | None:
        """A further file of the dataset and its content, checked; None if there is none for that purpose."""
        for entry in self.manifest.further:
            if entry.purpose == purpose:
                if purpose not in self._further:
                    self._further[purpose] = self._whole(entry.stored)
                return entry.stored, self._further[purpose]
        return None

    def _read_early(self) -> list[str]:
        """Small further files that are read together with the units, since that takes no longer."""
        if not self.store.is_remote:
            return []
        others = [entry for entry in self.manifest.further if entry.purpose != PURPOSE]
        return [entry.purpose for entry in others if entry.stored.bytes <= _READ_EARLY_BYTES]

    def _read_units(self) -> Units:
        found = self.further(PURPOSE)
        if found is None:
            raise FormatError(
                f"{self.name}: was written without checksums of its units, by an earlier version of Headrace; build it "
                "again, or open a local copy without verify"
            )
        stored, content = found
        name = self.store.locate(stored.file)
        header = parse_head(content[: stored.header_bytes], len(content), name)
        buffer = np.frombuffer(content, dtype=np.uint8)
        del self._further[PURPOSE]
        return read_units(buffer, header, self.manifest.fields, self.manifest.shards, name)

    def _whole(self, stored: StoredFile) -> bytes:
        """A small file, checked."""
        name = self.store.locate(stored.file)
        for _ in range(2):
            try:
                content = self.store.read(stored.file)
            except FileNotFoundError:
                raise self._gone(stored) from None
            if len(content) == stored.bytes and checksum(content) == stored.checksum:
                return content
        raise CorruptError(
            f"{name}: {len(content)} bytes whose checksum does not match the manifest: the file was damaged or "
            "overwritten; copy or build the dataset again"
        )

    @cached_property
    def _part_records(self) -> list[int]:
        counts: list[int] = np.diff(self.units.first_record).tolist()
        return counts

    @property
    def part_records(self) -> Sequence[int]:
        return self._part_records

    def part_elements(self, field: str) -> Sequence[int]:
        counted = self.units.first_element.get(field, self.units.first_record)
        counts: list[int] = np.diff(counted).tolist()
        return counts

    def load_part(self, number: int) -> UnitPart:
        return UnitPart(self.units, self.reads, number, self.name)

    def histogram(self, field: str) -> Histogram:
        if self.fields[field].kind is FieldKind.RAGGED:
            return super().histogram(field)
        return np.unique(join_lengths(self._columns(field), self.name), return_counts=True)

    def _columns(self, field: str) -> Iterator[Column]:
        """The columns of all units, without their data."""
        for first in range(0, self.units.count, _OPENED_AT_ONCE):
            numbers = range(first, min(first + _OPENED_AT_ONCE, self.units.count))
            parts = [self.load_part(number) for number in numbers]
            self.open_sparse(parts, field)
            yield from (part.sparse(field).column for part in parts)

    def shard_histograms(self, field: str) -> Iterator[Histogram]:
        """For each shard, the distinct lengths of a ragged field and how many records have each."""
        wanted = {f"{field}/lengths", f"{field}/counts"}

        def read(stored: StoredFile) -> Histogram:
            try:
                buffer, header = view_sections(self.store, stored, wanted.__contains__)
            except FileNotFoundError:
                raise self._gone(stored) from None
            return read_histogram(buffer, header, field, self.store.locate(stored.file))

        files = [entry.stored for entry in self.manifest.shards]
        for first in range(0, len(files), _OPENED_AT_ONCE):
            some = files[first : first + _OPENED_AT_ONCE]
            yield from fetching().urgent([partial(read, stored) for stored in some])

    def length_table(self, field: str) -> LengthTable:
        """The by-length table, of which only the blocks are read that someone asks for."""
        if not self.store.is_remote:
            return super().length_table(field)
        return self._index.table(field, self.elements[field])

    @cached_property
    def _index(self) -> SparseIndex:
        traffic = self.reads.traffic if isinstance(self.reads, FetchedReads) else None
        return SparseIndex(self.store, self.manifest, self.units, self._gone, traffic)

    def open_sparse(self, parts: Sequence[UnitPart], field: str, wait: bool = True) -> None:
        """Open a field of several units at once: their offsets, and none of their data yet.

        `wait` says whether to wait for units that were asked for ahead.
        """
        closed = [part for part in parts if part.is_closed(field, wait)]
        offsets: Sequence[NDArray[np.uint8] | None] = [None] * len(closed)
        if field in self.units.first_element:
            offsets = self.reads.pieces([self.units.offsets_piece(part.number, field) for part in closed])
        for part, content in zip(closed, offsets, strict=True):
            part.open_sparse(field, content)

    def fetch_ahead(self, parts: Sequence[UnitPart], fields: Sequence[str]) -> None:
        """Begin to fetch whole units that will be needed soon, the first first."""
        for part in parts:
            part.fetch_ahead(fields, fetching().ahead)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitSource, (self.store, self.cache, self.manifest.checksum, self.check)


def units_of(source: StoredSource) -> UnitSource | None:
    """The units of a local dataset that was opened by shards; None if it has none. They are not checked."""
    if not source.manifest.has_further(PURPOSE):
        return None
    return UnitSource(source.store, None, source.manifest.checksum, check=False)
