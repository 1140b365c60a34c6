"""Which settings of a target can be tuned, under which names, and what they are now."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.measure.running.rebuild import has_own_batches, is_dataloader
from headrace.measure.running.targets import Target, import_function

COUNTS = ("num_workers", "workers")
DEPTHS = ("prefetch_factor", "prefetch")
KINDS = ("process", "thread")


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Names of settings; None: this target has no such setting."""

    count: str | None = None
    """How many workers."""
    kind: str | None = None
    """Threads or processes."""
    depth: str | None = None
    """How many batches ahead."""
    batch: str | None = None
    now: Mapping[str, Any] | None = None
    """What they are as given."""

    def without(self, names: Any) -> "Knobs":
        """The same, with some settings left as they are."""
        kept = {key: name for key, name in vars(self).items() if key == "now" or name not in names}
        return Knobs(**kept)


def knobs_of(target: Target, loader: Any) -> Knobs:
    """From the loader that was made as given, and the parameters of the function that made it."""
    if target.is_dataset:
        settings = loader.settings
        now = {"workers": settings.workers, "prefetch": settings.prefetch, "batch_size": settings.batch_size}
        return Knobs(count="workers", depth="prefetch", batch="batch_size", now=now)
    named = _parameters(target)
    if is_dataloader(loader):
        named |= {"num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor}
        given = loader if loader.batch_size is not None else loader.batch_sampler
        if not has_own_batches(loader) and given is not None:
            named["batch_size"] = given.batch_size
        if isinstance(getattr(loader, "worker_kind", None), str):
            named["worker_kind"] = str(loader.worker_kind)
    now = {**named, **{name: value for name, value in target.settings.items() if name in named}}
    # None: the loader finds it out.
    count = next((name for name in COUNTS if name in now and isinstance(now[name], int | None)), None)
    depth = next((name for name in DEPTHS if name in now), None)
    return Knobs(
        count=count,
        kind="worker_kind" if now.get("worker_kind") in KINDS else None,
        depth=depth,
        batch="batch_size" if isinstance(now.get("batch_size"), int) else None,
        now={name: value for name, value in now.items() if name in (*COUNTS, *DEPTHS, "batch_size")},
    )


def _parameters(target: Target) -> dict[str, Any]:
    """Those of the function that we know, with their defaults."""
    function = target.function or import_function(target.name)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    known = (*COUNTS, *DEPTHS, "batch_size")
    return {
        each.name: None if each.default is each.empty else each.default
        for each in parameters
        if each.name in known
    }
