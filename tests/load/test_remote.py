"""The same rows, in the same order and with the same states, from a bucket as from a local disk."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from tests.load.remote_data import put, write_local


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_local(tmp_path_factory.mktemp("remote") / "data")


@pytest.fixture
def remote(local: Path, s3_place: str) -> str:
    return put(local, s3_place)


def batches(data: Any, **options: Any) -> list[dict[str, Any]]:
    return [dict(batch) for batch in headrace.Loader(data, **options)]


def assert_same(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"shuffle": "global"},
    {"shuffle": "block"},
    {"shuffle": "none"},
    {"shuffle": "units"},
    {"fields": ("label",)},
    {"seq_len": 128},
    {"seq_len": 1024},
    {"seq_len": 128, "shuffle": "global", "pack_within": "dataset"},
    {"seq_len": 128, "shuffle": "none", "pack_within": "dataset", "packing": "pad", "overlong": "truncate"},
    {"seq_len": 128, "shuffle": "none", "packing": "pad", "overlong": "drop"},
    {"seq_len": 128, "shuffle": "global", "group_shards": 2},
    {"seq_len": 128, "packing": "windows"},
    {"seq_len": 128, "packing": "windows", "shuffle": "global", "pack_within": "dataset"},
    {"seq_len": 128, "packing": "windows", "pack_within": "dataset", "align_documents": True},
    {"seq_len": 128, "packing": "windows", "align_documents": True},
    {"seq_len": 128, "packing": "windows", "pack_within": "dataset", "boundaries": False},
    {"seq_len": 128, "packing": "windows", "boundaries": False},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_rows_order_and_states_are_the_same(local: Path, remote: str, options: dict[str, Any]) -> None:
    far = headrace.Loader(remote, batch_size=4, **options)
    # What the remote Loader has chosen, given explicitly.
    same = {"shuffle": far.settings.shuffle, "pack_within": far.settings.pack_within}
    if far.settings.seq_len is None:
        same.pop("pack_within")
    near = headrace.Loader(local, batch_size=4, **{**options, **same})
    assert near.rows_per_epoch == far.rows_per_epoch
    assert near.state_dict() == far.state_dict()
    assert_same([dict(batch) for batch in near], [dict(batch) for batch in far])


def test_a_state_continues_on_the_other_side(local: Path, remote: str) -> None:
    whole = batches(remote, batch_size=4, seq_len=128)
    for first, second in ((remote, local), (local, remote)):
        expected = whole if first is remote else batches(local, batch_size=4, seq_len=128)
        loader = headrace.Loader(first, batch_size=4, seq_len=128)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        other = headrace.Loader(second, batch_size=4, seq_len=128)
        other.load_state_dict(loader.state_dict())
        assert_same([dict(batch) for batch in other], expected[3:])


def test_reads_can_be_checked_on_a_local_disk(local: Path) -> None:
    checked = headrace.open(local, verify="reads")
    for options in SETTINGS[::3]:
        assert_same(batches(checked, batch_size=4, **options), batches(local, batch_size=4, **options))


def test_records_are_the_same(local: Path, remote: str) -> None:
    near, far = headrace.open(local), headrace.open(remote)
    assert len(near) == len(far)
    assert near.fingerprint == far.fingerprint
    for one, other in zip(near, far, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    np.testing.assert_array_equal(near.lengths, far.lengths)
    for field in ("tokens", "image"):
        for one, other in zip(near.length_histogram(field), far.length_histogram(field), strict=True):
            np.testing.assert_array_equal(one, other)


MIXED: list[dict[str, Any]] = [
    {},
    {"seq_len": 128},
    {"seq_len": 128, "shuffle": "global"},
    {"seq_len": 128, "shuffle": "block"},
    {"seq_len": 128, "shuffle": headrace.Shuffle(kind="units", lanes=5)},
]


@pytest.mark.parametrize("options", MIXED, ids=str)
def test_mixtures_of_local_and_remote_sources(
    local: Path, remote: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Equal to a mixture of local ones, and a state continues on the other side."""
    other = write_local(tmp_path / "other", 40)

    def loader(first: Any, **chosen: Any) -> headrace.Loader:
        mixture = headrace.mix({"first": (first, 0.7), "second": (other, 0.3)})
        return headrace.Loader(mixture, batch_size=4, **{**options, **chosen})

    far = loader(remote)
    chosen: dict[str, Any] = {"shuffle": far.settings.shuffle}
    if far.settings.seq_len is not None:
        chosen["pack_within"] = far.settings.pack_within
    near = loader(local, **chosen)
    expected = take(iter(near), 40)
    assert_same(take(iter(far), 40), expected)
    for first, second in ((remote, local), (local, remote)):
        begun = loader(first, **chosen)
        assert_same(take(iter(begun), 7), expected[:7])
        going_on = loader(second, **chosen)
        going_on.load_state_dict(begun.state_dict())
        assert_same(take(iter(going_on), 20), expected[7:27])


def take(iterator: Iterator[Any], count: int) -> list[dict[str, Any]]:
    return [dict(batch) for batch in itertools.islice(iterator, count)]
