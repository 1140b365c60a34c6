"""Batches of servers as tensors and JAX arrays: the same as those of a local Loader."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import headrace
from headrace.errors import SettingsError
from headrace.serve.worker import Served
from headrace.torch.device import ToDevice
from tests.serve import served
from tests.serve.servers import ThreadServer, thread_server
from tests.torch.late_device import LateStreams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frameworks")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ThreadServer]:
    loader = served.packed(str(folder), dtype="int32", drop_last=True)
    with thread_server(Served(loader=loader), folder) as server:
        yield server


def test_tensors(server: ThreadServer, folder: Path) -> None:
    remote = headrace.torch.RemoteLoader(server.unix)
    local = headrace.torch.Loader(
        served.texts(str(folder), "river"), seq_len=32, batch_size=4, seed=5, dtype="int32"
    )
    assert len(remote) == len(local)
    count = 0
    for here, there in zip(remote, local, strict=True):
        assert list(here) == list(there)
        for name in ("tokens", "labels", "cu_seqlens"):
            assert isinstance(here[name], torch.Tensor)
            assert torch.equal(here[name], there[name])
        count += 1
    assert count == len(remote)
    assert remote.state_dict() == local.state_dict()


def test_copies_that_are_late(server: ThreadServer) -> None:
    """A device that copies one batch later than it was told: memory is not filled again before that."""
    streams = LateStreams()
    remote = headrace.torch.RemoteLoader(server.unix, prefetch=3)
    remote.delivery = ToDevice(remote.device, streams)
    copied = []
    for batch in remote:
        copied.append(batch.tokens)
        if len(copied) > 1:
            streams.run(1)
    assert streams.allocated
    for here, there in zip(copied, headrace.torch.RemoteLoader(server.unix), strict=True):
        assert torch.equal(here, there.tokens)


def test_jax_arrays(server: ThreadServer, folder: Path) -> None:
    remote = headrace.jax.RemoteLoader(server.unix)
    local = headrace.jax.Loader(served.texts(str(folder), "river"), seq_len=32, batch_size=4, seed=5)
    for here, there in zip(remote, local, strict=True):
        assert list(here) == list(there)
        for name in here:
            assert isinstance(here[name], jax.Array)
            assert np.array_equal(here[name], there[name])
    assert remote.state_dict() == local.state_dict()


def test_jax_arrays_over_a_mesh(server: ThreadServer) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    remote = headrace.jax.RemoteLoader(server.unix, sharding=sharding)
    for batch, other in zip(remote, headrace.RemoteLoader(server.unix), strict=True):
        assert batch.tokens.sharding == sharding
        assert np.array_equal(batch.tokens, other.tokens)


def test_what_jax_cannot_hold(tmp_path: Path) -> None:
    with (
        thread_server(Served(loader=served.packed(str(tmp_path))), tmp_path) as server,
        pytest.raises(
            SettingsError,
            match="makes tokens of int64, which JAX would truncate to int32; let them serve a headrace.jax",
        ),
    ):
        headrace.jax.RemoteLoader(server.unix)
