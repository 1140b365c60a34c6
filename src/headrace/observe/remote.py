"""What can be known about remote data, and how a Loader reads it, without any request."""

from typing import TYPE_CHECKING, Any

from headrace.dataset.dataset import Dataset
from headrace.dataset.units import UnitSource
from headrace.observe.facts import RemoteFacts
from headrace.order.shuffle import ShuffleKind
from headrace.pack.packing import Packing

if TYPE_CHECKING:
    from headrace.load.loader import Loader
    from headrace.load.settings import LoaderSettings


def remote_facts(loader: "Loader") -> RemoteFacts | None:
    """None if no data of the Loader is remote."""
    sources = remote_sources(loader.rows.recipe.data)
    if not sources:
        return None
    settings = loader.settings
    sizes = [sum(shard.stored.bytes for shard in source.manifest.shards) for source in sources]
    units = [source.units.count for source in sources]
    in_use = [_share_in_use(settings, count, loader.rows_per_epoch) for count in units]
    working_set = sum(size * share for size, share in zip(sizes, in_use, strict=True))
    caches = {source.cache.directory.path: source.cache.limit_bytes for source in sources if source.cache}
    return RemoteFacts(
        data_bytes=sum(sizes),
        units=max(units),
        working_set_bytes=round(working_set),
        cache_bytes=sum(caches.values()),
        shuffle=str(settings.shuffle.kind),
        packs_within_units=_packs_within_units(settings),
        processes=loader.source.processes,
    )


def remote_sources(data: Any) -> list[UnitSource]:
    sources = [each.source for each in data if isinstance(each, Dataset)]
    return [source for source in sources if isinstance(source, UnitSource) and source.store.is_remote]


def _share_in_use(settings: "LoaderSettings", units: int, rows: int) -> float:
    """The share of the data that batches are drawn from at a time."""
    shuffle = settings.shuffle
    if shuffle.kind is ShuffleKind.GLOBAL:
        return 1.0
    if shuffle.kind is ShuffleKind.BLOCK:
        return min(1.0, shuffle.block * shuffle.window / max(1, rows))
    in_use = shuffle.lanes if shuffle.kind is ShuffleKind.UNITS else 1
    return min(1.0, in_use / max(1, units))


def _packs_within_units(settings: "LoaderSettings") -> bool:
    if settings.seq_len is None or settings.packing is Packing.WINDOWS:
        return True
    return settings.pack_within == "units"
