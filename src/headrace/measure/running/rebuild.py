"""Making another DataLoader from the parts of one: the same data and order, with other settings."""

import sys
from collections.abc import Mapping
from typing import Any

from headrace.errors import SettingsError

_OF_BATCHES = ("batch_size", "drop_last")
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
_KEPT = (
    *("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
    *("snapshot_every_n_steps", "worker_kind"),
)


def is_dataloader(loader: Any) -> bool:
    """Whether it is PyTorch's DataLoader or a subclass; torch is not imported to find out."""
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(loader, torch_data.DataLoader)


def rebuilt(loader: Any, changes: Mapping[str, Any]) -> Any:
    """A new loader of the same class, with some arguments changed."""
    unknown = [name for name in changes if name not in (*_KEPT, *_OF_BATCHES)]
    if unknown:
        raise SettingsError(f"{', '.join(unknown)}: a DataLoader has no such setting")
    arguments = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    arguments |= _batches(loader, changes)
    arguments |= {name: value for name, value in changes.items() if name not in _OF_BATCHES}
    _fit_to_workers(arguments, loader, changes)
    if not arguments.get("pin_memory_device"):
        arguments.pop("pin_memory_device", None)
    try:
        return type(loader)(**arguments)
    except TypeError as error:
        raise SettingsError(
            f"{', '.join(changes)}: a {type(loader).__name__} cannot be made again from its parts ({error}); add a "
            "parameter of that name to the function that makes it"
        ) from error


def _fit_to_workers(arguments: dict[str, Any], loader: Any, changes: Mapping[str, Any]) -> None:
    """Leave out what does not apply to the new number and kind of workers."""
    if not arguments["num_workers"]:
        needless = [name for name in _OF_WORKERS if changes.get(name)]
        if needless:
            raise SettingsError(
                f"{', '.join(needless)}: has no effect without workers; give num_workers as well"
            )
        arguments |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
        if "multiprocessing_context" in arguments:
            arguments["multiprocessing_context"] = None
    elif not loader.num_workers and "prefetch_factor" not in changes:
        # It had none, as the default depends on whether there are workers.
        arguments.pop("prefetch_factor", None)
    if str(arguments.get("worker_kind")) == "thread":
        arguments.pop("multiprocessing_context", None)


def has_own_batches(loader: Any) -> bool:
    """Whether the user's own batch sampler decides what goes into a batch."""
    import torch.utils.data as data

    own = loader.batch_sampler
    return (
        own is not None
        and type(own) is not data.BatchSampler
        and not isinstance(loader.dataset, data.IterableDataset)
    )


def _batches(loader: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Which samples go into a batch."""
    import torch.utils.data as data

    if has_own_batches(loader):
        if "batch_size" in changes:
            raise SettingsError(
                "batch_size: the DataLoader has its own batch_sampler, which decides the size; change it there"
            )
        return {"batch_sampler": loader.batch_sampler}
    # A DataLoader that was given a plain batch sampler has no such settings itself.
    was_given_sampler = loader.batch_size is None and loader.batch_sampler is not None
    given = loader.batch_sampler if was_given_sampler else loader
    own = {"batch_size": given.batch_size, "drop_last": given.drop_last}
    if not isinstance(loader.dataset, data.IterableDataset):
        own["sampler"] = given.sampler
    return own | {name: changes[name] for name in _OF_BATCHES if name in changes}
