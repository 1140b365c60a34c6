"""Shuffled rows of tokens: each peer as its documentation sets it up, giving batches (32, 2049) of int64."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peer import Peer
from token_data import BATCH_SIZE, SEQ_LEN, rows_of, write_arrow, write_litdata, write_mds, write_tars


class Rows:
    """The usual map-style dataset over a memory map, with plain slices."""

    def __init__(self, folder: Path) -> None:
        self._rows = rows_of(folder)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        import torch

        return torch.from_numpy(self._rows[row].astype(np.int64))


def _as_loader(make: Any, folder: Path, count: int, **more: Any) -> Any:
    return make(
        Rows(folder),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=count,
        drop_last=True,
        persistent_workers=count > 0,
        **more,
    )


def torch_loader(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return _as_loader(DataLoader, folder, workers)


def stateful_loader(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return _as_loader(StatefulDataLoader, folder, workers)


def drop_in(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    from headrace.torch import DataLoader

    return _as_loader(DataLoader, folder, workers)


def drop_in_threads(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    from headrace.torch import DataLoader

    return _as_loader(DataLoader, folder, workers, worker_kind="thread")


def _tokens_of(loader: Any) -> Iterator[Any]:
    for batch in loader:
        yield batch.tokens


class Epochs:
    """The tokens of a Loader's batches."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return _tokens_of(self._loader)


def _settings(workers: int, once: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"seq_len": SEQ_LEN, "batch_size": BATCH_SIZE, "fields": ("tokens",)}
    settings |= {"packing": "windows", "epochs": 1 if once else None}
    return settings if workers else {**settings, "prefetch": 0}


def headrace_torch(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    import headrace.torch

    return Epochs(headrace.torch.Loader(folder / "headrace", **_settings(workers, once)))


def headrace_numpy(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    import headrace

    return Epochs(headrace.Loader(folder / "headrace", **_settings(workers, once)))


def mosaic(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    import torch
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    class Tokens(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return torch.from_numpy(super().__getitem__(at)["tokens"].astype(np.int64))

    dataset = Tokens(local=str(folder / "mds"), shuffle=True, batch_size=BATCH_SIZE)
    return DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
    )


class Widened:
    """A loader's batches as int64."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch.long()


def lit(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    import litdata

    dataset = litdata.StreamingDataset(
        input_dir=str(folder / "litdata"),
        item_loader=litdata.TokensLoader(block_size=SEQ_LEN),
        shuffle=True,
        drop_last=True,
    )
    return Widened(
        litdata.StreamingDataLoader(
            dataset,
            batch_size=BATCH_SIZE,
            num_workers=workers,
            drop_last=True,
            persistent_workers=workers > 0,
        )
    )


class _Source:
    """Rows for grain, which wants a `__getitem__` and a `__len__`."""

    def __init__(self, folder: Path) -> None:
        self._rows = rows_of(folder)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        return self._rows[row]


def _widen(batch: Any) -> Any:
    return batch.astype(np.int64)


def grain_rows(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    import grain

    # Its documentation advises no threads for data that is in memory.
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    rows = grain.MapDataset.source(_Source(folder)).shuffle(seed=0)
    rows = rows if once else rows.repeat()
    batches = rows.batch(BATCH_SIZE, drop_remainder=True).map(_widen).to_iter_dataset(reading)
    return batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)) if workers else batches


class _Named:
    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch["tokens"]


def hugging_face(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    from datasets import load_from_disk
    from torch.utils.data import DataLoader

    rows = load_from_disk(folder / "arrow").with_format("torch")
    return _Named(
        DataLoader(
            rows,
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=workers,
            drop_last=True,
            persistent_workers=workers > 0,
        )
    )


def _row_of(sample: Any) -> Any:
    return sample[0]


def _stacked(rows: list[Any]) -> Any:
    import torch

    return torch.from_numpy(np.stack(rows).astype(np.int64))


def web(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    import webdataset as wds

    shards = sorted(map(str, (folder / "wds").glob("*.tar")))
    rows = (
        wds.WebDataset(shards, shardshuffle=len(shards))
        .shuffle(1000)
        .decode()
        .to_tuple("tokens.npy")
        .map(_row_of)
    )
    batches = rows.batched(BATCH_SIZE, partial=False, collation_fn=_stacked)
    return wds.WebLoader(batches, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def nano(folder: Path, workers: int, once: bool) -> Iterator[Any]:
    """`get_batch`: the map is made anew for each batch, as nanoGPT does against a leak."""
    import torch

    length = SEQ_LEN - 1
    while True:
        data = np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r")
        places = torch.randint(len(data) - length, (BATCH_SIZE,))
        x = torch.stack([torch.from_numpy(data[i : i + length].astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in places])
        yield x, y


def plain_copy(folder: Path, workers: int, once: bool) -> Iterator[Any]:
    """Batches gathered and widened by NumPy into one buffer, the places drawn beforehand: no loader around it."""
    rows, out = rows_of(folder), np.empty((BATCH_SIZE, SEQ_LEN), np.int64)
    drawn = np.random.default_rng(0).integers(0, len(rows), (1024, BATCH_SIZE))
    while True:
        for places in drawn:
            out[:] = rows[places]
            yield out


def memory_copy(folder: Path, workers: int, once: bool) -> Iterator[Any]:
    """Finished int64 batches copied into one buffer, from more of them than the processor's caches hold."""
    rows = rows_of(folder)
    ready = rows[: min(len(rows), 128 * BATCH_SIZE) // BATCH_SIZE * BATCH_SIZE].astype(np.int64)
    batches = list(ready.reshape(-1, BATCH_SIZE, SEQ_LEN))
    random.Random(0).shuffle(batches)
    out = np.empty((BATCH_SIZE, SEQ_LEN), np.int64)
    while True:
        for batch in batches:
            out[:] = batch
            yield out


TORCH = ("torch",)
PEERS = {
    "Headrace Loader": Peer(
        start=headrace_torch,
        needs=("headrace", "torch"),
        modules=("headrace.torch",),
        note="global shuffle; workers are threads, 0 makes each batch in the loop",
        quick=2,
    ),
    "Headrace Loader, NumPy arrays": Peer(
        start=headrace_numpy,
        needs=("headrace",),
        modules=("headrace",),
        workers=(2,),
        note="NumPy arrays, torch is not imported; global shuffle; 2 threads",
    ),
    "Headrace DataLoader": Peer(
        start=drop_in,
        needs=("headrace", "torch"),
        modules=("headrace.torch",),
        note="the drop-in, on the same dataset as torch DataLoader; workers are processes",
    ),
    "Headrace DataLoader, 2 threads": Peer(
        start=drop_in_threads,
        needs=("headrace", "torch"),
        modules=("headrace.torch",),
        workers=(2,),
        note="the drop-in with worker_kind='thread'",
    ),
    "torch DataLoader": Peer(
        start=torch_loader, needs=TORCH, modules=("torch.utils.data",), note="global shuffle", quick=0
    ),
    "torchdata StatefulDataLoader": Peer(
        start=stateful_loader,
        needs=("torch", "torchdata"),
        modules=("torchdata.stateful_dataloader",),
        note="global shuffle; a snapshot each step, its default",
    ),
    "MosaicML Streaming": Peer(
        start=mosaic,
        needs=("mosaicml-streaming", "torch"),
        modules=("streaming",),
        prepare=write_mds,
        note="shuffles shards and, with its default py1e, within blocks of samples; stored as uint16, widened for each "
        "row; runs with a newer NumPy than it asks for and a stand-in for torchvision",
    ),
    "litdata": Peer(
        start=lit,
        needs=("litdata", "torch"),
        modules=("litdata",),
        prepare=write_litdata,
        note="shuffles chunks and, in a chunk, windows of 256 rows; gives the stored uint16, widened once a batch",
    ),
    "grain": Peer(
        start=grain_rows,
        needs=("grain",),
        modules=("grain",),
        note="NumPy arrays, torch is not imported; global shuffle; no reading threads, as advised for data in memory",
    ),
    "HF datasets": Peer(
        start=hugging_face,
        needs=("datasets", "torch"),
        modules=("datasets", "torch.utils.data"),
        prepare=write_arrow,
        note="global shuffle, by the DataLoader around it",
    ),
    "webdataset": Peer(
        start=web,
        needs=("webdataset", "torch"),
        modules=("webdataset",),
        prepare=write_tars,
        note="shuffles shards and within a buffer of 1,000 rows; gives the stored uint16, widened here once a batch",
    ),
    "nanoGPT get_batch": Peer(
        start=nano,
        needs=TORCH,
        modules=("torch",),
        workers=(0,),
        permutes=False,
        note="x and y of 2,048 tokens each, together the 2,049 of a row; no epochs: rows overlap and repeat",
    ),
    "plain copy of the rows": Peer(
        start=plain_copy,
        needs=(),
        modules=("numpy",),
        workers=(0,),
        permutes=False,
        limit=True,
        note="one thread, gathers and widens uint16 to int64, no loader around it",
    ),
    "limit: memory copy": Peer(
        start=memory_copy,
        needs=(),
        modules=("numpy",),
        workers=(0,),
        permutes=False,
        limit=True,
        quick=0,
        note="one thread copies finished int64 batches; that is 4 times the bytes that a widening copy reads",
    ),
}
REFERENCE = "Headrace Loader, 2 workers"
