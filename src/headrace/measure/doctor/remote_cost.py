"""What an order of remote data costs: how well it mixes batches, and how much is fetched for them.

Everything follows from where the units lie and from the order, both of which are known without reading any data. Some
hundred batches are looked up, with the functions that make the real ones. Values are assumed to be the same within a
shard and to have nothing to do with each other across shards: that is the worst case for an order by parts.

    batch of 4 rows, from shards    a a b c         ->  3 distinct shards
    shares of four equal shards     0.5 0.25 0.25 0 instead of 0.25 each
    variance of its mean            0.25^2 + 0 + 0 + 0.25^2 = 0.125, on average over many batches, against
                                    (1 - 4 * 0.25^2) / 4 = 0.1875 of an independent draw

Whole units are fetched ahead if the order stays with a unit for a while. If each row lies in another unit, single rows
are read: first what says where a row lies and how to check it, and then its blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset
from headrace.dataset.reads import neighbours
from headrace.dataset.summary import PackingSummary
from headrace.dataset.units import MOST_UNITS, UnitSource
from headrace.format.blocks import BLOCK_BYTES, CHECKSUM_DTYPE, count_blocks
from headrace.format.units import Piece, Units
from headrace.measure.running.targets import DEFAULT_SEQ_LEN
from headrace.order.shuffle import ShuffleKind
from headrace.order.stream import RowStream
from headrace.rows.choices import is_remote
from headrace.rows.recipe import Recipe, make_recipe
from headrace.rows.sample_rows import RecordRows
from headrace.rows.settings import RowSettings
from headrace.rows.token_rows import DocumentRows
from headrace.rows.unit_counts import PURPOSE as ROW_COUNTS
from headrace.rows.unit_counts import stored_row_count

DOLLARS_PER_REQUEST = 0.0004 / 1000
"""The list price of a GET request to S3. What leaves the region is charged for by its size, in addition."""
DEFAULT_BATCH_ROWS = 256
_BATCHES = 256
_UNITS_LOOKED_AT = 2048
_ORDER_ENTRY_BYTES = 4
"""Of a document in the index by length."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RemoteCost:
    """Figures of one source. Batches are those of all ranks together."""

    order: str
    seq_len: int | None
    """Tokens in a row; None if the rows are records."""
    batch_rows: float
    """Rows of this source in a batch."""
    whole_units: bool
    """Whether whole units are fetched, instead of single rows."""
    data_bytes: int
    """What an epoch uses."""
    units: int
    units_per_batch: float
    shards: int
    shards_per_batch: float
    variance: float
    """Of a batch's mean, against that of an independent draw, which is 1.0; in the worst case."""
    fetched_per_used: float
    """Bytes that are fetched for each byte that is used, without a cache."""
    requests_per_batch: float
    requests_per_epoch: int
    working_set_bytes: int
    """What batches are drawn from at a time."""

    @property
    def dollars_per_epoch(self) -> float:
        return self.requests_per_epoch * DOLLARS_PER_REQUEST

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "dollars_per_epoch": self.dollars_per_epoch}

    @staticmethod
    def from_json(written: Mapping[str, Any]) -> "RemoteCost":
        return RemoteCost(**{each.name: written[each.name] for each in fields(RemoteCost)})


def remote_costs(recipe: Recipe, batch_rows: int) -> dict[str, RemoteCost]:
    """For each remote source, by its name, what the order of a recipe costs; of packed rows, how it packs as well."""
    costs = {}
    batch_rows = min(batch_rows, recipe.rows_per_epoch)
    for number, (name, data) in enumerate(zip(recipe.names, recipe.data, strict=True)):
        if is_remote(data) and data.source.units.count:
            layout = layout_of(recipe, number)
            costs[name] = cost_of(layout, recipe.stream, number, batch_rows)
    return costs


def costs_by_default(dataset: Dataset) -> dict[str, RemoteCost]:
    """What a Loader's own choices cost, for usual rows and batches; nothing for local data.

    Only what the dataset stores about its units is needed: if it does not say how many rows of tokens they have,
    records are the rows.
    """
    if not is_remote(dataset):
        return {}
    source = dataset.source
    knows_rows = isinstance(source, UnitSource) and source.manifest.has_further(ROW_COUNTS)
    has_tokens = dataset.token_field in dataset.fields and knows_rows
    settings = RowSettings(seq_len=DEFAULT_SEQ_LEN if has_tokens else None)
    return remote_costs(make_recipe(dataset, settings), DEFAULT_BATCH_ROWS)


def packing_by_default(
    dataset: Dataset, over_dataset: Sequence[PackingSummary]
) -> tuple[str, Sequence[PackingSummary]]:
    """How far a Loader packs documents together by its own choice ("dataset" or "units"), and how full rows are then.

    Only what the dataset stores is needed: if it does not store how units pack, it is the given packing.
    """
    if not is_remote(dataset):
        return "dataset", over_dataset
    within_units = []
    for packing in over_dataset:
        rows = stored_row_count(dataset, packing.seq_len)
        if rows is None:
            return "dataset", over_dataset
        full = dataset.num_tokens / (rows * packing.seq_len)
        within_units.append(replace(packing, rows=rows, best_fit=full))
    return "units", within_units


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the rows of a source lie."""

    units: Units
    fields: Sequence[str]
    """What is read of a unit."""
    rows: int
    units_of: Callable[[Numbers], Numbers] | None
    """The unit of each row; None if a row has documents from many units."""
    unit_rows: Numbers | None
    """How many rows each unit has, if units are what the order goes by."""
    documents_per_row: float
    """How many places must be read for a row; 1 for records and windows."""
    group_shards: int
    """Documents of one row are from one group of so many shards; only if there is no `units_of`."""
    seq_len: int | None = None


def layout_of(recipe: Recipe, number: int) -> Layout:
    source: UnitSource = recipe.data[number].source
    rows, units = recipe.sources[number], source.units
    by_records = isinstance(rows, RecordRows)
    is_spread = isinstance(rows, DocumentRows)
    field = recipe.settings.token_field or recipe.data[number].token_field
    shards = len(units.first_unit) - 1
    packs = not by_records and recipe.settings.packing != "windows"
    return Layout(
        units=units,
        fields=tuple(rows.tables) if by_records else (field,),
        rows=rows.rows,
        units_of=None if is_spread else rows.units_of,
        unit_rows=None if is_spread else getattr(rows, "unit_rows", None),
        documents_per_row=max(1.0, int(units.first_record[-1]) / rows.rows) if packs else 1.0,
        group_shards=min(shards, recipe.settings.group_shards or shards),
        seq_len=recipe.settings.seq_len,
    )


def cost_of(layout: Layout, stream: RowStream, number: int, batch_rows: int) -> RemoteCost:
    """What one source of a stream costs, in batches of so many rows of the whole stream."""
    batches, rows = _sample(stream, number, batch_rows)
    whole_units = layout.units_of is not None and stream.shuffle.kind is not ShuffleKind.GLOBAL
    entry_batches, entry_units = _entries(layout, batches, rows)
    shards = layout.units.shard_of[entry_units]
    own_rows = len(rows) / _BATCHES
    batches_per_epoch = layout.rows / max(own_rows, 1e-9)
    units_per_batch = _distinct_pairs(entry_batches, entry_units) / _BATCHES
    fetching = _fetch_units(layout, stream) if whole_units else _fetch_rows(layout, own_rows, units_per_batch)
    return RemoteCost(
        order=str(stream.shuffle.kind),
        seq_len=layout.seq_len,
        batch_rows=own_rows,
        whole_units=whole_units,
        data_bytes=fetching.used_bytes,
        units=layout.units.count,
        units_per_batch=units_per_batch,
        shards=len(layout.units.first_unit) - 1,
        shards_per_batch=_distinct_pairs(entry_batches, shards) / _BATCHES,
        variance=_variance(entry_batches, shards, _shares(layout)),
        fetched_per_used=fetching.bytes / max(1, fetching.used_bytes),
        requests_per_batch=fetching.requests / batches_per_epoch,
        requests_per_epoch=round(fetching.requests),
        working_set_bytes=_working_set(layout, stream, whole_units, fetching.used_bytes),
    )


# Which units batches need


def _sample(stream: RowStream, number: int, batch_rows: int) -> tuple[Numbers, Numbers]:
    """Rows of the source in some batches, and the batch of each: of the first epoch, or of several if it is short."""
    count = sum(stream.rows) // batch_rows
    first = np.arange(_BATCHES, dtype=np.int64)
    if count > _BATCHES:
        first = np.sort(np.random.default_rng(0).choice(count, _BATCHES, replace=False))
    positions = first[:, None] * batch_rows + np.arange(batch_rows)
    places = stream.at(positions.reshape(-1))
    batches = np.repeat(np.arange(_BATCHES), batch_rows)
    own = places.source == number
    return batches[own], places.row[own]


def _entries(layout: Layout, batches: Numbers, rows: Numbers) -> tuple[Numbers, Numbers]:
    """The batch and the unit of everything that is drawn: rows, or documents if rows have them from many units.

    Which documents share a row is decided by their lengths, so documents are taken for drawn at random.
    """
    if layout.units_of is not None:
        return batches, layout.units_of(rows)
    first_record = layout.units.first_record
    every = layout.units.first_unit[:: layout.group_shards]
    edges = (
        np.append(first_record[every], first_record[-1])
        if every[-1] < layout.units.count
        else first_record[every]
    )
    group = rows * (len(edges) - 1) // layout.rows
    drawn = np.random.default_rng(0)
    repeated = np.repeat(group, round(layout.documents_per_row))
    records = drawn.integers(edges[repeated], edges[repeated + 1])
    units = np.searchsorted(first_record, records, side="right") - 1
    return np.repeat(batches, round(layout.documents_per_row)), units


def _distinct_pairs(batches: Numbers, things: Numbers) -> int:
    return len(np.unique(batches * (int(things.max(initial=0)) + 1) + things))


def _shares(layout: Layout) -> NDArray[np.float64]:
    """The share of each shard in what is drawn."""
    units = layout.units
    sizes = layout.unit_rows
    if sizes is None:
        counted = units.first_record if layout.units_of is None else units.first_element.get(layout.fields[0])
        sizes = np.diff(units.first_record if counted is None else counted)
    weights = np.bincount(units.shard_of, weights=sizes, minlength=len(units.first_unit) - 1)
    shares: NDArray[np.float64] = weights / max(1.0, weights.sum())
    return shares


def _variance(batches: Numbers, shards: Numbers, shares: NDArray[np.float64]) -> float:
    """The variance of a batch's mean against that of an independent draw, if all rows of a shard are alike.

    The values of shards are independent, so the mean of a batch varies by the squares of how much more or less than
    its share each shard has in the batch.
    """
    of_one = 1 - float((shares**2).sum())
    if of_one <= 1e-12 or not len(batches):
        return 1.0  # of a single shard, all batches are alike
    sizes = np.bincount(batches, minlength=_BATCHES)
    pairs, counts = np.unique(batches * len(shares) + shards, return_counts=True)
    batch, shard = np.divmod(pairs, len(shares))
    found = counts / sizes[batch]
    squares = np.bincount(batch, weights=found**2 - 2 * found * shares[shard], minlength=_BATCHES)
    there = sizes > 0
    of_batches = squares[there] + float((shares**2).sum())
    return float((of_batches * sizes[there]).mean() / of_one)


def _working_set(layout: Layout, stream: RowStream, whole_units: bool, data_bytes: int) -> int:
    shuffle = stream.shuffle
    row_bytes = data_bytes / max(1, layout.rows)
    if shuffle.kind is ShuffleKind.BLOCK:
        return round(min(layout.rows, shuffle.block * shuffle.window) * row_bytes)
    if not whole_units:
        return data_bytes
    in_use = shuffle.lanes if shuffle.kind is ShuffleKind.UNITS else 1
    return round(min(in_use, layout.units.count) * data_bytes / layout.units.count)


# What is fetched for them


@dataclass(frozen=True)
class _Fetching:
    """In one epoch, without a cache."""

    requests: float
    bytes: float
    used_bytes: int


def _fetch_units(layout: Layout, stream: RowStream) -> _Fetching:
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
    return _Fetching(requests * scale, fetched * scale, _used_bytes(layout))


def _pieces(units: Units, number: int, fields: Sequence[str]) -> list[Piece]:
    pieces = []
    for field in fields:
        pieces.append(units.data_piece(number, field))
        if field in units.first_element:
            pieces.append(units.offsets_piece(number, field))
    return pieces


def _times_fetched(layout: Layout, stream: RowStream) -> float:
    """How often a unit is fetched, on average: more than once if blocks begin in the middle of units."""
    if stream.shuffle.kind is not ShuffleKind.BLOCK or layout.units_of is None:
        return 1.0
    first_rows = np.arange(0, layout.rows, stream.shuffle.block)
    last_rows = np.minimum(first_rows + stream.shuffle.block, layout.rows) - 1
    touched = layout.units_of(last_rows) - layout.units_of(first_rows) + 1
    return float(touched.sum()) / layout.units.count


def _used_bytes(layout: Layout) -> int:
    """The data of an epoch, and the offsets that say where documents end."""
    units, total = layout.units, 0
    for field in layout.fields:
        counted = units.first_element.get(field, units.first_record)
        total += int(counted[-1]) * units.fields[field].element_bytes
        if field in units.first_element:
            total += int(units.first_record[-1]) * 8
    return total


def _fetch_rows(layout: Layout, batch_rows: float, units_per_batch: float) -> _Fetching:
    """Rows are read one by one: for each unit the checksums of its blocks and its offsets, and then the rows' blocks.

    Units that were used lately stay open, which helps only if there are few.
    """
    units = layout.units
    batches = layout.rows / max(batch_rows, 1e-9)
    opened = (
        min(batches * units_per_batch, units.count)
        if units.count <= MOST_UNITS
        else batches * units_per_batch
    )
    reads = layout.rows * layout.documents_per_row
    requests = fetched = 0.0
    for field in layout.fields:
        is_variable = field in units.first_element
        data_bytes = (
            int(units.first_element.get(field, units.first_record)[-1]) * units.fields[field].element_bytes
        )
        opening_bytes = count_blocks(data_bytes) / units.count * CHECKSUM_DTYPE.itemsize
        if is_variable:
            opening_bytes += 8 * int(units.first_record[-1]) / units.count + BLOCK_BYTES
        requests += opened * (2 if is_variable else 1) + reads
        whole = data_bytes + opened * opening_bytes
        of_rows = data_bytes + reads * (BLOCK_BYTES - 1) + opened * opening_bytes
        fetched += min(of_rows, whole) if units.count <= MOST_UNITS else of_rows
    if layout.units_of is None:
        # Each document is found in the index by length, whose blocks are kept.
        blocks = count_blocks(int(units.first_record[-1]) * _ORDER_ENTRY_BYTES)
        requests += min(reads, blocks)
        fetched += min(reads, blocks) * BLOCK_BYTES
    return _Fetching(requests, fetched, _used_bytes(layout))
