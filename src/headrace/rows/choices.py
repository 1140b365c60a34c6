"""What a Loader chooses if the user has not: the order of rows, and how far documents of a row may lie apart.

On a local disk rows are shuffled globally, and documents packed over the whole dataset. Over a network both would read
a whole unit for a single row, so there the order goes by units, and documents are packed within a unit. A state
says what was chosen, and a Loader that continues from it takes it over.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from headrace.dataset.dataset import Dataset
from headrace.dataset.stored import StoredSource
from headrace.dataset.units import UnitSource, units_of
from headrace.order.shuffle import Shuffle, ShuffleKind
from headrace.rows.settings import PackWithin, RowSettings

_Settings = TypeVar("_Settings", bound=RowSettings)


def is_remote(data: Any) -> bool:
    """Whether reading from some data means fetching it over a network."""
    return isinstance(data, Dataset) and isinstance(data.source, UnitSource) and data.source.store.is_remote


def chosen(settings: _Settings, data: Sequence[Any]) -> _Settings:
    """The settings with a choice for everything that was left open."""
    remote = any(map(is_remote, data))
    shuffle, pack_within = settings.shuffle, settings.pack_within
    if shuffle.kind is ShuffleKind.AUTO:
        shuffle = Shuffle(kind=ShuffleKind.UNITS if remote else ShuffleKind.GLOBAL)
    if pack_within is PackWithin.AUTO and settings.seq_len is not None:
        by_units = remote or shuffle.kind is ShuffleKind.UNITS
        in_groups = settings.group_shards is not None
        pack_within = PackWithin.UNITS if by_units and not in_groups else PackWithin.DATASET
    return replace(settings, shuffle=shuffle, pack_within=pack_within)


def with_units(data: Any, settings: RowSettings) -> Any:
    """The data with its units, if the settings are about units and it has any."""
    needs_units = settings.shuffle.kind is ShuffleKind.UNITS or settings.pack_within is PackWithin.UNITS
    if not needs_units or not isinstance(data, Dataset) or isinstance(data.source, UnitSource):
        return data
    source = units_of(data.source) if isinstance(data.source, StoredSource) else None
    return data if source is None else Dataset(source)
