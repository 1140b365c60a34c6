"""Findings about a DataLoader (PyTorch's or ours) and its dataset, without running them."""

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
from headrace.observe.data_in_memory import DataKind, data_in_memory
from headrace.observe.facts import DataFacts, Facts, Sent, WorkerFacts
from headrace.observe.findings import Outcomes
from headrace.observe.rules import examine


def advise_dataloader(loader: Any) -> None:
    """Called when an iteration begins. Leaves out what PyTorch itself warns about."""
    advise_on(loader, _unsaid)


def _unsaid(loader: Any) -> Outcomes:
    found = examine(facts_of_dataloader(loader))
    if not _in_threads(loader) and loader.num_workers > host.allowed_cores():
        del found["workers"]
    return found


def facts_of_dataloader(loader: Any) -> Facts:
    held, threads = data_in_memory(loader.dataset), _in_threads(loader)
    processes = 0 if threads else loader.num_workers
    return Facts(
        batch_size=loader.batch_size or 0,
        workers=WorkerFacts(loader.num_workers, "num_workers", threads),
        data=DataFacts(held, processes, _sent(loader) if processes else None),
        loaded_bytes=sum(each.bytes for each in held if each.kind is not DataKind.MAP),
        pageable=_is_pageable(loader),
        pin_remedy="Give pin_memory=True, and copy with .to(device, non_blocking=True)",
        pins_memory=bool(loader.pin_memory),
        taken_apart=taken_apart(loader),
        takes_samples=True,
        streamed_bytes=bytes_streamed(loader.dataset),
        random_order=takes_in_random_order(loader),
    )


def _in_threads(loader: Any) -> bool:
    return str(getattr(loader, "worker_kind", "process")) == "thread"


def _sent(loader: Any) -> Sent:
    context = loader.multiprocessing_context or multiprocessing.get_context()
    if context.get_start_method() == "fork":
        return Sent.FORK
    # Our DataLoader has a setting that PyTorch's does not have.
    return Sent.ONCE if hasattr(loader, "snapshot_every_n_steps") else Sent.EACH


def _is_pageable(loader: Any) -> bool:
    dataset = loader.dataset
    on_device = isinstance(dataset, TensorDataset) and any(t.device.type != "cpu" for t in dataset.tensors)
    return not (loader.pin_memory or on_device)


def taken_apart(loader: DataLoader) -> tuple[str, str, int] | None:
    """A dataset that is read sample by sample but could be read batch by batch, and how to do that; None otherwise."""
    dataset = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    own_collate = loader.collate_fn is not default_collate
    if loader.batch_size is None or own_collate or isinstance(dataset, IterableDataset):
        return None
    kind, remedy = _batched_way(dataset)
    return None if kind is None else (kind, remedy, loader.batch_size)


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
    """The size of the files of a Headrace stream; 0 for anything else."""
    streams = sys.modules.get("headrace.streams.stream")
    if streams is None or type(dataset) is not streams.Stream:
        return 0
    return sum(file.bytes for file in dataset.inputs.files)


def takes_in_random_order(loader: Any) -> bool:
    """Whether a map-style dataset is asked for its items in an order that is not that of its storage."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    sampler = getattr(loader.batch_sampler, "sampler", None) or loader.sampler
    if isinstance(sampler, SequentialSampler | range):
        return False
    return bool(getattr(sampler, "shuffle", True))
