"""A RemoteLoader gives what the Loader of its servers gives, bit for bit, and its states are interchangeable."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import SettingsError, StageError
from headrace.serve.worker import Served
from tests.serve import served
from tests.serve.servers import ThreadServer, assert_equal_batches, assert_equal_values, thread_server

Make = Callable[[Path], headrace.Loader]
KINDS: dict[str, Make] = {
    "packed": lambda folder: served.packed(str(folder)),
    "units": lambda folder: served.units(str(folder)),
    "mixture": lambda folder: served.mixture(str(folder)),
    "records": lambda folder: served.records(),
    "last batches": lambda folder: served.records(drop_last=False, epochs=2),
}


class Kind:
    """A server of one kind of Loader, and the Loader itself."""

    def __init__(self, make: Make, folder: Path, server: ThreadServer) -> None:
        self.make, self.folder, self.server = make, folder, server

    def local(self) -> headrace.Loader:
        return self.make(self.folder)

    def remote(self, scheme: str = "unix", **options: Any) -> headrace.RemoteLoader:
        address = self.server.unix if scheme == "unix" else self.server.grpc
        return headrace.RemoteLoader(address, **options)


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    folder, make = tmp_path_factory.mktemp("served"), KINDS[request.param]
    with thread_server(Served(loader=make(folder)), folder) as server:
        yield Kind(make, folder, server)


@pytest.mark.parametrize("scheme", ["unix", "grpc"])
def test_the_same_batches(kind: Kind, scheme: str) -> None:
    remote, local = kind.remote(scheme), kind.local()
    assert len(remote) == len(local)
    assert remote.rows_per_epoch == local.rows_per_epoch
    assert remote.settings.batch_size == local.settings.batch_size
    for here, there in zip(remote, local, strict=True):
        assert_equal_batches(here, there)
        assert remote.state_dict() == local.state_dict()
        assert remote.rows_seen == local.rows_seen
    assert remote.epoch == local.epoch


@pytest.mark.parametrize("rank", [0, 2])
def test_the_same_batches_on_several_ranks(kind: Kind, rank: int) -> None:
    remote = kind.remote(rank=rank, world_size=3)
    local = kind.local().from_the_beginning(kind.local().settings, remote.world)
    for here, there in zip(remote, local, strict=True):
        assert_equal_batches(here, there)


def test_states_go_from_one_to_the_other(kind: Kind) -> None:
    remote, local = kind.remote(), kind.local()
    for first, second in ((remote, kind.local()), (local, kind.remote())):
        iterator = iter(first)
        for _ in range(3):
            next(iterator)
        second.load_state_dict(first.state_dict())
        for here, there in zip(iterator, second, strict=True):
            for name in here:
                assert_equal_values(here[name], there[name])


def test_rows_at_any_positions(kind: Kind) -> None:
    remote, local = kind.remote(), kind.local()
    size = local.settings.batch_size
    positions = list(range(2 * size, 3 * size))
    here, there = remote.rows(positions), local.rows(positions)
    assert list(here) == list(there)
    for name in here:
        assert_equal_values(here[name], there[name])


def test_it_can_be_pickled(kind: Kind) -> None:
    remote = kind.remote()
    next(iter(remote))
    copy = pickle.loads(pickle.dumps(remote))
    assert_equal_batches(next(iter(copy)), next(iter(remote)))


def test_batches_may_be_changed_and_kept(kind: Kind) -> None:
    """Nobody else sees what is written into a batch, and nothing is written into a batch that is kept."""
    kept, expected = [], []
    for batch, other in zip(kind.remote(), kind.local(), strict=True):
        arrays = [value for value in batch.values() if isinstance(value, np.ndarray)]
        kept.append(dict(batch))
        expected.append(dict(other))
        for array in arrays:
            assert array.flags.writeable
    for here, there in zip(kept, expected, strict=True):
        for name in here:
            assert_equal_values(here[name], there[name])
            if isinstance(here[name], np.ndarray):
                here[name][...] = 0
    for here, there in zip(kind.remote(), kind.local(), strict=True):
        assert_equal_batches(here, there)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    folder = tmp_path_factory.mktemp("one")
    make: Make = lambda folder: served.packed(str(folder))  # noqa: E731
    with thread_server(Served(loader=make(folder)), folder) as server:
        yield Kind(make, folder, server)


def test_only_fields_that_are_used_travel(one: Kind) -> None:
    remote = one.remote(prefetch=0)
    iterator = iter(remote)
    first = next(iterator)
    assert list(first.made) == ["tokens"]
    assert first.labels.shape == first.tokens.shape
    assert list(next(iterator).made) == ["tokens", "labels"]


def test_report(one: Kind) -> None:
    assert one.remote().report() == one.local().report()


def test_functions_of_batches_in_this_process(one: Kind) -> None:
    def noisy(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"tokens": batch["tokens"], "noise": rng.random(3)}

    remote, local = one.remote().map(noisy, per="batch"), one.local().map(noisy, per="batch")
    for here, there in zip(remote, local, strict=True):
        assert_equal_batches(here, there)
    with pytest.raises(SettingsError, match="functions of samples belong to the Loader of the servers"):
        one.remote().map(noisy)


def test_functions_here_draw_other_numbers_than_those_on_the_server(tmp_path: Path) -> None:
    def third(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**batch, "third": rng.random(3)}

    with thread_server(Served(loader=served.records()), tmp_path) as server:
        remote = headrace.RemoteLoader(server.unix).map(third, per="batch")
        for here, there in zip(remote, served.records().map(third, per="batch"), strict=True):
            assert_equal_batches(here, there)


def test_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they change, a request has only those of its own rows."""
    monkeypatch.setattr("headrace.serve.places._MOST_STAGES_BYTES", 60)
    local = served.mixture(str(tmp_path))
    with thread_server(Served(loader=local), tmp_path) as server:
        remote = headrace.RemoteLoader(server.unix)
        here, there = iter(remote), iter(local)
        for number in range(len(local)):
            if number > 3:
                for loader in (remote, local):
                    loader.reweight({"river": 1 + number % 3, "sea": 4})
            assert_equal_batches(next(here), next(there))
        assert remote.state_dict() == local.state_dict()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"batch_size": 8},
            r"batch_size=8: the Loader of the servers has 4; leave it out, or start the servers",
        ),
        ({"seq_len": 64}, "seq_len=64: the Loader of the servers has 32"),
        ({"shuffle": "none"}, "shuffle='none': the Loader of the servers has 'global'"),
        ({"workers": 2}, "workers: batches are made by the servers; see local_workers="),
        ({"local_workers": 2}, "local_workers=2: needs local=, a Loader or the module:function of one"),
        ({"fallback": "local"}, "fallback='local': needs local="),
        ({"fallback": "remote"}, "fallback='remote': must be 'local', or None"),
    ],
)
def test_settings_must_agree(one: Kind, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        one.remote(**options)


def test_settings_that_agree(one: Kind) -> None:
    remote = one.remote(batch_size=4, seq_len=32, seed=5, shuffle="global", drop_last=False, prefetch=2)
    assert remote.settings.prefetch == 2
    assert sum(1 for _ in remote) == len(one.local())


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("cpu-1:9000", "must begin with grpc://"),
        ("http://cpu-1:9000", "must begin with grpc://"),
        ("grpc://cpu-1", "must be grpc://host:port"),
        ("grpc://cpu-1:99999", "Port out of range"),
        ("unix://relative", "give an absolute path"),
        ([], "no server to ask"),
        ([3], "must be a text"),
    ],
)
def test_addresses_that_are_none(address: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        headrace.RemoteLoader(address)


def test_a_function_that_fails_on_the_server(tmp_path: Path) -> None:
    with thread_server(Served(loader=served.failing()), tmp_path) as server:
        for address in (server.unix, server.grpc):
            iterator = iter(headrace.RemoteLoader(address))
            assert next(iterator).x.tolist() == [0, 1, 2, 3]
            with pytest.raises(
                StageError, match=r"map\(fails_at_seven\) failed on row 7 .*seven is not a number"
            ) as caught:
                next(iterator)
            assert "raise ValueError" in str(caught.value)
            assert address in str(caught.value)


def test_a_worker_that_dies_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIES_ONCE", str(tmp_path / "died"))
    with thread_server(Served(loader=served.dying()), tmp_path, workers=2) as server:
        rows = [batch.x for batch in headrace.RemoteLoader(server.unix)]
        assert np.concatenate(rows).tolist() == list(range(served.ROWS // 4 * 4))
        assert server.state()["worker_deaths"] == 1
