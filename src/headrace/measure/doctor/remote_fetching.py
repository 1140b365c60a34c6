"""How many requests an order of remote data takes in its first epoch, and how many bytes they bring.

Whole units are fetched ahead if the order stays with a unit for a while: the data of a unit with one request, its
offsets with another. Only the first batch does not wait for that: its rows are read by themselves. If each row lies
in another unit, all rows are read by themselves: for each unit the checksums of its blocks and its offsets, and then
the blocks of its rows, as far as they are not there yet. In a unit of eight blocks:

    a row in the middle of it         ..##....    1 request
    one that begins before it         .###....    1 request, for the block that is missing
    one that has what it needs        .###....    none
    when all rows were read           ########    about as many requests as there are blocks, or rows if those are few

Blocks stay as long as their unit does: for ever if there are few units, and otherwise hardly until the next row of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.dataset.reads import neighbours
from headrace.format.blocks import BLOCK_BYTES, CHECKSUM_DTYPE, count_blocks
from headrace.format.units import Piece, Units
from headrace.measure.doctor.remote_layout import Layout
from headrace.order.shuffle import ShuffleKind
from headrace.order.stream import RowStream

_UNITS_LOOKED_AT = 2048
_ORDER_ENTRY_BYTES = 4
"""Of a document in the index by length."""


@dataclass(frozen=True)
class Fetching:
    """Without a cache."""

    requests: float = 0.0
    bytes: float = 0.0

    def plus(self, other: "Fetching") -> "Fetching":
        return Fetching(self.requests + other.requests, self.bytes + other.bytes)


# Whole units


def fetch_units(layout: Layout, stream: RowStream) -> Fetching:
    """Units are fetched whole, fields near each other together; in the order by blocks, again for each block."""
    units = layout.units
    numbers = np.unique(np.linspace(0, units.count - 1, min(units.count, _UNITS_LOOKED_AT)).astype(np.int64))
    requests = fetched = 0
    for number in numbers.tolist():
        wanted = list(enumerate(_pieces(units, number, layout.fields)))
        for group in neighbours(wanted):
            pieces = [piece for _, piece in group if piece.blocks_stop > piece.blocks_start]
            if pieces:
                requests += 1
                fetched += max(piece.blocks_stop for piece in pieces) - pieces[0].blocks_start
    scale = units.count / len(numbers) * _times_fetched(layout, stream)
    return Fetching(requests * scale, fetched * scale)


def _pieces(units: Units, number: int, fields: Sequence[str]) -> list[Piece]:
    pieces = []
    for field in fields:
        pieces.append(units.data_piece(number, field))
        if field in units.first_element:
            pieces.append(units.offsets_piece(number, field))
    return pieces


def _times_fetched(layout: Layout, stream: RowStream) -> float:
    """How often a unit is fetched, on average: more than once if blocks begin in the middle of units."""
    if stream.shuffle.kind is not ShuffleKind.BLOCK or layout.units_of is None or layout.stays_in_memory:
        return 1.0
    first_rows = np.arange(0, layout.rows, stream.shuffle.block)
    last_rows = np.minimum(first_rows + stream.shuffle.block, layout.rows) - 1
    touched = layout.units_of(last_rows) - layout.units_of(first_rows) + 1
    return float(touched.sum()) / layout.units.count


# Single rows


def fetch_first_batch(layout: Layout, rows: int, units: int) -> Fetching:
    """The rows of the first batch, which lie in so many units and are read at once."""
    if rows < 1:
        return Fetching()
    reads = rows * layout.documents_per_row / units
    found = Fetching()
    for field in layout.fields:
        found = found.plus(_read_in_units(layout, field, units, reads, reads))
    return found


def fetch_rows(layout: Layout, batch_rows: float, units_per_batch: float) -> Fetching:
    """All rows of an epoch, in batches of so many rows, which lie in so many units."""
    units = layout.units
    batches = layout.rows / max(batch_rows, 1e-9)
    reads = layout.rows * layout.documents_per_row
    found = Fetching()
    for field in layout.fields:
        if layout.stays_in_memory:
            each = reads / units.count
            found = found.plus(_read_in_units(layout, field, units.count, each, each / batches))
        else:
            opened = batches * units_per_batch
            found = found.plus(_open_units(layout, field, opened))
            found = found.plus(Fetching(reads, layout.data_bytes(field) + reads * (BLOCK_BYTES - 1)))
    if layout.units_of is None:
        # Each document is found in the index by length, whose blocks are kept.
        blocks = count_blocks(int(units.first_record[-1]) * _ORDER_ENTRY_BYTES)
        found = found.plus(Fetching(min(reads, blocks), min(reads, blocks) * BLOCK_BYTES))
    return found


def _open_units(layout: Layout, field: str, opened: float) -> Fetching:
    """The checksums of the blocks of so many units, and their offsets if the field has some."""
    units = layout.units
    checksum_bytes = count_blocks(layout.data_bytes(field)) / units.count * CHECKSUM_DTYPE.itemsize
    found = Fetching(opened, opened * checksum_bytes)
    if field in units.first_element:
        offset_bytes = 8 * int(units.first_record[-1]) / units.count + BLOCK_BYTES
        found = found.plus(Fetching(opened, opened * offset_bytes))
    return found


def _read_in_units(layout: Layout, field: str, units: int, reads: float, at_once: float) -> Fetching:
    """So many reads in each of some units, some of them at once, if everything that was read stays."""
    unit_bytes = layout.data_bytes(field) / layout.units.count
    all_reads = layout.rows * layout.documents_per_row / layout.units.count
    read_bytes = unit_bytes / max(1.0, all_reads)
    requests, blocks = _fill(unit_bytes, read_bytes, max(1, round(reads)), max(1, round(at_once)))
    rows = Fetching(units * requests, units * min(blocks * BLOCK_BYTES, unit_bytes + BLOCK_BYTES))
    return rows.plus(_open_units(layout, field, units))


def _fill(unit_bytes: float, read_bytes: float, reads: int, at_once: int) -> tuple[int, int]:
    """How many requests for missing blocks the reads of a unit in random order make, and how many blocks come."""
    is_there = np.zeros(max(1, count_blocks(math.ceil(unit_bytes))), dtype=bool)
    begins = np.random.default_rng(0).random(reads) * max(0.0, unit_bytes - read_bytes)
    requests = 0
    for first in range(0, reads, at_once):
        wanted = np.zeros_like(is_there)
        for begin in begins[first : first + at_once].tolist():
            wanted[int(begin // BLOCK_BYTES) : count_blocks(math.ceil(begin + read_bytes))] = True
        missing = wanted & ~is_there
        # A request for each run of blocks.
        requests += int(missing[0]) + int(np.count_nonzero(missing[1:] & ~missing[:-1]))
        is_there |= missing
        if is_there.all():
            break
    return requests, int(is_there.sum())
