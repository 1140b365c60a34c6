"""What a dataset holds, in a few numbers from the manifest and the stored histograms; no record is read.

Length statistics are weighted by the histogram. With lengths [2 5] and counts [3 1], the lengths are 2 2 2 5:
mean 2.75, p50 2, p90 5. A percentile is always a length that occurs: the smallest one that at
least p percent of the records do not exceed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.dataset.dataset import Dataset, Histogram
from headrace.dataset.neighbour import NeighbourSource
from headrace.dataset.stored import StoredSource
from headrace.errors import FieldError
from headrace.format.fields import FieldKind
from headrace.format.manifest import MANIFEST_NAME
from headrace.pack.best_fit import plan_best_fit
from headrace.pack.overlong import cut_overlong

PERCENTILES = (50, 90, 99)
ROW_LENGTHS = (512, 2048, 8192)


@dataclass(frozen=True)
class Bucket:
    """Records with `low <= length <= high`."""

    low: int
    high: int
    records: int


@dataclass(frozen=True)
class LengthSummary:
    records: int
    elements: int
    min: int
    mean: float
    percentiles: Mapping[int, int]
    max: int
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class PackingSummary:
    """How full rows of `seq_len` tokens would be: packed by best fit, and with one document (or rest) per row."""

    seq_len: int
    rows: int
    best_fit: float
    padded: float


@dataclass(frozen=True)
class StoredSize:
    file: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    name: str
    records: int
    tokens: int | None
    fields: Mapping[str, str]
    elements: Mapping[str, int]
    files: tuple[StoredSize, ...]
    parts: int
    lengths: Mapping[str, LengthSummary | None]
    """For each ragged field; None if there are no records."""
    packing: tuple[PackingSummary, ...]
    """How the token field packs at common row lengths."""
    tokenizer: Mapping[str, Any] | None
    settings: Mapping[str, Any] | None
    written_by: str
    fingerprint: str

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def summarize(dataset: Dataset, buckets: int = 12) -> Summary:
    source, manifest = dataset.source, dataset.manifest
    ragged = [name for name, field in dataset.fields.items() if field.kind is FieldKind.RAGGED]
    return Summary(
        name=source.name,
        records=len(dataset),
        tokens=_tokens(dataset),
        fields={name: field.notation for name, field in dataset.fields.items()},
        elements=dataset.num_elements,
        files=tuple(stored_files(dataset)),
        parts=len(source.part_records if manifest is None else manifest.shards),
        lengths={name: summarize_lengths(dataset.length_histogram(name), buckets) for name in ragged},
        packing=_packing(dataset),
        tokenizer=manifest.tokenizer if manifest else None,
        settings=manifest.settings if manifest else None,
        written_by=manifest.written_by if manifest else "",
        fingerprint=dataset.fingerprint,
    )


def _packing(dataset: Dataset) -> tuple[PackingSummary, ...]:
    if not _tokens(dataset):
        return ()
    histogram = dataset.length_histogram()
    return tuple(summarize_packing(histogram, seq_len) for seq_len in ROW_LENGTHS)


def summarize_packing(histogram: Histogram, seq_len: int) -> PackingSummary:
    """How all documents of a non-empty histogram pack; over-long ones are split into full rows and a rest."""
    cut = cut_overlong(*histogram, seq_len)
    packed = plan_best_fit(cut.lengths, cut.counts, seq_len)
    rows = cut.full_rows + packed.rows
    padded_rows = cut.full_rows + int(cut.counts.sum())
    tokens = cut.full_rows * seq_len + packed.tokens
    return PackingSummary(seq_len, rows, tokens / (rows * seq_len), tokens / (padded_rows * seq_len))


def _tokens(dataset: Dataset) -> int | None:
    try:
        return dataset.num_tokens
    except FieldError:
        return None


def stored_files(dataset: Dataset) -> list[StoredSize]:
    """The files of a dataset with their sizes; empty for arrays in RAM."""
    source = dataset.source
    if isinstance(source, NeighbourSource):
        return [StoredSize(file, size) for file, size in source.file_bytes.items()]
    if isinstance(source, StoredSource):
        # Two shards of the same content are one file.
        sizes = {stored.file: stored.bytes for stored in source.manifest.files}
        sizes[MANIFEST_NAME] = source.store.status(MANIFEST_NAME).bytes
        return [StoredSize(file, size) for file, size in sizes.items()]
    return []


def summarize_lengths(histogram: Histogram, buckets: int = 12) -> LengthSummary | None:
    """Statistics of a histogram (distinct lengths, counts); None if it is empty."""
    lengths, counts = (np.asarray(array).astype(np.int64) for array in histogram)
    records = int(counts.sum())
    if not records:
        return None
    # Python integers: the sum of all lengths may exceed 2^63 in a forged histogram, and must not wrap.
    elements = sum(length * count for length, count in zip(lengths.tolist(), counts.tolist(), strict=True))
    return LengthSummary(
        records=records,
        elements=elements,
        min=int(lengths[0]),
        mean=elements / records,
        percentiles={percent: percentile((lengths, counts), percent) for percent in PERCENTILES},
        max=int(lengths[-1]),
        buckets=tuple(log_buckets((lengths, counts), buckets)),
    )


def percentile(histogram: Histogram, percent: int) -> int:
    """The smallest length that at least `percent` percent of the records do not exceed."""
    lengths, counts = histogram
    ends = np.cumsum(counts)
    rank = max(1, -(-int(ends[-1]) * percent // 100))
    return int(lengths[np.searchsorted(ends, rank)])


def log_buckets(histogram: Histogram, buckets: int) -> list[Bucket]:
    """At most `buckets` ranges of lengths that hold all records, evenly spaced on a logarithmic scale.

    Lengths are whole numbers, so narrow ranges are merged: 1 to 8 in six buckets are 1, 2, 3, 4-5, 6-8.
    Length 0 has its own bucket.
    """
    lengths, counts = (np.asarray(array).astype(np.int64) for array in histogram)
    present = lengths[counts > 0]
    if not len(present):
        return []
    shortest, longest = int(present[0]), int(present[-1])
    zero = [0] if shortest == 0 else []
    low = int(present[1]) if zero and len(present) > 1 else max(shortest, 1)
    edges = sorted({*zero, *_edges(low, longest, max(1, buckets - len(zero)))} if longest else {0})
    ends = [*(edge - 1 for edge in edges[1:]), longest]
    ends[0] = 0 if zero else ends[0]
    running = np.concatenate([[0], np.cumsum(counts)])
    at = running[np.searchsorted(lengths, [*edges, longest + 1])]
    return [Bucket(a, b, int(n)) for a, b, n in zip(edges, ends, np.diff(at).tolist(), strict=True)]


def _edges(low: int, high: int, buckets: int) -> list[int]:
    ratio = (high + 1) / low
    return [min(max(low, round(low * ratio ** (step / buckets))), high) for step in range(buckets)]
