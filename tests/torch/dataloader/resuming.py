"""DataLoaders of every kind, the ways in which their batches come about, and going on from their states."""

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler

from headrace.torch import DataLoader
from tests.torch.dataloader import state_datasets as data
from tests.torch.dataloader.datasets import seed_torch

LENGTH = 23
WAYS: dict[str, dict[str, Any]] = {
    "in the loop": {},
    "processes": {"num_workers": 2},
    "processes that stay": {"num_workers": 2, "persistent_workers": True, "snapshot_every_n_steps": 2},
    "one thread": {"num_workers": 1, "worker_kind": "thread"},
    "threads": {"num_workers": 3, "worker_kind": "thread"},
    "snapshots now and then": {"num_workers": 2, "worker_kind": "thread", "snapshot_every_n_steps": 3},
    "no snapshots": {"num_workers": 2, "worker_kind": "thread", "snapshot_every_n_steps": 0},
    "threads that stay": {"num_workers": 2, "worker_kind": "thread", "persistent_workers": True},
    "far ahead": {
        "num_workers": 2,
        "worker_kind": "thread",
        "prefetch_factor": 7,
        "snapshot_every_n_steps": 2,
    },
}


def _plain(batch: Any) -> Any:
    if isinstance(batch, list | tuple):
        return [_plain(part) for part in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def numbers_of(batches: Any) -> list[Any]:
    return [_plain(batch) for batch in batches]


def _weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + number for number in range(LENGTH)], 30)


MAKE: dict[str, Callable[..., DataLoader[Any]]] = {
    "in order": lambda **way: DataLoader(data.Numbers(LENGTH), batch_size=3, **way),
    "drop last": lambda **way: DataLoader(data.Numbers(LENGTH), batch_size=4, drop_last=True, **way),
    "one by one": lambda **way: DataLoader(data.Numbers(LENGTH), batch_size=None, **way),
    "shuffled": lambda **way: DataLoader(data.Numbers(LENGTH), batch_size=3, shuffle=True, **way),
    "generator": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(4), **way
    ),
    "own generator": lambda **way: DataLoader(
        data.Numbers(LENGTH),
        batch_size=3,
        sampler=RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(5)),
        **way,
    ),
    "replacement": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=RandomSampler(range(LENGTH), True, 40), **way
    ),
    "weighted": lambda **way: DataLoader(data.Numbers(LENGTH), batch_size=3, sampler=_weighted(), **way),
    "random": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.Careless(LENGTH, "random"), **way
    ),
    "numpy": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.Careless(LENGTH, "numpy"), **way
    ),
    "torch": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.Careless(LENGTH, "torch"), **way
    ),
    "own generators": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.OwnGenerators(LENGTH), **way
    ),
    "sampler with state": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.Placed(LENGTH), **way
    ),
    "sampler that counts epochs": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.CountsEpochs(LENGTH), **way
    ),
    "sampler whose iterator has state": lambda **way: DataLoader(
        data.Numbers(LENGTH), batch_size=3, sampler=data.PlacedCursor(LENGTH), **way
    ),
    "batch sampler": lambda **way: DataLoader(data.Numbers(LENGTH), batch_sampler=data.Groups(LENGTH), **way),
    "dataset with state": lambda **way: DataLoader(data.Counting(LENGTH), batch_size=2, shuffle=True, **way),
    "iterable": lambda **way: DataLoader(data.Plain(LENGTH), batch_size=2, **way),
    "iterable, one by one": lambda **way: DataLoader(data.Plain(LENGTH), batch_size=None, **way),
    "iterable, drop last": lambda **way: DataLoader(data.Plain(LENGTH), batch_size=3, drop_last=True, **way),
    "fewer than workers": lambda **way: DataLoader(data.WithIterator(1), batch_size=2, **way),
    "iterator with state": lambda **way: DataLoader(data.WithIterator(LENGTH), batch_size=2, **way),
    "iterable with state": lambda **way: DataLoader(data.WithDataset(LENGTH), batch_size=2, **way),
    "its own iterator": lambda **way: DataLoader(data.Itself(LENGTH), batch_size=2, **way),
}


def seed_all(number: int) -> None:
    seed_torch(number)
    random.seed(number)
    np.random.seed(number)


def load_as_lightning(loader: DataLoader[Any], state: dict[str, Any]) -> None:
    """A call from a module of Lightning, whose trainer counts batches."""
    names = {"__name__": "pytorch_lightning.utilities.combined_loader", "loader": loader, "state": state}
    exec("loader.load_state_dict(state)", names)


def check_resume(make: Callable[[], DataLoader[Any]], steps: list[int], epochs: int = 1) -> None:
    """From the state after so many batches of an epoch comes the very data that came in the first run.

    That is the rest of the epoch, which is empty after the last batch if the loop has not ended, and then the next
    epoch. A trainer that counts its batches goes on with the next epoch after the last batch.
    """
    ends: list[Any] = []
    for step in steps:
        seed_all(7)
        loader = make()
        for _ in range(epochs - 1):
            list(loader)
        batches = iter(loader)
        begun = [next(batches, None) for _ in range(step)]
        if step and begun[-1] is None:
            continue
        state = copy.deepcopy(loader.state_dict())
        rest = numbers_of(batches)
        at_end = copy.deepcopy(loader.state_dict())
        following = [numbers_of(loader), numbers_of(loader)]
        _check_passes(make, state, [rest, *following], f"after {step} batches")
        # A loop ends the same however often it was asked before; if not, that end is tried too.
        if [at_end, following] not in ends:
            _check_passes(make, at_end, following, "after the loop")
            ends.append([at_end, following])
        if step and not rest:
            _check_passes(make, state, following, "after all batches, counted", load_as_lightning)


def _check_passes(
    make: Callable[[], DataLoader[Any]],
    state: dict[str, Any],
    passes: list[Any],
    when: str,
    load: Callable[[Any, Any], None] = DataLoader.load_state_dict,
) -> None:
    """A loader that goes on from the state gives these batches, pass after pass."""
    seed_all(999)
    loader = make()
    load(loader, copy.deepcopy(state))
    first, *others = passes
    batches = iter(loader)
    begun = numbers_of(itertools.islice(batches, 1))
    assert begun == first[:1], when
    # The state of a run that was resumed is as good as any.
    again = copy.deepcopy(loader.state_dict())
    assert begun + numbers_of(batches) == first, when
    assert [numbers_of(loader) for _ in others] == others, f"{when}, the next epoch"
    if first[1:]:
        third = make()
        third.load_state_dict(again)
        assert numbers_of(third) == first[1:], f"{when} and one more"
