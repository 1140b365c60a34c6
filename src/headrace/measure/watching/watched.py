"""Any loader, with its loop timed: a list, PyTorch's DataLoader, a generator.

    watched = Watched(loader)
    for batch in watched: ...
    print(watched.stats())

Headrace's own loaders do their own counting: for them this is only a wrapper, and it does not matter which of the two
is iterated over.
"""

from collections.abc import Iterator
from typing import Any

from headrace.measure.running.sizes import Sizes
from headrace.observe.counting import Counters, Watch, now
from headrace.observe.stats import LoaderStats


class Watched:
    """Has all attributes of its loader, and `stats()`."""

    metrics_port: int | None = None
    """Where `headrace.monitor` serves metrics, if it does."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._counts_itself = counts_itself(loader)
        self.counters: Counters = loader.counters if self._counts_itself else Counters()

    def __iter__(self) -> Iterator[Any]:
        if self._counts_itself:
            return iter(self.loader)
        return _WatchedIteration(self.loader, self.counters)

    def __len__(self) -> int:
        return len(self.loader)

    def __bool__(self) -> bool:
        return bool(self.loader)

    def stats(self) -> LoaderStats:
        if not self._counts_itself:
            return self.counters.stats()
        # It may know more than its counters do, such as which servers it has.
        stats: LoaderStats = self.loader.stats()
        return stats

    def __getattr__(self, name: str) -> Any:
        # While a copy is being made, it has no loader yet, but is already asked for optional methods.
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Watched, (self.loader,)

    def __repr__(self) -> str:
        return f"Watched({self.loader!r})"


def counts_itself(loader: Any) -> bool:
    return isinstance(getattr(loader, "counters", None), Counters)


def _workers_of(loader: Any) -> int:
    """How many workers a loader says it has, as PyTorch's DataLoader does."""
    count = getattr(loader, "num_workers", 0)
    return count if isinstance(count, int) else 0


class _WatchedIteration:
    def __init__(self, loader: Any, counters: Counters) -> None:
        self._watch, self._sizes = Watch(counters), Sizes()
        counters.workers = _workers_of(loader)
        # This may start workers, and the loop has to wait for them.
        begun = now()
        self._iterator = iter(loader)
        counters.add("start", begun, now())

    def __iter__(self) -> "_WatchedIteration":
        return self

    def __next__(self) -> Any:
        with self._watch:
            batch = next(self._iterator)
        self._watch.counters.rows += self._sizes.of(batch).samples or 0
        return batch
