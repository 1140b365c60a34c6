"""Tokens in a bucket and on the local disk, and which of their bytes an epoch needs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import headrace

MEAN_LENGTH = 1000
SHARD_BYTES = 64 * 2**20
FIELD = "tokens"


@dataclass(frozen=True)
class Made:
    tokens: int
    documents: int
    shards: int
    units: int
    epoch_bytes: int
    """What an epoch fetches: all tokens, and where each document begins."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make(folder: Path, megabytes: int) -> Made:
    """Documents of random lengths with a heavy tail, as uint16, in shards of 64 MB."""
    random = np.random.default_rng(0)
    left = megabytes * 10**6 // 2
    with headrace.Writer(folder, {FIELD: "uint16[*]"}, shard_bytes=SHARD_BYTES) as writer:
        while left > 0:
            lengths = _lengths(random, min(left, SHARD_BYTES // 2))
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            values = random.integers(0, 2**16, offsets[-1], dtype=np.uint16)
            writer.write_columns({FIELD: headrace.Ragged(values, offsets)})
            left -= len(values)
    dataset = headrace.open(folder, verify="reads")
    return Made(
        tokens=dataset.source.elements[FIELD],
        documents=len(dataset),
        shards=len(dataset.source.manifest.shards),
        units=dataset.source.units.count,
        epoch_bytes=sum(stop - start for _, start, stop in ranges_of(dataset)),
    )


def _lengths(random: Any, tokens: int) -> Any:
    """So many tokens as documents: half of them are shorter than about half the mean."""
    sigma = 1.15
    count = 2 + 2 * tokens // MEAN_LENGTH
    drawn = random.lognormal(np.log(MEAN_LENGTH) - sigma**2 / 2, sigma, count)
    ends = np.cumsum(np.clip(drawn, 1, 1e6).astype(np.int64))
    ends = np.append(ends[ends < tokens], tokens)
    return np.diff(ends, prepend=0)


def upload(folder: Path, place: str) -> None:
    """What `headrace copy` does, without its progress."""
    headrace.copy(folder, place)


def ranges_of(
    dataset: Any, most_bytes: int | None = None, field: str = FIELD
) -> Iterator[tuple[str, int, int]]:
    """The file, the first byte and the end of each stretch that an epoch needs, in pieces of at most so many bytes."""
    units = dataset.source.units
    for shard, entry in enumerate(dataset.source.manifest.shards):
        numbers = range(int(units.first_unit[shard]), int(units.first_unit[shard + 1]))
        for piece in (units.data_piece, units.offsets_piece):
            start = min(piece(number, field).blocks_start for number in numbers)
            stop = max(piece(number, field).blocks_stop for number in numbers)
            step = most_bytes or stop - start
            for begin in range(start, stop, step):
                yield entry.stored.file, begin, min(begin + step, stop)
