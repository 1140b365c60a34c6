"""Which rank of how many a Loader takes itself for: from arguments, a mesh, or the environment."""

from typing import Any

import numpy as np
import pytest

from headrace.errors import SettingsError
from headrace.load.loader import Loader
from headrace.load.world import find_world
from headrace.order.world import World
from tests.load import streams

LAUNCHERS = [
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
]


class Mesh:
    """What a torch DeviceMesh offers, for a process at `place` of a mesh of that shape."""

    def __init__(self, shape: dict[str, int], place: dict[str, int], named: bool = True) -> None:
        self._shape, self._place = shape, place
        self.mesh_dim_names = tuple(shape) if named else None
        self.ndim = len(shape)

    def get_local_rank(self, dimension: str | None = None) -> int:
        return self._place[dimension or next(iter(self._shape))]

    def size(self, dimension: int | None = None) -> int:
        return int(np.prod(list(self._shape.values())))

    def __getitem__(self, name: str) -> "Mesh":
        return Mesh({name: self._shape[name]}, {name: self._place[name]})


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for pair in LAUNCHERS:
        for name in pair:
            monkeypatch.delenv(name, raising=False)


def _loader(**options: Any) -> Loader:
    return Loader(streams.Numbers(24), batch_size=2, **options)


def test_a_lone_process_is_the_only_rank() -> None:
    assert _loader().world == World(0, 1)


def test_arguments_say_which_rank_it_is() -> None:
    assert _loader(rank=2, world_size=3).world == World(2, 3)
    assert _loader(data_rank=1, data_world_size=2).world == World(1, 2)
    # Ranks that share their data say both.
    assert _loader(rank=5, world_size=8, data_rank=1, data_world_size=2).world == World(1, 2)


def test_numbers_of_numpy_are_numbers() -> None:
    assert _loader(rank=np.int64(1), world_size=np.int32(2)).world == World(1, 2)


@pytest.mark.parametrize(("rank", "size"), LAUNCHERS)
def test_launchers_say_it_in_the_environment(rank: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank, "3")
    monkeypatch.setenv(size, "4")
    assert _loader().world == World(3, 4)
    assert _loader(rank=0, world_size=2).world == World(0, 2), "arguments come first"


def test_half_of_a_launchers_variables_say_nothing_if_another_says_all() -> None:
    assert find_world(environment={"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}) == World(0, 1)
    assert find_world(environment={"RANK": "3", "PMI_RANK": "1", "PMI_SIZE": "2"}) == World(1, 2)


@pytest.mark.parametrize(
    ("rank", "size"), [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "0"), ("", "1"), ("1.0", "2")]
)
def test_nonsense_in_the_environment_is_named_with_a_remedy(rank: str, size: str) -> None:
    with pytest.raises(
        SettingsError, match=r"RANK='.*' and WORLD_SIZE='.*' in the environment.*give rank= and world_size="
    ):
        find_world(environment={"RANK": rank, "WORLD_SIZE": size})
    with pytest.raises(SettingsError, match="in the environment: WORLD_SIZE must be a whole number; correct"):
        find_world(environment={"RANK": "0", "WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2: must be 0 to 1, since world_size=2"),
        ({"rank": -1, "world_size": 2}, "rank=-1: must be 0 to 1"),
        ({"rank": 0, "world_size": 0}, "world_size=0: must be at least 1"),
        ({"rank": 0}, "rank=0 without world_size: give both"),
        ({"world_size": 2}, "world_size=2 without rank: give both"),
        ({"data_rank": 0}, "data_rank=0 without data_world_size: give both"),
        ({"data_world_size": 4}, "data_world_size=4 without data_rank: give both"),
        ({"data_rank": 4, "data_world_size": 4}, "rank=4: must be 0 to 3"),
        ({"rank": "0", "world_size": 2}, "rank='0': must be a whole number"),
        ({"rank": True, "world_size": 2}, "rank=True: must be a whole number"),
        ({"rank": 0.0, "world_size": 2}, "rank=0.0: must be a whole number"),
        ({"mesh_dim": "dp"}, "mesh_dim='dp' without mesh="),
    ],
)
def test_ranks_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        _loader(**options)


def test_a_mesh_gives_the_rank_along_its_data_dimension() -> None:
    mesh = Mesh({"dp": 3, "tp": 2}, {"dp": 2, "tp": 1})
    assert _loader(mesh=mesh, mesh_dim="dp").world == World(2, 3)
    assert _loader(mesh=mesh, mesh_dim="tp").world == World(1, 2)
    assert _loader(mesh=mesh["dp"]).world == World(2, 3)
    assert _loader(mesh=Mesh({"dp": 4}, {"dp": 1}, named=False)).world == World(1, 4)


def test_processes_that_share_a_data_rank_see_the_same_data() -> None:
    seen = {
        (dp, tp): [
            b["number"].tolist()
            for b in _loader(mesh=Mesh({"dp": 2, "tp": 2}, {"dp": dp, "tp": tp}), mesh_dim="dp")
        ]
        for dp in (0, 1)
        for tp in (0, 1)
    }
    assert seen[0, 0] == seen[0, 1] != seen[1, 0] == seen[1, 1]
    assert sorted(n for dp in (0, 1) for batch in seen[dp, 0] for n in batch) == list(range(24))


def test_meshes_that_do_not_say_enough_are_refused() -> None:
    mesh = Mesh({"dp": 3, "tp": 2}, {"dp": 2, "tp": 1})
    with pytest.raises(
        SettingsError, match=r"mesh with dimensions \('dp', 'tp'\): say along which one.*mesh_dim="
    ):
        _loader(mesh=mesh)
    with pytest.raises(SettingsError, match=r"mesh_dim='data': the mesh has \('dp', 'tp'\)"):
        _loader(mesh=mesh, mesh_dim="data")
    with pytest.raises(SettingsError, match="no names for its dimensions"):
        _loader(mesh=Mesh({"dp": 4}, {"dp": 1}, named=False), mesh_dim="dp")
    with pytest.raises(SettingsError, match="mesh= together with a rank: give only one of them"):
        _loader(mesh=mesh, mesh_dim="dp", rank=0, world_size=2)
    with pytest.raises(SettingsError, match="mesh= together with a rank: give only one of them"):
        _loader(mesh=mesh, mesh_dim="dp", data_rank=0, data_world_size=2)


def test_repr_says_what_the_loader_is() -> None:
    assert repr(_loader(rank=1, world_size=2)) == "Loader(24 records per epoch, batches of 2, rank 1 of 2)"


@pytest.mark.parametrize(("name", "other"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_of_what_a_launcher_says_is_refused(
    name: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(SettingsError, match=f"{name}='2' in the environment without {other}: set both"):
        _loader()
    assert _loader(rank=0, world_size=1).world == World(0, 1)


def test_a_world_of_one_needs_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert _loader().world == World(0, 1)
