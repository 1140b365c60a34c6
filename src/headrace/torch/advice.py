"""Findings about a DataLoader, PyTorch's or ours, and its dataset: what can be seen without running it."""

import multiprocessing
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate

from headrace.dataset.dataset import Dataset
from headrace.observe import host
from headrace.observe.advice import advise_on
from headrace.observe.findings import (
    Finding,
    Level,
    NotLooked,
    Outcome,
    Outcomes,
    Sent,
    batch_size,
    copied_data,
    in_ram,
    pageable_copies,
    pickled_maps,
    some,
    streamed,
    workers,
)
from headrace.observe.held import HeldKind, held_by

_NO_PROCESSES = NotLooked("there are no worker processes")
_WITHOUT_ACCELERATOR = NotLooked("no accelerator here")


def advise_dataloader(loader: Any) -> None:
    """Called when an iteration begins. What PyTorch itself warns of is left to it."""
    advise_on(loader, _unsaid)


def _unsaid(loader: Any) -> Outcomes:
    found = dict(examine_dataloader(loader))
    del found["pinned-memory"]
    if not _in_threads(loader) and loader.num_workers > host.allowed_cores():
        del found["workers"]
    return found


def examine_dataloader(loader: Any) -> dict[str, Outcome]:
    ranks, accelerator = host.local_ranks(), host.accelerator_available()
    size = loader.batch_size
    threads = _in_threads(loader)
    busy = workers(loader.num_workers, host.useful_cores(), ranks, "num_workers", threads=threads)
    pinned_for_nothing = loader.pin_memory and not accelerator
    return {
        "batch-size": some(batch_size(size))
        if size
        else NotLooked("the loader does not decide the batch size"),
        "workers": some(busy),
        "pageable-copies": some(_pageable(loader)) if accelerator else _WITHOUT_ACCELERATOR,
        "pinned-memory": [_pinned_memory()] if pinned_for_nothing else [],
        "sample-by-sample": some(sample_by_sample(loader)),
        "streamed": some(streamed(bytes_streamed(loader.dataset), ranks)),
        **_held(loader, ranks),
    }


def _held(loader: Any, ranks: int) -> dict[str, Outcome]:
    held, processes = held_by(loader.dataset), loader.num_workers
    loaded = sum(each.bytes for each in held if each.kind is not HeldKind.MAP)
    if not processes or _in_threads(loader):
        sent: dict[str, Outcome] = {"pickled-maps": _NO_PROCESSES, "copied-data": _NO_PROCESSES}
    else:
        how = _sent(loader)
        sent = {
            "pickled-maps": some(pickled_maps(held, processes, how)),
            "copied-data": some(copied_data(held, processes, how)),
        }
    return {"in-ram": some(in_ram(loaded, ranks)), **sent}


def _in_threads(loader: Any) -> bool:
    return str(getattr(loader, "workers", "process")) == "thread"


def _sent(loader: Any) -> Sent:
    context = loader.multiprocessing_context or multiprocessing.get_context()
    if context.get_start_method() == "fork":
        return Sent.FORK
    # Ours has a setting that PyTorch's has not.
    return Sent.ONCE if hasattr(loader, "snapshot_every_n_steps") else Sent.EACH


def _pageable(loader: Any) -> Finding | None:
    dataset = loader.dataset
    on_device = isinstance(dataset, TensorDataset) and any(t.device.type != "cpu" for t in dataset.tensors)
    if loader.pin_memory or on_device:
        return None
    return pageable_copies("Give pin_memory=True, and copy with .to(device, non_blocking=True)")


def _pinned_memory() -> Finding:
    return Finding(
        "pinned-memory",
        Level.NOTE,
        "pin_memory=True without an accelerator: there is nothing to page-lock memory for, and PyTorch leaves it out",
        "Give pin_memory=torch.accelerator.is_available()",
    )


def sample_by_sample(loader: DataLoader) -> Finding | None:
    """Whether samples are taken one by one, and stacked, from data that could be indexed once for a batch."""
    dataset = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    own_collate = loader.collate_fn is not default_collate
    if loader.batch_size is None or own_collate or isinstance(dataset, IterableDataset):
        return None
    kind, remedy = _batched_way(dataset)
    if kind is None:
        return None
    return Finding(
        "sample-by-sample",
        Level.NOTE,
        f"{kind} is taken apart into {loader.batch_size} samples for each batch, which are then stacked again",
        remedy,
    )


def _batched_way(dataset: Any) -> tuple[str | None, str]:
    at_once = "Give batch_size=None and sampler=BatchSampler(RandomSampler(dataset), n, drop_last=True)"
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    if isinstance(dataset, Dataset):
        return (
            "A Headrace dataset",
            "Use headrace.torch.Loader, which gathers each field of a batch in one go",
        )
    if name == "headrace.torch.rows.RowDataset":
        return "A RowDataset", "Use headrace.torch.Loader, which makes whole batches of rows"
    if name == "datasets.arrow_dataset.Dataset":
        return "A Hugging Face dataset", f"{at_once}; its with_format('torch') gives tensors"
    if isinstance(dataset, np.ndarray | torch.Tensor):
        return "An array", f"{at_once}; or use headrace.Loader(headrace.from_arrays(...))"
    if isinstance(dataset, TensorDataset):
        return "A TensorDataset", f"{at_once}; or use headrace.torch.Loader(headrace.from_arrays(...))"
    return None, ""


def bytes_streamed(dataset: Any) -> int:
    """Of the files of a Headrace stream; 0 if it is none, or not over files."""
    streams = sys.modules.get("headrace.streams.stream")
    if streams is None or type(dataset) is not streams.Stream:
        return 0
    return sum(file.bytes for file in dataset._source.files)


def takes_in_random_order(loader: Any) -> bool:
    """Whether a map-style dataset is asked for its items in an order that is not that of its storage."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    sampler = getattr(loader.batch_sampler, "sampler", None) or loader.sampler
    if isinstance(sampler, SequentialSampler | range):
        return False
    return bool(getattr(sampler, "shuffle", True))
