"""The rank of this process and the world size: from arguments, else torch.distributed, else the environment.

Ranks that share their data (tensor or context parallel) share a data rank: give `data_rank` and
`data_world_size`, or a device mesh and its data dimension.
"""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TypedDict

from headrace.errors import SettingsError
from headrace.order.world import World

_log = logging.getLogger(__name__)

_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Set by torchrun and most launchers, Open MPI, MPICH, and `srun` (SLURM_NTASKS is also set in a plain shell)."""


class WorldOptions(TypedDict, total=False):
    """The keyword arguments that say which rank this is; see `find_world`."""

    rank: int | None
    world_size: int | None
    data_rank: int | None
    data_world_size: int | None
    mesh: Any
    mesh_dim: str | None


def find_world(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    data_rank: int | None = None,
    data_world_size: int | None = None,
    mesh: Any = None,
    mesh_dim: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> World:
    """The data rank of this process, and the number of data ranks."""
    ranks = _of_pair({"rank": rank, "world_size": world_size})
    data_ranks = _of_pair({"data_rank": data_rank, "data_world_size": data_world_size})
    if mesh is not None:
        if ranks or data_ranks:
            raise SettingsError("mesh= together with a rank: give only one of them")
        return _of_mesh(mesh, mesh_dim)
    if mesh_dim is not None:
        raise SettingsError(f"mesh_dim={mesh_dim!r} without mesh=: give the device mesh too")
    if data_ranks:
        return World(*data_ranks)
    if ranks:
        return World(*ranks)
    return _of_torch() or _of_environment(environment) or World()


def _of_pair(pair: Mapping[str, int | None]) -> tuple[int, int] | None:
    """A rank and a world size, or None if neither was given."""
    rank, size = pair.values()
    if rank is not None and size is not None:
        return rank, size
    for present, value in pair.items():
        if value is not None:
            (missing,) = pair.keys() - {present}
            raise SettingsError(f"{present}={value} without {missing}: give both")
    return None


def _of_mesh(mesh: Any, dimension: str | None) -> World:
    """The rank along the data dimension of a torch DeviceMesh."""
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if dimension is None:
        if getattr(mesh, "ndim", 0) != 1:
            raise SettingsError(
                f"mesh with dimensions {names}: say along which one the data is split, with mesh_dim=..."
            )
        return World(int(mesh.get_local_rank()), int(mesh.size()))
    if dimension not in names:
        raise SettingsError(f"mesh_dim={dimension!r}: the mesh has {names or 'no names for its dimensions'}")
    return World(int(mesh.get_local_rank(dimension)), int(mesh[dimension].size()))


def _of_torch() -> World | None:
    # Only if the program has imported it: nothing here needs torch itself.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return World(distributed.get_rank(), distributed.get_world_size())


def _check_both(environment: Mapping[str, str], rank_name: str, size_name: str) -> None:
    """With only one of them, every process would take itself for the only rank and load everything."""
    rank, size = environment.get(rank_name), environment.get(size_name)
    if (rank is None) == (size is None) or size == "1":
        return
    present, missing = (rank_name, size_name) if size is None else (size_name, rank_name)
    raise SettingsError(
        f"{present}={environment[present]!r} in the environment without {missing}: set both, or give rank= and "
        "world_size= (rank=0, world_size=1 to load everything in this process)"
    )


def _of_environment(environment: Mapping[str, str]) -> World | None:
    for rank_name, size_name in _VARIABLES:
        rank, size = environment.get(rank_name), environment.get(size_name)
        if rank is None or size is None:
            continue
        try:
            world = World(_whole(rank_name, rank), _whole(size_name, size))
        except SettingsError as error:
            raise SettingsError(
                f"{rank_name}={rank!r} and {size_name}={size!r} in the environment: {error}; "
                "correct them, or give rank= and world_size="
            ) from None
        _log.info("rank %d of %d, from %s and %s", world.rank, world.size, rank_name, size_name)
        return world
    _check_both(environment, *_VARIABLES[0])
    return None


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise SettingsError(f"{name} must be a whole number") from None
