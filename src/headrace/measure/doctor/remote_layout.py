"""Where the rows of remote data lie: in which units, how much is read of them, and how much is in use at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.units import MOST_UNITS, UnitSource
from headrace.format.units import Units
from headrace.order.shuffle import Shuffle, ShuffleKind
from headrace.rows.recipe import Recipe
from headrace.rows.sample_rows import RecordRows
from headrace.rows.token_rows import DocumentRows

Numbers = NDArray[np.int64]


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

    @property
    def stays_in_memory(self) -> bool:
        """Whether so few units are never let go of once they were read."""
        return self.units.count <= MOST_UNITS

    @property
    def used_bytes(self) -> int:
        """The data of an epoch, and the offsets that say where documents end."""
        units, total = self.units, 0
        for field in self.fields:
            total += self.data_bytes(field)
            if field in units.first_element:
                total += int(units.first_record[-1]) * 8
        return total

    def data_bytes(self, field: str) -> int:
        counted = self.units.first_element.get(field, self.units.first_record)
        return int(counted[-1]) * self.units.fields[field].element_bytes

    def has_whole_units(self, shuffle: Shuffle) -> bool:
        """Whether whole units are fetched ahead, instead of single rows."""
        return self.units_of is not None and shuffle.kind is not ShuffleKind.GLOBAL

    def working_set_bytes(self, shuffle: Shuffle) -> int:
        """What batches are drawn from at a time."""
        if shuffle.kind is ShuffleKind.BLOCK:
            rows = min(self.rows, shuffle.block * shuffle.window)
            return round(rows * self.used_bytes / max(1, self.rows))
        if not self.has_whole_units(shuffle):
            return self.used_bytes
        in_use = shuffle.lanes if shuffle.kind is ShuffleKind.UNITS else 1
        return round(min(in_use, self.units.count) * self.used_bytes / self.units.count)

    def beginning_bytes(self, shuffle: Shuffle) -> int:
        """What must arrive before batches come at full speed; 0 if single rows are read for ever."""
        if self.has_whole_units(shuffle) or self.stays_in_memory:
            return self.working_set_bytes(shuffle)
        return 0


def layout_of(recipe: Recipe, number: int) -> Layout:
    source: UnitSource = recipe.data[number].source
    rows, units = recipe.sources[number], source.units
    by_records = isinstance(rows, RecordRows)
    is_spread = isinstance(rows, DocumentRows)
    # Datasets of records alone may have no field of tokens.
    read = (
        (*rows.tables,) if by_records else (recipe.settings.token_field or recipe.data[number].token_field,)
    )
    shards = len(units.first_unit) - 1
    packs = not by_records and recipe.settings.packing != "windows"
    return Layout(
        units=units,
        fields=read,
        rows=rows.rows,
        units_of=None if is_spread else rows.units_of,
        unit_rows=None if is_spread else getattr(rows, "unit_rows", None),
        documents_per_row=max(1.0, int(units.first_record[-1]) / rows.rows) if packs else 1.0,
        group_shards=min(shards, recipe.settings.group_shards or shards),
        seq_len=recipe.settings.seq_len,
    )
