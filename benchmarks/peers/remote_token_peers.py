"""Rows of tokens from a bucket: each peer as its documentation sets it up, giving batches (32, 2049) of int64."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from remote_formats import rows_in, write_parts
from remote_peer import (
    BATCH_SIZE,
    Batches,
    Place,
    RemotePeer,
    allow_http,
    forget_connections,
    raw_counts,
    storage_options,
)
from token_data import SEQ_LEN, write_litdata, write_mds


def headrace_loader(place: Place, workers: int) -> Batches:
    import headrace.torch

    loader = headrace.torch.Loader(
        place.address, seq_len=SEQ_LEN, batch_size=BATCH_SIZE, packing="windows", fields=("tokens",)
    )
    return Batches(loader, lambda batch: batch.tokens)


def mosaic(place: Place, workers: int) -> Batches:
    import torch
    from streaming import StreamingDataLoader, StreamingDataset

    class Tokens(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return torch.from_numpy(super().__getitem__(at)["tokens"].astype(np.int64))

    dataset = Tokens(remote=place.address, local=str(place.cache), shuffle=True, batch_size=BATCH_SIZE)
    forget_connections(dataset)
    loader = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers, drop_last=True)
    return Batches(loader, lambda batch: batch)


def lit(place: Place, workers: int) -> Batches:
    import litdata

    allow_http()
    dataset = litdata.StreamingDataset(
        input_dir=place.address,
        cache_dir=str(place.cache),
        item_loader=litdata.TokensLoader(block_size=SEQ_LEN),
        shuffle=True,
        drop_last=True,
        storage_options=storage_options(place),
    )
    loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers, drop_last=True)
    return Batches(loader, lambda batch: batch.long())


def _content(reader: Any) -> bytes:
    found: bytes = reader.read()
    return found


def connector(place: Place, workers: int) -> Batches:
    import torch
    from s3torchconnector import S3ClientConfig, S3IterableDataset
    from torch.utils.data import DataLoader, IterableDataset

    parts = S3IterableDataset.from_prefix(
        f"{place.address}/",
        region=place.region,
        endpoint=place.endpoint,
        transform=_content,
        s3client_config=S3ClientConfig(force_path_style=True),
        enable_sharding=True,
    )

    class Rows(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            for content in parts:
                for row in rows_in(content):
                    yield torch.from_numpy(row.astype(np.int64))

    loader = DataLoader(Rows(), batch_size=BATCH_SIZE, num_workers=workers, drop_last=True)
    return Batches(loader, lambda batch: batch)


PEERS = {
    "Headrace Loader": RemotePeer(
        start=headrace_loader,
        reads="headrace",
        needs=("headrace", "torch", "obstore"),
        modules=("headrace.torch",),
        workers=(2,),
        note="the order by units, its default for remote data; nothing is cached; every byte is checked",
        quick=2,
    ),
    "MosaicML Streaming": RemotePeer(
        start=mosaic,
        reads="mds",
        needs=("mosaicml-streaming", "torch"),
        modules=("streaming",),
        write=write_mds,
        note="an empty cache, which it cannot do without; shuffles shards and, with its default py1e, within blocks of "
        "samples; its connection had to be closed before its workers are started",
    ),
    "litdata": RemotePeer(
        start=lit,
        reads="litdata",
        needs=("litdata", "torch"),
        modules=("litdata",),
        write=write_litdata,
        note="an empty cache, which it cannot do without; shuffles chunks and, in a chunk, windows of 256 rows; its "
        "client had to be allowed HTTP without TLS",
    ),
    "s3torchconnector": RemotePeer(
        start=connector,
        reads="parts",
        needs=("s3torchconnector", "torch"),
        modules=("s3torchconnector", "torch.utils.data"),
        write=write_parts,
        resumes=False,
        note="S3IterableDataset over files of 17 MB, which it advises instead of small objects; does not shuffle, and "
        "has no state: it resumes by reading what comes before",
    ),
    "limit: parallel ranged GETs": RemotePeer(
        start=lambda place, workers: raw_counts(place, "tokens"),
        reads="headrace",
        needs=("headrace", "obstore"),
        modules=("remote_reads",),
        workers=(0,),
        limit=True,
        note="ranges of 4 MB, eight at a time, by Headrace's client; nothing is checked or made of them",
    ),
}
REFERENCE = "Headrace Loader"
