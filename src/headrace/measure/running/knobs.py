"""Which settings of a target can be tuned, under which names, and their current values."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.load.target import import_function
from headrace.measure.running.rebuild import has_own_batches, is_dataloader
from headrace.measure.running.servers import SERVERS, count_servers
from headrace.measure.running.targets import Target

COUNTS = ("num_workers", "workers")
DEPTHS = ("prefetch_factor", "prefetch")
KINDS = ("process", "thread")
KIND, BATCH = "worker_kind", "batch_size"
_KNOWN = (*COUNTS, *DEPTHS, KIND, BATCH)


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Names of settings; None where the target has no such setting."""

    count: str | None = None
    """The number of workers."""
    kind: str | None = None
    """Threads or processes."""
    depth: str | None = None
    """The number of batches prepared ahead."""
    batch: str | None = None
    servers: str | None = None
    """The number of servers that make the batches."""
    now: Mapping[str, Any] | None = None
    """Their values as given."""

    def without(self, names: Any) -> "Knobs":
        """The same, with some settings left as they are."""
        kept = {key: name for key, name in vars(self).items() if key == "now" or name not in names}
        return Knobs(**kept)


def knobs_of(target: Target, loader: Any) -> Knobs:
    """From the loader that was made as given, and the parameters of the function that made it."""
    if target.is_served:
        return _of_servers(target, loader)
    return _of_dataset(loader) if target.is_dataset else _of_function(target, loader)


def _of_servers(target: Target, loader: Any) -> Knobs:
    given = target.settings.get(SERVERS)
    count = count_servers(target.name) if given is None else given
    return Knobs(
        depth="prefetch", servers=SERVERS, now={"prefetch": loader.settings.prefetch, SERVERS: count}
    )


def _of_dataset(loader: Any) -> Knobs:
    settings = loader.settings
    now = {"workers": settings.workers, "prefetch": settings.prefetch, "batch_size": settings.batch_size}
    return Knobs(count="workers", depth="prefetch", batch="batch_size", now=now)


def _of_function(target: Target, loader: Any) -> Knobs:
    now = _settings_now(target, loader)
    # A count of None means that the loader chooses it.
    counts = [name for name in COUNTS if name in now and isinstance(now[name], int | None)]
    depths = [name for name in DEPTHS if name in now]
    return Knobs(
        count=counts[0] if counts else None,
        kind=KIND if now.get(KIND) in KINDS else None,
        depth=depths[0] if depths else None,
        batch=BATCH if isinstance(now.get(BATCH), int) else None,
        now=now,
    )


def _settings_now(target: Target, loader: Any) -> dict[str, Any]:
    """The settings that we know, of the function or of the DataLoader that it returned."""
    now = _parameters(target)
    if is_dataloader(loader):
        now |= _of_dataloader(loader)
    given = {name: value for name, value in target.settings.items() if name in now}
    return now | given


def _of_dataloader(loader: Any) -> dict[str, Any]:
    named = {"num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor}
    batches = loader if loader.batch_size is not None else loader.batch_sampler
    if not has_own_batches(loader) and batches is not None:
        named[BATCH] = batches.batch_size
    if isinstance(getattr(loader, KIND, None), str):
        named[KIND] = str(loader.worker_kind)
    return named


def _parameters(target: Target) -> dict[str, Any]:
    """Those of the function that we know, with their defaults."""
    function = target.function or import_function(target.name)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {
        each.name: None if each.default is each.empty else each.default
        for each in parameters
        if each.name in _KNOWN
    }
