"""What an order of remote data costs: how well it mixes batches, and how much is fetched for them.

Everything follows from where the units lie and from the order, both of which are known without reading any data. Some
hundred batches are looked up, with the functions that make the real ones. Values are assumed to be the same within a
shard and to have nothing to do with each other across shards: that is the worst case for an order by parts.

    batch of 4 rows, from shards    a a b c         ->  3 distinct shards
    shares of four equal shards     0.5 0.25 0.25 0 instead of 0.25 each
    variance of its mean            0.25^2 + 0 + 0 + 0.25^2 = 0.125, on average over many batches, against
                                    (1 - 4 * 0.25^2) / 4 = 0.1875 of an independent draw

`remote_fetching.py` says how much is fetched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset
from headrace.dataset.summary import PackingSummary
from headrace.dataset.units import UnitSource
from headrace.errors import FieldError
from headrace.load.target import DEFAULT_SEQ_LEN
from headrace.measure.doctor.remote_fetching import Fetching, fetch_first_batch, fetch_rows, fetch_units
from headrace.measure.doctor.remote_layout import Layout, Numbers, layout_of
from headrace.order.stream import RowStream
from headrace.rows.choices import is_remote
from headrace.rows.recipe import Recipe, make_recipe
from headrace.rows.settings import RowSettings
from headrace.rows.unit_counts import PURPOSE as ROW_COUNTS
from headrace.rows.unit_counts import stored_row_count

DOLLARS_PER_REQUEST = 0.0004 / 1000
"""The list price of a GET request to S3. What leaves the region is charged for by its size, in addition."""
DEFAULT_BATCH_ROWS = 256
_BATCHES = 256


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
    stays_in_memory: bool
    """Whether nothing is fetched after the first epoch, since so few units are never let go of."""
    fetched_per_used: float
    """Bytes that are fetched for each byte that is used, without a cache."""
    requests_per_batch: float
    requests_per_epoch: int
    """Without a cache; of data that stays in memory, those of the first epoch, and there are no others."""
    working_set_bytes: int
    """What batches are drawn from at a time."""
    beginning_bytes: int
    """What must arrive before batches come at full speed, at the beginning and after a resume; 0 if nothing must."""
    beginning_requests: int
    """Of the first batch, whose rows are read before the units around them. They are among those of the first epoch if
    the data stays in memory."""

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
    settings = RowSettings(seq_len=DEFAULT_SEQ_LEN if _knows_rows_of_tokens(dataset) else None)
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


def _knows_rows_of_tokens(dataset: Dataset) -> bool:
    try:
        _ = dataset.token_field
    except FieldError:
        return False
    source = dataset.source
    return isinstance(source, UnitSource) and source.manifest.has_further(ROW_COUNTS)


def cost_of(layout: Layout, stream: RowStream, number: int, batch_rows: int) -> RemoteCost:
    """What one source of a stream costs, in batches of so many rows of the whole stream."""
    batches, rows = _sample(stream, number, batch_rows)
    shuffle = stream.shuffle
    whole_units = layout.has_whole_units(shuffle)
    entry_batches, entry_units = _entries(layout, batches, rows)
    shards = layout.units.shard_of[entry_units]
    own_rows = len(rows) / _BATCHES
    batches_per_epoch = layout.rows / max(own_rows, 1e-9)
    units_per_batch = _distinct_pairs(entry_batches, entry_units) / _BATCHES
    beginning = Fetching()
    if whole_units:
        beginning = _fetch_beginning(layout, stream, number, batch_rows)
        fetching = fetch_units(layout, stream)
    else:
        fetching = fetch_rows(layout, own_rows, units_per_batch)
    if layout.stays_in_memory:
        # The beginning is a part of the only epoch in which something is fetched.
        fetching = fetching.plus(beginning)
    return RemoteCost(
        order=str(shuffle.kind),
        seq_len=layout.seq_len,
        batch_rows=own_rows,
        whole_units=whole_units,
        data_bytes=layout.used_bytes,
        units=layout.units.count,
        units_per_batch=units_per_batch,
        shards=len(layout.units.first_unit) - 1,
        shards_per_batch=_distinct_pairs(entry_batches, shards) / _BATCHES,
        variance=_variance(entry_batches, shards, _shares(layout)),
        stays_in_memory=layout.stays_in_memory,
        fetched_per_used=fetching.bytes / max(1, layout.used_bytes),
        requests_per_batch=fetching.requests / batches_per_epoch,
        requests_per_epoch=round(fetching.requests),
        working_set_bytes=layout.working_set_bytes(shuffle),
        beginning_bytes=layout.beginning_bytes(shuffle),
        beginning_requests=round(beginning.requests),
    )


def _fetch_beginning(layout: Layout, stream: RowStream, number: int, batch_rows: int) -> Fetching:
    """What the first batch takes. If units take long to arrive, some rows of the next ones are read like this, too."""
    if layout.units_of is None:
        return Fetching()
    places = stream.at(np.arange(batch_rows))
    rows = places.row[places.source == number]
    units = np.unique(layout.units_of(rows))
    return fetch_first_batch(layout, len(rows), len(units))


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
