"""Records as JAX arrays, and settings that cannot work."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.errors import SettingsError

pytest.importorskip("jax", reason="needs jax")

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import headrace.jax
from headrace.jax.loader import data_world
from tests.jax.contents import one_device_sharding

# Records


class Samples:
    def __init__(self, **fields: Callable[[int], Any]) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value(index) for name, value in self.fields.items()}


@pytest.mark.parametrize("sharded", [False, True])
def test_samples_become_arrays_and_what_is_no_array_stays(sharded: bool) -> None:
    def convert(batch: dict[str, Any]) -> dict[str, Any]:
        first = batch["image"][:, 0, :2]
        return {
            **batch,
            "half": first.astype(jnp.bfloat16),
            "big_endian": first.astype(">i4"),
            "device": jnp.array(first),
        }

    data = Samples(
        image=lambda i: np.full((2, 3), i, dtype=np.float32), label=lambda i: i, name=lambda i: f"sample {i}"
    )
    sharding = one_device_sharding() if sharded else None
    loader = headrace.jax.Loader(data, batch_size=4, shuffle=False, sharding=sharding)
    batch = list(loader.map(convert, per="batch"))[1]
    assert batch.name == ["sample 4", "sample 5", "sample 6", "sample 7"]
    assert batch.label.tolist() == [4, 5, 6, 7]
    assert {name: (str(batch[name].dtype), batch[name].shape) for name in batch if name != "name"} == {
        "image": ("float32", (4, 2, 3)),
        "label": ("int32", (4,)),
        "half": ("bfloat16", (4, 2)),
        "big_endian": ("int32", (4, 2)),
        "device": ("float32", (4, 2)),
    }
    for name in ("half", "big_endian", "device"):
        assert batch[name][:, 1].tolist() == batch.image[:, 0, 0].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, np.uint64(2**32)])
def test_whole_numbers_that_jax_would_cut_are_refused(value: Any) -> None:
    loader = headrace.jax.Loader(Samples(number=lambda i: value), batch_size=4)
    with pytest.raises(
        SettingsError, match=r"field 'number' is u?int64 with values from .* truncate them to u?int32; call"
    ):
        next(iter(loader))


def test_int64_needs_x64(dataset: str) -> None:
    with pytest.raises(
        SettingsError, match="dtype='int64': JAX would truncate it to int32; leave dtype out, or call"
    ):
        headrace.jax.Loader(dataset, seq_len=16, batch_size=4, dtype="int64")
    with jax.enable_x64(True):
        batch = next(iter(headrace.jax.Loader(dataset, seq_len=16, batch_size=4, dtype="int64")))
        assert batch.tokens.dtype == jnp.int64


# Settings that cannot work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rank": 0, "world_size": 1},
            "rank=0 with sharding=: the sharding determines the rank; leave rank out",
        ),
        ({"data_world_size": 2}, "data_world_size=2 with sharding="),
        ({"mesh_dim": "data"}, "mesh_dim='data' with sharding="),
        ({"drop_last": False}, "drop_last=False with sharding=: the last batch may not divide"),
        (
            {"fields": ["cu_seqlens"]},
            "cu_seqlens='batch', max_documents=None with sharding=: .* give cu_seqlens='row'",
        ),
        ({"cu_seqlens": "row"}, "cu_seqlens='row', max_documents=None with sharding="),
        ({"max_documents": 40}, "cu_seqlens='batch', max_documents=40 with sharding="),
        ({"sharding": "data"}, "sharding of type str: must be a jax.sharding.NamedSharding"),
        ({"sharding": PartitionSpec("data")}, "must be a jax.sharding.NamedSharding"),
        (
            {"sharding": NamedSharding(AbstractMesh((1,), ("data",)), PartitionSpec("data"))},
            "sharding over AbstractMesh.*: this mesh has no devices",
        ),
    ],
)
def test_settings_that_cannot_be_sharded_are_refused(
    dataset: str, options: dict[str, Any], message: str
) -> None:
    options = {"sharding": one_device_sharding(), "seq_len": 16, "batch_size": 4} | options
    with pytest.raises(SettingsError, match=message):
        headrace.jax.Loader(dataset, **options)


def test_an_open_dimension_is_refused(dataset: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec(PartitionSpec.UNCONSTRAINED))
    with pytest.raises(SettingsError, match="say how each dimension is divided"):
        headrace.jax.Loader(dataset, sharding=sharding, seq_len=16, batch_size=4)


def test_ragged_fields_cannot_be_sharded(dataset: str) -> None:
    loader = headrace.jax.Loader(dataset, sharding=one_device_sharding(), batch_size=4)
    with pytest.raises(
        SettingsError, match=r"field 'tokens' has shape .*, not one item for each of the 4 rows"
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("needed", "ranks"),
    [
        ({0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ({0: {1, 3}, 1: {0, 2}}, [(1, 2), (0, 2)]),
        ({0: {0}, 1: {0}}, [(0, 1), (0, 1)]),
    ],
)
def test_processes_that_need_the_same_rows_share_a_data_rank(
    needed: dict[int, set[int]], ranks: list[tuple[int, int]]
) -> None:
    worlds = [data_world(needed, process) for process in needed]
    assert [(world.rank, world.size) for world in worlds] == ranks


@pytest.mark.parametrize("needed", [{0: {0, 1}, 1: {1, 2}}, {0: {0}, 1: {1, 2}}, {0: {0, 1}, 1: {0}}])
def test_processes_whose_rows_overlap_are_refused(needed: dict[int, set[int]]) -> None:
    with pytest.raises(SettingsError, match="any two must need the same or none in common"):
        data_world(needed, 0)
