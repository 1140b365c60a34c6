"""A shard: some records, field by field, each field one contiguous array.

For a field of fixed shape the shard holds `data` alone. For a ragged or bytes field it holds `data` (all
values end to end) and `offsets` (u64, one more than there are records). For a ragged field it also holds its
histogram, from which the dataset's index is made:

    lengths  u32  the distinct lengths, ascending
    counts   u32  how many records have each

With lengths 7 3 7 0 the two are [0 3 7] and [1 1 2].
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CorruptError, FieldError, SettingsError
from headrace.format.container import (
    Chunks,
    Header,
    Section,
    StoredFile,
    find_blocks,
    parse_head,
    view_sections,
    write_container,
)
from headrace.format.fields import MAX_LENGTH, MAX_RECORDS, Field, FieldKind
from headrace.format.index import Histogram, histogram
from headrace.format.manifest import ShardEntry
from headrace.format.ragged import Ragged
from headrace.store.fetching import fetching
from headrace.store.store import Store

_FETCHED_AT_ONCE = 16
Column = NDArray[Any] | Ragged
"""Some records of one field: an array with one row for each record, or a Ragged."""


class ShardBuilder:
    """Collects columns in RAM and writes them as one shard. The owner decides when it is large enough."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.fields = dict(fields)
        self.records = 0
        self.payload_bytes = 0
        self._pieces: dict[str, list[NDArray[Any]]] = {name: [] for name in fields}
        self._lengths: dict[str, list[NDArray[Any]]] = {name: [] for name, f in fields.items() if f.variable}

    def append(self, columns: Mapping[str, Column]) -> None:
        """Add records: one column for each field, all with the same number of records.

        The arrays are not copied, so they must not change afterwards.
        """
        if set(columns) != set(self.fields):
            raise FieldError(f"columns {sorted(columns)}: must be exactly the fields {sorted(self.fields)}")
        checked = {name: _checked(name, field, columns[name]) for name, field in self.fields.items()}
        counts = {name: len(column) for name, column in checked.items()}
        if len(set(counts.values())) > 1:
            raise SettingsError(
                f"columns of different lengths: {counts}; all must have the same number of records"
            )
        total = self.records + next(iter(counts.values()))
        if total > MAX_RECORDS:
            raise SettingsError(
                f"{total:,} records in one shard; the maximum is {MAX_RECORDS:,}, so write more shards"
            )
        for name, column in checked.items():
            values = column
            if isinstance(column, Ragged):
                values = column.values[int(column.offsets[0]) : int(column.offsets[-1])]
                self._lengths[name].append(column.lengths)
                self.payload_bytes += 8 * len(column)
            self._pieces[name].append(values)  # type: ignore[arg-type]
            self.payload_bytes += values.nbytes  # type: ignore[union-attr]
        self.records = total

    def write(self, store: Store) -> ShardEntry:
        """Write `shard-<checksum>.hdrc` and return its entry for the manifest."""
        sections: dict[str, Chunks] = {}
        elements = {}
        for name, field in self.fields.items():
            if field.variable:
                lengths = np.concatenate([np.empty(0, np.int64), *self._lengths[name]])
                offsets = np.zeros(self.records + 1, dtype="<u8")
                np.cumsum(lengths, out=offsets[1:], dtype=offsets.dtype)
                elements[name] = int(offsets[-1])
            else:
                elements[name] = self.records
            shape = (elements[name], *field.shape)
            sections[f"{name}/data"] = Chunks(field.numpy_dtype, shape, self._pieces[name])
            if field.variable:
                sections[f"{name}/offsets"] = Chunks.of(offsets)
            if field.kind is FieldKind.RAGGED:
                distinct, counts = histogram(lengths)
                sections |= {f"{name}/lengths": Chunks.of(distinct), f"{name}/counts": Chunks.of(counts)}
        attributes = {
            "records": self.records,
            "fields": [{"name": name, **field.to_json()} for name, field in self.fields.items()],
        }
        stored = write_container(store, "shard", "shard", attributes, sections)
        return ShardEntry(stored=stored, records=self.records, elements=elements)


def _checked(name: str, field: Field, column: Column) -> Column:
    if isinstance(column, Ragged) != field.variable or not isinstance(column, Ragged | np.ndarray):
        raise SettingsError(f"field {name!r} is {field.notation}: got {type(column).__name__}")
    values = column.values if isinstance(column, Ragged) else column
    if values.dtype != field.numpy_dtype:
        raise SettingsError(f"field {name!r} is {field.notation}: got values of dtype {values.dtype}")
    if not values.ndim or values.shape[1:] != field.shape:
        raise SettingsError(
            f"field {name!r} is {field.notation}: got values that each have shape {values.shape[1:]}"
        )
    if isinstance(column, Ragged):
        column.check(name)
        longest = int(column.lengths.max(initial=0))
        if longest > MAX_LENGTH:
            raise SettingsError(
                f"field {name!r}: a record has {longest:,} elements; the maximum is {MAX_LENGTH:,}. "
                "Split it into smaller records"
            )
    return column


class Shard:
    """Read-only views of one shard's arrays over a mapped (or loaded) file."""

    def __init__(
        self, buffer: NDArray[np.uint8], header: Header, fields: Mapping[str, Field], name: str
    ) -> None:
        if header.kind != "shard":
            raise CorruptError(f"{name}: is a {header.kind[:80]!r} file, but a shard is expected")
        self._buffer, self._header, self._name = buffer, header, name
        records = header.attributes.get("records")
        if type(records) is not int or not 0 <= records <= MAX_RECORDS:
            raise CorruptError(f"{name}: damaged header: records {str(records)[:80]}")
        self.records: int = records
        described = header.attributes.get("fields")
        if described != [{"name": field_name, **field.to_json()} for field_name, field in fields.items()]:
            raise CorruptError(f"{name}: its fields do not match the manifest")
        self._columns = {field_name: self._column(field_name, field) for field_name, field in fields.items()}

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def part(self, name: str, part: str) -> NDArray[Any]:
        """One stored array: `data`, `offsets`, and for ragged fields `lengths` and `counts`."""
        return self._section(name, part).view(self._buffer)

    @property
    def blocks(self) -> NDArray[np.uint64] | None:
        """The checksums of the file's blocks; None if it was written before there were any."""
        section = find_blocks(self._header, self._name)
        return None if section is None else section.view(self._buffer)

    @property
    def before_blocks(self) -> NDArray[np.uint8]:
        """The bytes of the file that the checksums of its blocks are about."""
        section = find_blocks(self._header, self._name)
        return self._buffer[: section.offset] if section else self._buffer

    def section_offsets(self) -> dict[str, int]:
        """Where each section begins in the file."""
        return {name: section.offset for name, section in self._header.sections.items()}

    def histogram(self, name: str) -> Histogram:
        """The distinct lengths of a ragged field's records, and how many have each."""
        return self.part(name, "lengths"), self.part(name, "counts")

    def lengths(self, name: str) -> NDArray[Any]:
        """The lengths of a ragged field's records."""
        return np.diff(self.part(name, "offsets")).astype(np.int64)

    def _section(self, name: str, part: str) -> Section:
        section = self._header.sections.get(f"{name}/{part}")
        if section is None:
            raise CorruptError(f"{self._name}: damaged header: section '{name}/{part}' is missing")
        return section

    def _expect(self, name: str, part: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        section = self._section(name, part)
        if section.dtype != dtype or section.shape != shape:
            raise CorruptError(
                f"{self._name}: '{name}/{part}' is {section.dtype}{section.shape}, but must be {dtype}{shape}"
            )

    def _column(self, name: str, field: Field) -> Column:
        length = self._section(name, "data").shape[:1] if field.variable else (self.records,)
        if not length:
            raise CorruptError(f"{self._name}: '{name}/data' is a single value, not {field.notation}")
        self._expect(name, "data", field.numpy_dtype, (*length, *field.shape))
        data = self.part(name, "data")
        if not field.variable:
            return data
        self._expect(name, "offsets", np.dtype("<u8"), (self.records + 1,))
        offsets = self.part(name, "offsets")
        if offsets[0] != 0 or offsets[-1] != len(data):
            raise CorruptError(f"{self._name}: '{name}/offsets' does not span the data")
        if field.kind is FieldKind.RAGGED:
            distinct = self._section(name, "lengths").shape
            for part, shape in (("lengths", distinct[:1]), ("counts", distinct)):
                self._expect(name, part, np.dtype("<u4"), shape)
        return Ragged(data, offsets)


def read_histogram(buffer: NDArray[np.uint8], header: Header, field: str, name: str) -> Histogram:
    """The histogram of a ragged field, from a shard of which nothing else need be there."""
    found = []
    for part in ("lengths", "counts"):
        section = header.sections.get(f"{field}/{part}")
        if section is None or section.dtype != np.dtype("<u4") or len(section.shape) != 1:
            raise CorruptError(f"{name}: damaged header: '{field}/{part}' is missing or has another type")
        found.append(section.view(buffer))
    if len(found[0]) != len(found[1]):
        raise CorruptError(f"{name}: {len(found[0])} lengths of {field!r}, but {len(found[1])} counts")
    return found[0], found[1]


def load_tables(store: Store, stored: StoredFile, fields: Mapping[str, Field]) -> Shard:
    """A shard of which all may be read but the data. Of a remote shard, no data is fetched."""
    data = {f"{name}/data" for name in fields}
    buffer, header = view_sections(store, stored, lambda section: section not in data)
    return Shard(buffer, header, fields, store.locate(stored.file))


def each_tables(store: Store, shards: Sequence[ShardEntry], fields: Mapping[str, Field]) -> Iterator[Shard]:
    """The tables of all shards: local ones are mapped one at a time, and of remote ones a few are fetched at once."""
    at_once = _FETCHED_AT_ONCE if store.is_remote else 1
    for first in range(0, len(shards), at_once):
        some = shards[first : first + at_once]
        loads = [partial(load_tables, store, entry.stored, fields) for entry in some]
        yield from fetching().urgent(loads)


def load_shard(store: Store, stored: StoredFile, fields: Mapping[str, Field]) -> Shard:
    """Map a shard and check its header; its data is not read."""
    name = store.locate(stored.file)
    buffer = store.view(stored.file)
    header = parse_head(buffer[: stored.header_bytes].tobytes(), len(buffer), name)
    return Shard(buffer, header, fields, name)
