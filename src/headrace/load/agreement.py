"""Whether the ranks of torch.distributed agree on what they load: the same data, seed, settings and place.

Each rank makes its own share of every batch, so ranks that disagree would repeat rows and leave others out, and nobody
would notice. Before its first iteration, a Loader compares itself with those of the other ranks, through the store that
torch.distributed has for such things. It is no collective operation: it uses no device and waits for no other call.
"""

import itertools
import json
import sys
from collections.abc import Mapping
from typing import Any

from headrace.errors import SettingsError
from headrace.order.world import World

_numbers = itertools.count()
"""All ranks create the same Loaders in the same order, so the nth of one rank belongs to the nth of another."""
_FEW = 5


def check_that_ranks_agree(world: World, described: Mapping[str, Any]) -> None:
    """Raise an error on every rank if one of them has another description. Alone, or without torch, do nothing."""
    distributed = sys.modules.get("torch.distributed")
    if world.size == 1 or distributed is None:
        return
    if not distributed.is_available() or not distributed.is_initialized():
        return
    if (world.rank, world.size) != (distributed.get_rank(), distributed.get_world_size()):
        # Some ranks share their data, or this Loader is not meant for all of them.
        return
    store = distributed.distributed_c10d._get_default_store()
    prefix = f"headrace/loader/{next(_numbers)}"
    problem = _compare(store, prefix, world, json.dumps(described, sort_keys=True))
    if problem:
        raise SettingsError(problem)


def _compare(store: Any, prefix: str, world: World, mine: str) -> str:
    """What is wrong, as rank 0 sees it; nothing if all ranks agree."""
    store.set(f"{prefix}/{world.rank}", mine)
    if world.rank:
        return _wait_for(store, f"{prefix}/problem", "rank 0")
    differences = []
    for rank in range(1, world.size):
        theirs = _wait_for(store, f"{prefix}/{rank}", f"rank {rank}")
        if theirs != mine:
            differences.append(_describe(json.loads(mine), rank, json.loads(theirs)))
    problem = ""
    if differences:
        more = f"; and {len(differences) - _FEW} more ranks" if len(differences) > _FEW else ""
        problem = (
            f"the ranks load different things, so rows would be repeated and others left out: "
            f"{'; '.join(differences[:_FEW])}{more}. Create the same Loaders in the same order on every rank"
        )
    store.set(f"{prefix}/problem", problem)
    return problem


def _wait_for(store: Any, key: str, whose: str) -> str:
    try:
        return bytes(store.get(key)).decode()
    except RuntimeError as error:
        raise SettingsError(
            f"{whose} has not started its Loader: {error}. Every rank of torch.distributed must start the same Loaders "
            "in the same order; give rank= and world_size= to a Loader that only some ranks use"
        ) from None


def _describe(mine: Mapping[str, Any], rank: int, theirs: Mapping[str, Any]) -> str:
    names = sorted(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))
    listed = ", ".join(f"{name} is {theirs.get(name)!r} instead of {mine.get(name)!r}" for name in names)
    return f"on rank {rank}, {listed}"
