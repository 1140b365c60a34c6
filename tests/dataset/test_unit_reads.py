"""Reads that are checked: a flipped byte never reaches a record without a word."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import CorruptError, FormatError, HeadraceError, SettingsError
from headrace.format.manifest import read_manifest
from headrace.store.local import LocalStore
from tests.load.remote_data import write_local


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_local(tmp_path_factory.mktemp("units") / "data", records=60)


def contents(path: Path, **options: Any) -> list[Any]:
    """All records, and the rows of packed and of plain batches."""
    dataset = headrace.open(path, **options)
    records = [{name: np.asarray(value).tolist() for name, value in record.items()} for record in dataset]
    rows = [batch["tokens"].tolist() for batch in headrace.Loader(dataset, batch_size=3, seq_len=64)]
    plain = [batch["label"].tolist() for batch in headrace.Loader(dataset, batch_size=3, shuffle="block")]
    return [records, rows, plain]


@pytest.mark.parametrize("flips", [40, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_flipped_byte_is_noticed_or_makes_no_difference(original: Path, tmp_path: Path, flips: int) -> None:
    path = tmp_path / "data"
    shutil.copytree(original, path)
    expected = contents(path, verify="reads")
    assert expected == contents(path)
    shards = sorted(path.glob("shard-*"))
    rng = np.random.default_rng(5)
    noticed = 0
    for _ in range(flips):
        shard = shards[int(rng.integers(len(shards)))]
        raw = bytearray(shard.read_bytes())
        place = int(rng.integers(len(raw)))
        raw[place] ^= 1 << int(rng.integers(8))
        whole = shard.read_bytes()
        shard.write_bytes(raw)
        try:
            assert contents(path, verify="reads") == expected
        except CorruptError as error:
            noticed += 1
            assert shard.name in str(error)
        shard.write_bytes(whole)
    # Headers, histograms and lists of checksums are not needed to read records.
    assert noticed > flips / 2


def test_every_byte_of_a_field_is_checked(original: Path, tmp_path: Path) -> None:
    path = tmp_path / "data"
    shutil.copytree(original, path)
    dataset = headrace.open(path)
    source: Any = dataset.source
    for name in ("tokens", "label", "image"):
        entry = source.manifest.shards[0]
        shard = source.load_part(0)
        section = shard.section_offsets()[f"{name}/data"]
        size = shard.part(name, "data").nbytes
        file = path / entry.stored.file
        whole = file.read_bytes()
        for place in (0, size // 2, size - 1):
            raw = bytearray(whole)
            raw[section + place] ^= 0x10
            file.write_bytes(raw)
            with pytest.raises(CorruptError, match="do not match their checksum: the file was damaged"):
                list(headrace.open(path, verify="reads"))
            file.write_bytes(whole)


def test_only_the_parts_that_are_read_are_checked(original: Path, tmp_path: Path) -> None:
    path = tmp_path / "data"
    shutil.copytree(original, path)
    last = path / read_manifest(LocalStore(path)).shards[-1].stored.file
    raw = bytearray(last.read_bytes())
    raw[2000] ^= 1
    last.write_bytes(raw)
    dataset = headrace.open(path, verify="reads")
    assert dataset[0]["label"] == 0
    with pytest.raises(CorruptError, match=last.name):
        dataset[-1]


def test_a_dataset_without_units_cannot_be_checked(
    original: Path, tmp_path: Path, reseal: Callable[..., None]
) -> None:
    path = tmp_path / "data"
    shutil.copytree(original, path)
    reseal(path, lambda body: body.update(further=[]))
    assert len(headrace.open(path)) == 60
    with pytest.raises(FormatError, match="by an earlier version of Headrace; build it again"):
        headrace.open(path, verify="reads")
    with pytest.raises(SettingsError, match="verify='all': must be 'reads', or None"):
        headrace.open(path, verify="all")


def test_forged_units_never_lead_outside_their_shard(
    original: Path, tmp_path: Path, reseal: Callable[..., None]
) -> None:
    """Units that were changed, with right checksums: a clear error, or bytes of the shard, but no crash."""
    path = tmp_path / "data"
    shutil.copytree(original, path)
    file = next(path.glob("units-*"))
    whole = file.read_bytes()
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(40):
        raw = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            raw[int(rng.integers(64, len(raw)))] ^= 1 << int(rng.integers(8))
        file.write_bytes(raw)
        reseal(path)
        try:
            contents(path, verify="reads")
        except HeadraceError:
            refused += 1
    assert refused > 10
