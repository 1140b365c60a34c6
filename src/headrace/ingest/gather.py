"""Pre-shuffling: shards that hold the records of the whole dataset in a random order, which a seed decides.

The build first makes a dataset in input order, in a separate folder. Output position p then holds its record
`permute(p, n, seed)`, so any range of positions can be written on its own, in any process.
"""

import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.copy import copy
from headrace.dataset.dataset import Dataset
from headrace.dataset.stored import StoredSource
from headrace.errors import DirectoryInUseError, StorageError
from headrace.format.checksum import checksum
from headrace.format.fields import FieldKind
from headrace.format.manifest import BUILD_NAME, ShardEntry
from headrace.format.ragged import Ragged
from headrace.format.shard import Column, ShardBuilder
from headrace.order.permutation import permute
from headrace.store.local import LocalStore
from headrace.store.store import Store

_RECORDS_AT_ONCE = 1024
_LOOK_SECONDS = 0.2


def stage_of(store: Store, local_stage: str) -> Store:
    """Where a shuffled build keeps the records in input order, until they are written in shuffled order: in a local
    directory if one is named, and otherwise in the store of the dataset."""
    return LocalStore(local_stage) if local_stage else store.folder(BUILD_NAME).folder("stage")


def near(stage: Store) -> Store:
    """The stage, or a copy of it on this machine if it is in an object store: a shuffled shard has records of all its
    shards. Several processes of a machine share the copy, and the first one makes it."""
    if not stage.is_remote:
        return stage
    directory = _directory_of(stage)
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        raise StorageError(
            f"{directory}: belongs to somebody else; remove it, or set TMPDIR to another directory"
        )
    while True:
        try:
            copy(stage, directory, replace=True)
            return LocalStore(str(directory))
        except DirectoryInUseError:
            # Another process is copying; it cannot take longer than we would.
            time.sleep(_LOOK_SECONDS)


def forget(stage: Store) -> None:
    """Remove the copy of a stage that `near` has made."""
    if stage.is_remote:
        shutil.rmtree(_directory_of(stage), ignore_errors=True)


def _directory_of(stage: Store) -> Path:
    return Path(tempfile.gettempdir()) / f"headrace-stage-{os.getuid()}-{checksum(stage.name.encode())}"


def gather_shard(stage: Store, out: Store, start: int, stop: int, seed: int) -> ShardEntry:
    """Write the records of positions [start, stop)."""
    dataset = Dataset(StoredSource(stage))
    builder = ShardBuilder(dataset.fields)
    for first in range(start, stop, _RECORDS_AT_ONCE):
        positions = np.arange(first, min(first + _RECORDS_AT_ONCE, stop))
        builder.append(_columns(dataset, permute(positions, len(dataset), seed)))
    return builder.write(out)


def _columns(dataset: Dataset, records: NDArray[np.int64]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for name, values in dataset.batch(records).items():
        if dataset.fields[name].kind is FieldKind.BYTES:
            pieces = [np.frombuffer(item, dtype=np.uint8) for item in values]
            columns[name] = Ragged.from_items(pieces, np.uint8)
        else:
            columns[name] = values
    return columns


def shuffled_ranges(records: int, payload_bytes: int, shard_bytes: int) -> list[tuple[int, int]]:
    """Ranges of positions that give shards of about `shard_bytes` each."""
    count = max(1, min(records, -(-payload_bytes // shard_bytes)))
    bounds = [records * number // count for number in range(count + 1)]
    return list(itertools.pairwise(bounds))
