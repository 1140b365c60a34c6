"""What `loading.py` compares a Loader with: each gives an endless iterator of batches over one file of tokens.

torch DataLoader     the usual map-style dataset over a memory map; for documents, a collator that lays them end
                     to end and says where each begins, written for speed
transformers         the same DataLoader with transformers' own `DataCollatorWithFlattening`
nanoGPT              its `get_batch`, which has no epochs: rows may overlap and repeat
grain                documents at random, packed by its best fit, batched

Documents longer than a row are cut beforehand, so every rival gets documents that fit. A rival whose packages
are not installed is left out.
"""

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NO_LABEL = -100
WITHOUT_END = 10**12
GRAIN_BINS = 128
"""Rows that grain fills at the same time: more are fuller rows and more time for each document."""


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Where a rival finds its data: a file of uint16 tokens, and the offsets of documents (an .npy file)."""

    tokens: Path
    offsets: Path
    seq_len: int
    batch_size: int

    @property
    def documents_a_batch(self) -> int:
        """As many as hold the tokens of a batch of full rows, on average."""
        offsets = np.load(self.offsets, mmap_mode="r")
        mean = int(offsets[-1]) / (len(offsets) - 1)
        return max(1, round(self.seq_len * self.batch_size / mean))


def installed(*packages: str) -> dict[str, str] | None:
    """Their versions, or None if one is missing."""
    try:
        return {package: importlib.metadata.version(package) for package in packages}
    except importlib.metadata.PackageNotFoundError:
        return None


class _Rows:
    """Row i of the usual map-style dataset."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self._tokens, self._seq_len = np.memmap(path, dtype=np.uint16, mode="r"), seq_len

    def __len__(self) -> int:
        return len(self._tokens) // self._seq_len

    def __getitem__(self, row: int) -> Any:
        import torch

        start = row * self._seq_len
        return torch.from_numpy(self._tokens[start : start + self._seq_len].astype(np.int64))


class _Documents:
    """Document i as a uint16 array; widening is left to the collator, which does it once a batch."""

    def __init__(self, source: Documents) -> None:
        # Plain arrays over the maps: slices of `np.memmap` itself cost three times as much.
        self._tokens = np.asarray(np.memmap(source.tokens, dtype=np.uint16, mode="r"))
        self._offsets = np.load(source.offsets)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, document: int) -> Any:
        return self._tokens[self._offsets[document] : self._offsets[document + 1]]


class _Listed(_Documents):
    """Document i as transformers wants it."""

    def __getitem__(self, document: int) -> Any:
        return {"input_ids": super().__getitem__(document).tolist()}


def _data_loader(dataset: Any, batch_size: int, workers: int, collate: Any = None) -> Iterator[Any]:
    from torch.utils.data import DataLoader, RandomSampler

    # One permutation after another without an end: no epoch ends, and no worker restarts, while it is measured.
    sampler = RandomSampler(dataset, num_samples=WITHOUT_END)
    return iter(
        DataLoader(
            dataset, batch_size, sampler=sampler, num_workers=workers, collate_fn=collate, drop_last=True
        )
    )


def torch_rows(path: Path, seq_len: int, batch_size: int, workers: int) -> Iterator[Any]:
    return _data_loader(_Rows(path, seq_len), batch_size, workers)


def nanogpt_rows(path: Path, seq_len: int, batch_size: int) -> Iterator[Any]:
    """Inputs of `seq_len - 1` tokens and the targets; the map is made anew each time, as nanoGPT does."""
    import torch

    length = seq_len - 1
    while True:
        data = np.memmap(path, dtype=np.uint16, mode="r")
        places = torch.randint(len(data) - length, (batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + length].astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in places])
        yield x, y


def flatten(documents: list[Any]) -> dict[str, Any]:
    """The batch as one long row: tokens, labels, positions, and the bounds that variable-length attention takes."""
    import torch

    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    tokens = np.concatenate(documents, dtype=np.int64)
    labels = tokens.copy()
    labels[bounds[:-1]] = NO_LABEL
    positions = np.arange(len(tokens)) - np.repeat(bounds[:-1].astype(np.int64), lengths)
    made = {"input_ids": tokens, "labels": labels, "position_ids": positions, "cu_seqlens": bounds}
    return {name: torch.from_numpy(array) for name, array in made.items()} | {
        "max_seqlen": int(lengths.max())
    }


def torch_flattened(source: Documents, workers: int) -> Iterator[Any]:
    return _data_loader(_Documents(source), source.documents_a_batch, workers, flatten)


def transformers_flattened(source: Documents, workers: int) -> Iterator[Any]:
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return _data_loader(_Listed(source), source.documents_a_batch, workers, collate)


class _GrainSource(_Documents):
    def __getitem__(self, document: int) -> Any:
        return {"tokens": super().__getitem__(int(document))}


def _widened(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "tokens": batch["tokens"].astype(np.int64)}


def grain_packed(source: Documents, workers: int) -> Iterator[Any]:
    """Tokens, segment ids and positions; grain makes no labels and no bounds."""
    import grain
    from grain.experimental import BestFitPackIterDataset

    # Documents are slices of a map in RAM: threads that read ahead only cost time here.
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    documents = grain.MapDataset.source(_GrainSource(source)).shuffle(seed=0).repeat()
    packed = BestFitPackIterDataset(
        documents.to_iter_dataset(reading),
        length_struct={"tokens": source.seq_len},
        num_packing_bins=GRAIN_BINS,
    )
    batches = packed.batch(source.batch_size).map(_widened)
    if workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iter(batches)


def filled_by_grain(batch: dict[str, Any]) -> int:
    """Tokens of a batch that are not padding: segments are numbered from 1."""
    return int(np.count_nonzero(batch["tokens_segment_ids"]))


@dataclass(frozen=True, kw_only=True)
class Rival:
    needs: tuple[str, ...]
    start: Callable[[], Iterator[Any]]
    count: Callable[[Any], int]
    """Tokens of a batch, padding left out."""


def row_rivals(path: Path, seq_len: int, batch_size: int) -> dict[str, Rival]:
    found = {
        f"torch DataLoader, {workers} workers": Rival(
            needs=("torch",),
            start=lambda workers=workers: torch_rows(path, seq_len, batch_size, workers),
            count=lambda rows: int(rows.numel()),
        )
        for workers in (0, 2)
    }
    found["nanoGPT get_batch, x and y"] = Rival(
        needs=("torch",),
        start=lambda: nanogpt_rows(path, seq_len, batch_size),
        count=lambda pair: int(pair[0].numel()),
    )
    return found


def packed_rivals(source: Documents) -> dict[str, Rival]:
    found = {}
    makers: tuple[tuple[str, tuple[str, ...], Any, Callable[[Any], int]], ...] = (
        ("torch DataLoader, flattening", ("torch",), torch_flattened, lambda b: int(b["input_ids"].numel())),
        (
            "transformers' collator",
            ("torch", "transformers"),
            transformers_flattened,
            lambda b: int(b["input_ids"].numel()),
        ),
        ("grain, best fit", ("grain",), grain_packed, filled_by_grain),
    )
    for name, needs, make, count in makers:
        for workers in (0, 2):
            found[f"{name}, {workers} workers"] = Rival(
                needs=needs, start=lambda make=make, workers=workers: make(source, workers), count=count
            )
    return found
