"""A dataset of several shards, each cut into several units, on a local disk and in a bucket."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.format import units
from headrace.store.address import open_store

LENGTHS = (5, 900, 64, 0, 3000, 1, 250, 64, 700, 40)
UNIT_BYTES = 20_000


def write_local(path: Path, records: int = 150) -> Path:
    """Documents with labels and images, in shards of about 60 kB."""
    rng = np.random.default_rng(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "UNIT_BYTES", UNIT_BYTES)
        fields = {"tokens": "uint16[*]", "label": "int64", "image": "bytes"}
        with headrace.Writer(path, fields, shard_bytes=60_000) as writer:
            for number in range(records):
                length = LENGTHS[number % len(LENGTHS)]
                tokens = rng.integers(0, 60_000, length).astype(np.uint16)
                writer.write({"tokens": tokens, "label": number, "image": rng.bytes(300 + number)})
    return path


def put(local: Path, place: str) -> str:
    """Copy a dataset to a bucket, the manifest last."""
    store = open_store(place)
    names = sorted(path.name for path in local.iterdir() if path.is_file())
    for name in (*(name for name in names if name != "headrace.json"), "headrace.json"):
        with store.pending(name) as pending:
            pending.file.write((local / name).read_bytes())
    return place


def same(sample: dict[str, Any]) -> dict[str, Any]:
    """A function for worker processes, which import it from here."""
    return sample
