"""Units: runs of consecutive records of one shard, about 4 MB each, that are read, checked and cached as a whole.

Whoever reads a dataset over a network neither wants a whole shard at a time nor one record at a time. The file `units`
of a dataset, which the manifest names among its further files, says where each shard is cut, and how to check the
pieces that are cut out: for each field, a stretch of its data, and for variable fields a stretch of its offsets.

    shard            records 0 1 2 3 4 5 6 7 8 9
    units            0 1 2 3 | 4 5 6 | 7 8 9
    first_record     0         4       7       10
    pieces of unit 1 bytes of records 4 to 6 in `tokens/data`, and of offsets 4 to 7 in `tokens/offsets`

A piece of tokens has one token more, the first of the next unit: it is the label of the last one. The check of a piece
is that of the blocks that it touches (blocks.py), so reading a piece means reading these blocks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CorruptError
from headrace.format.blocks import (
    BLOCK_BYTES,
    CHECKSUM_DTYPE,
    SECTION,
    check_of,
    numbers_of,
    touched,
)
from headrace.format.container import (
    Chunks,
    Header,
    StoredFile,
    find_blocks,
    view_sections,
    write_container,
)
from headrace.format.fields import Field, FieldKind
from headrace.format.manifest import FurtherFile, ShardEntry
from headrace.format.shard import Shard, each_tables
from headrace.store.store import Store

PURPOSE = "units"
UNIT_BYTES = 2**22
"""No unit has more data, unless it is a single record."""
_SMALL_SHARE = 8
"""Fields that all together are smaller than the largest by this factor do not count."""
_OFFSET_BYTES = 8
_MOST = 2**61


class RowCounts(Protocol):
    """Counts the rows of units while they are cut, and writes what it has counted (`rows/unit_counts.py`)."""

    @property
    def fields(self) -> Iterable[str]: ...
    def add(self, name: str, lengths: NDArray[np.int64], edges: NDArray[np.int64]) -> None: ...
    def write(self, into: Store) -> FurtherFile | None: ...


@dataclass(frozen=True)
class Piece:
    """Some bytes of a shard: those of one unit and field, and the blocks around them, which are read and checked."""

    shard: int
    start: int
    stop: int
    blocks_start: int
    blocks_stop: int
    check: int


@dataclass(frozen=True)
class Units:
    """Where the units of a dataset lie. Records and elements are counted over the whole dataset."""

    fields: Mapping[str, Field]
    first_unit: NDArray[np.int64]
    """The first unit of each shard, and at the end the number of units."""
    first_record: NDArray[np.int64]
    first_element: Mapping[str, NDArray[np.int64]]
    """For each variable field."""
    checks: Mapping[str, NDArray[np.uint64]]
    """For each section of records, like `tokens/data`, the check of each unit's piece."""
    sections: Mapping[str, NDArray[np.int64]]
    """For each section, and `blocks`, where it begins in each shard."""
    index_blocks: int
    """Where the section `blocks` begins in the index."""
    index_check: int
    """The check of all blocks of the index."""

    @property
    def count(self) -> int:
        return len(self.first_record) - 1

    @cached_property
    def shard_of(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.first_unit) - 1), np.diff(self.first_unit))

    @property
    def offset_bytes(self) -> int:
        """What the offsets of one variable field take: one for each record, and one more for each unit."""
        return (int(self.first_record[-1]) + self.count) * _OFFSET_BYTES

    def edges(self, shard: int) -> NDArray[np.int64]:
        """The records at which a shard is cut, counted in the shard: its first, and one after its last."""
        first, last = int(self.first_unit[shard]), int(self.first_unit[shard + 1])
        edges: NDArray[np.int64] = self.first_record[first : last + 1] - self.first_record[first]
        return edges

    def data_piece(self, unit: int, field: str) -> Piece:
        shard = int(self.shard_of[unit])
        counted = self.first_element.get(field, self.first_record)
        element_bytes = self.fields[field].element_bytes
        before, after = int(counted[self.first_unit[shard]]), int(counted[self.first_unit[shard + 1]])
        first, last = int(counted[unit]), int(counted[unit + 1])
        last = min(last + extra_elements(self.fields[field]), after)
        return self._piece(
            f"{field}/data", unit, shard, (first - before) * element_bytes, (last - before) * element_bytes
        )

    def offsets_piece(self, unit: int, field: str) -> Piece:
        """One offset more than there are records, so that neighbouring pieces overlap."""
        shard = int(self.shard_of[unit])
        before = int(self.first_record[self.first_unit[shard]])
        first, last = int(self.first_record[unit]) - before, int(self.first_record[unit + 1]) - before
        return self._piece(f"{field}/offsets", unit, shard, first * _OFFSET_BYTES, (last + 1) * _OFFSET_BYTES)

    def _piece(self, section: str, unit: int, shard: int, first: int, last: int) -> Piece:
        begin = int(self.sections[section][shard])
        start, stop = begin + first, begin + last
        blocks = touched(start, stop, int(self.sections[SECTION][shard]))
        return Piece(shard, start, stop, *blocks, int(self.checks[section][unit]))


# Writing


def write_units(
    store: Store,
    into: Store,
    fields: Mapping[str, Field],
    shards: Sequence[ShardEntry],
    index: StoredFile,
    count_rows: RowCounts | None = None,
) -> list[FurtherFile]:
    """Cut the shards into units and write the file, unless a shard was written before there were block checksums."""
    arrays = describe_units(fields, _cut_all(store, fields, shards, count_rows))
    if arrays is None:
        return []
    sections = {name: Chunks.of(array) for name, array in (arrays | describe_index(into, index)).items()}
    stored = write_container(into, "units", "units", {"unit_bytes": UNIT_BYTES}, sections)
    counted = count_rows.write(into) if count_rows is not None else None
    return [FurtherFile(purpose=PURPOSE, stored=stored), *([counted] if counted else [])]


def _cut_all(
    store: Store, fields: Mapping[str, Field], shards: Sequence[ShardEntry], count_rows: RowCounts | None
) -> Iterator[tuple[Shard, NDArray[np.int64]]]:
    for shard in each_tables(store, shards, fields):
        edges = cut(shard, fields)
        if count_rows is not None:
            for name in count_rows.fields:
                count_rows.add(name, shard.lengths(name), edges)
        yield shard, edges


def describe_units(
    fields: Mapping[str, Field], shards: Iterable[tuple[Shard, NDArray[np.int64]]]
) -> dict[str, NDArray[np.uint64]] | None:
    """The arrays of the file, from shards and the records at which they are cut. One shard is used at a time."""
    first_unit, first_record = [0], [np.zeros(1, dtype=np.int64)]
    first_element = {name: [np.zeros(1, dtype=np.int64)] for name, field in fields.items() if field.variable}
    checks: dict[str, list[int]] = {name: [] for name in section_names(fields)}
    sections: dict[str, list[int]] = {name: [] for name in (*checks, SECTION)}
    records, elements = 0, dict.fromkeys(first_element, 0)
    for shard, edges in shards:
        if shard.blocks is None:
            return None
        first_unit.append(first_unit[-1] + len(edges) - 1)
        first_record.append(records + edges[1:])
        records += shard.records
        for name, counted in first_element.items():
            in_shard = shard.part(name, "offsets").astype(np.int64)
            counted.append(elements[name] + in_shard[edges[1:]])
            elements[name] += int(in_shard[-1])
        offsets = shard.section_offsets()
        for name, listed in sections.items():
            listed.append(offsets[name])
        for name, bounds in _bounds(shard, fields, edges):
            checks[name] += _checks(shard.blocks, bounds, offsets[SECTION])
    arrays = {
        "first_unit": np.array(first_unit),
        "first_record": np.concatenate(first_record),
        **{f"{name}/first_element": np.concatenate(counted) for name, counted in first_element.items()},
        **{f"{name}/check": np.array(each, dtype=np.uint64) for name, each in checks.items()},
        **{f"{name}/offset": np.array(each, dtype=np.int64) for name, each in sections.items()},
    }
    return {name: array.astype("<u8") for name, array in arrays.items()}


def describe_index(store: Store, index: StoredFile) -> dict[str, NDArray[np.uint64]]:
    """How to check the index, block by block."""
    buffer, header = view_sections(store, index, lambda name: name == SECTION)
    section = find_blocks(header, store.locate(index.file))
    if section is None:
        raise CorruptError(
            f"{store.locate(index.file)}: has no checksums of its blocks; build the dataset again"
        )
    numbers = {"index/blocks": section.offset, "index/check": check_of(section.view(buffer))}
    return {name: np.array([number], dtype="<u8") for name, number in numbers.items()}


def section_names(fields: Mapping[str, Field]) -> list[str]:
    """The sections of a shard that hold its records."""
    names = []
    for name, field in fields.items():
        names.append(f"{name}/data")
        if field.variable:
            names.append(f"{name}/offsets")
    return names


def extra_elements(field: Field) -> int:
    """How many elements after its own a unit's piece of data has, if its shard has them: one if they may be tokens."""
    return int(field.kind is FieldKind.RAGGED and not field.shape)


def cut(shard: Shard, fields: Mapping[str, Field]) -> NDArray[np.int64]:
    """The records at which a shard is cut: its first, and one after its last.

    A unit is closed before the record that would make it too large: rows of 2^n tokens then fill it nearly completely.
    """
    size = _sizes(shard, fields)
    edges = [0]
    while edges[-1] < shard.records:
        end = int(np.searchsorted(size, size[edges[-1]] + UNIT_BYTES, side="right")) - 1
        edges.append(min(max(end, edges[-1] + 1), shard.records))
    return np.array(edges, dtype=np.int64)


def _sizes(shard: Shard, fields: Mapping[str, Field]) -> NDArray[np.int64]:
    """How many bytes the records before each record have, in the largest field or in all fields."""
    numbers = np.arange(shard.records + 1, dtype=np.int64)
    sizes = []
    for name, field in fields.items():
        elements = shard.part(name, "offsets").astype(np.int64) if field.variable else numbers
        sizes.append(elements * field.element_bytes)
    sizes.sort(key=lambda each: int(each[-1]))
    *others, largest = sizes
    if sum(int(each[-1]) for each in others) * _SMALL_SHARE <= int(largest[-1]):
        return largest
    together: NDArray[np.int64] = np.sum(sizes, axis=0, dtype=np.int64)
    return together


def _bounds(
    shard: Shard, fields: Mapping[str, Field], edges: NDArray[np.int64]
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """For each section, the bytes of its pieces, as rows of start and stop in the file."""
    begins = shard.section_offsets()
    for name, field in fields.items():
        elements = edges
        if field.variable:
            elements = shard.part(name, "offsets")[edges].astype(np.int64)
            starts = begins[f"{name}/offsets"] + edges * _OFFSET_BYTES
            yield f"{name}/offsets", np.stack([starts[:-1], starts[1:] + _OFFSET_BYTES], axis=1)
        last = np.minimum(elements[1:] + extra_elements(field), elements[-1])
        bounds = np.stack([elements[:-1], last], axis=1)
        yield f"{name}/data", begins[f"{name}/data"] + bounds * field.element_bytes


def _checks(blocks: NDArray[np.uint64], bounds: NDArray[np.int64], end: int) -> list[int]:
    checks = []
    for start, stop in bounds.tolist():
        numbers = numbers_of(*touched(start, stop, end))
        checks.append(check_of(blocks[numbers]))
    return checks


# Reading


def read_units(
    buffer: NDArray[np.uint8],
    header: Header,
    fields: Mapping[str, Field],
    shards: Sequence[ShardEntry],
    name: str,
) -> Units:
    """The units of a dataset, once it is certain that every piece lies inside its shard."""
    if header.kind != "units":
        raise CorruptError(f"{name}: is a {header.kind[:80]!r} file, but the units are expected")
    table = _Table(buffer, header, name)
    first_unit = table.starts("first_unit", len(shards) + 1)
    count = int(first_unit[-1])
    first_record = table.starts("first_record", count + 1)
    table.check_edges("first_record", first_record[first_unit], [entry.records for entry in shards])
    if (first_record[1:] == first_record[:-1]).any():
        raise CorruptError(f"{name}: damaged: a unit has no records")
    first_element = {}
    for field in (each for each in fields if fields[each].variable):
        counted = first_element[field] = table.starts(f"{field}/first_element", count + 1)
        table.check_edges(field, counted[first_unit], [entry.elements[field] for entry in shards])
    names = section_names(fields)
    checks = {each: table.array(f"{each}/check", count) for each in names}
    sections = {each: table.numbers(f"{each}/offset", len(shards)) for each in (*names, SECTION)}
    index_blocks = int(table.numbers("index/blocks", 1)[0])
    index_check = int(table.array("index/check", 1)[0])
    units = Units(
        fields, first_unit, first_record, first_element, checks, sections, index_blocks, index_check
    )
    _check_places(units, shards, name)
    return units


def _check_places(units: Units, shards: Sequence[ShardEntry], name: str) -> None:
    end = units.sections[SECTION]
    for section in section_names(units.fields):
        size = _section_bytes(section, units.fields, shards)
        if size is None or (units.sections[section] + size > end).any():
            raise CorruptError(
                f"{name}: damaged: {section!r} does not lie before the checksums of its blocks"
            )
    file_bytes = np.array([entry.stored.bytes for entry in shards], dtype=np.int64)
    if (end + -(-end // BLOCK_BYTES) * CHECKSUM_DTYPE.itemsize > file_bytes).any():
        raise CorruptError(f"{name}: damaged: the checksums of blocks do not lie in their shard")


def _section_bytes(
    section: str, fields: Mapping[str, Field], shards: Sequence[ShardEntry]
) -> NDArray[np.int64] | None:
    """The size of a section in each shard; None if a forged manifest says more than there can be."""
    field, _, part = section.rpartition("/")
    if part == "offsets":
        counts, width = [entry.records + 1 for entry in shards], _OFFSET_BYTES
    else:
        counts, width = [entry.elements[field] for entry in shards], fields[field].element_bytes
    # Python's integers: a product must not wrap around.
    if max(counts, default=0) * width >= _MOST:
        return None
    return np.array(counts, dtype=np.int64) * width


class _Table:
    """The arrays of the file, each checked when it is read."""

    def __init__(self, buffer: NDArray[np.uint8], header: Header, name: str) -> None:
        self._buffer, self._sections, self._name = buffer, header.sections, name

    def array(self, name: str, count: int) -> NDArray[np.uint64]:
        section = self._sections.get(name)
        if section is None or section.dtype != np.dtype("<u8") or section.shape != (count,):
            raise CorruptError(f"{self._name}: damaged: {name!r} is missing or has another type or length")
        return section.view(self._buffer)

    def numbers(self, name: str, count: int) -> NDArray[np.int64]:
        found = self.array(name, count)
        if found.max(initial=0) >= _MOST:
            raise CorruptError(f"{self._name}: damaged: {name!r} holds {found.max()}")
        return found.astype(np.int64)

    def starts(self, name: str, count: int) -> NDArray[np.int64]:
        """Numbers that begin with 0 and never decrease."""
        found = self.numbers(name, count)
        if found[0] != 0 or (found[1:] < found[:-1]).any():
            raise CorruptError(f"{self._name}: damaged: {name!r} does not ascend from 0")
        return found

    def check_edges(self, name: str, found: NDArray[np.int64], counts: Sequence[int]) -> None:
        if not np.array_equal(np.diff(found), np.array(counts, dtype=np.int64)):
            raise CorruptError(f"{self._name}: {name!r} does not match the shards that the manifest names")
