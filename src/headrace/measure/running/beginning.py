"""The beginning of a loop over remote data, which is not counted: until what batches are drawn from has arrived.

    make | first batch | next batches wait for the units of all lanes | full speed ...
    '------------------------- the beginning -------------------------' '-- counted --

In the order by units a batch has rows of 128 units, so the first batches need all of them: 512 MB, or all of a smaller
dataset. A few seconds of a loop would mostly measure that.
"""

from typing import Any

from headrace.load.loader import Loader
from headrace.measure.doctor.remote_layout import layout_of
from headrace.observe.stats import FetchStats, LoaderStats
from headrace.order.shuffle import ShuffleKind
from headrace.rows.choices import is_remote


class Beginning:
    """Watches what arrives for a Loader on remote data."""

    def __init__(self, loader: Loader, begun: float) -> None:
        self._begun = begun
        recipe, shuffle = loader.rows.recipe, loader.settings.shuffle
        numbers = [number for number, data in enumerate(recipe.data) if is_remote(data)]
        layouts = [layout_of(recipe, number) for number in numbers if recipe.data[number].source.units.count]
        # Each rank reads the units of its own lanes, and each worker process all of those.
        ranks = loader.world.size if shuffle.kind is ShuffleKind.UNITS else 1
        readers = max(1, loader.source.processes)
        self._needed_bytes = sum(each.beginning_bytes(shuffle) for each in layouts) * readers / ranks
        self._stays_in_memory = all(each.stays_in_memory for each in layouts)
        batch = loader.settings.batch_size
        steps = loader.rows_per_epoch // (batch * loader.world.size)
        self._epoch_rows = max(1, steps) * batch
        """On this rank. After an epoch, everything has arrived once, however rows were read."""

    def is_over(self, stats: LoaderStats) -> bool:
        return _arrived(stats.fetched) >= self._needed_bytes or stats.rows >= self._epoch_rows

    def described(self, stats: LoaderStats, now: float) -> dict[str, Any]:
        """What a Run says about it."""
        return {
            "seconds": now - self._begun,
            "is_over": self.is_over(stats),
            "stays_in_memory": self._stays_in_memory,
            **stats.fetched._asdict(),
        }

    def notes(self, stats: LoaderStats, now: float) -> list[str]:
        """What to know about figures that are counted from now on."""
        if self.is_over(stats):
            return []
        arrived, needed = (f"{size / 1e6:,.0f} MB" for size in (_arrived(stats.fetched), self._needed_bytes))
        return [
            f"after {now - self._begun:.0f} s, only {arrived} of the {needed} had arrived that batches are drawn from: "
            "the figures are partly those of the beginning; measure for longer, or fill the cache first"
        ]


def _arrived(fetched: FetchStats) -> int:
    return fetched.bytes + fetched.cached_bytes


def beginning_of(loader: Any, begun: float) -> Beginning | None:
    """None if the loader is not a Loader on remote data."""
    if not isinstance(loader, Loader) or not any(map(is_remote, loader.rows.recipe.data)):
        return None
    return Beginning(loader, begun)
