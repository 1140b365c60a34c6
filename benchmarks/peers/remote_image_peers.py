"""Images from a bucket, in random order where a peer can, not decoded: batches of 32 as lists of bytes, with labels."""

from typing import Any

from remote_formats import write_image_files, write_image_litdata, write_image_mds, write_image_tars
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


def headrace_loader(place: Place, workers: int) -> Batches:
    import headrace.torch

    loader = headrace.torch.Loader(place.address, batch_size=BATCH_SIZE)
    return Batches(loader, lambda batch: (batch.image, batch.label))


def _named(batch: dict[str, Any]) -> tuple[Any, Any]:
    return batch["image"], batch["label"]


def mosaic(place: Place, workers: int) -> Batches:
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        remote=place.address, local=str(place.cache), shuffle=True, batch_size=BATCH_SIZE
    )
    forget_connections(dataset)
    loader = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers, drop_last=True)
    return Batches(loader, _named)


def lit(place: Place, workers: int) -> Batches:
    import litdata

    allow_http()
    dataset = litdata.StreamingDataset(
        input_dir=place.address,
        cache_dir=str(place.cache),
        shuffle=True,
        drop_last=True,
        storage_options=storage_options(place),
    )
    loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers, drop_last=True)
    return Batches(loader, _named)


def _as_stream(reader: Any) -> dict[str, Any]:
    return {"url": reader.key, "stream": reader}


def _label_of(name: str) -> int:
    return int(name.rpartition("/")[2].partition(".")[0])


def connector_tars(place: Place, workers: int) -> Batches:
    from s3torchconnector import S3ClientConfig, S3IterableDataset
    from torch.utils.data import DataLoader, IterableDataset
    from webdataset.tariterators import tar_file_expander

    tars = S3IterableDataset.from_prefix(
        f"{place.address}/",
        region=place.region,
        endpoint=place.endpoint,
        transform=_as_stream,
        s3client_config=S3ClientConfig(force_path_style=True),
        enable_sharding=True,
    )

    class Members(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for member in tar_file_expander(tars):
                # After the last member of a tar file comes a note of its end.
                if "data" in member:
                    yield {"image": member["data"], "label": _label_of(member["fname"])}

    return Batches(DataLoader(Members(), batch_size=BATCH_SIZE, num_workers=workers, drop_last=True), _named)


def _as_record(reader: Any) -> dict[str, Any]:
    return {"image": reader.read(), "label": _label_of(reader.key)}


def connector_files(place: Place, workers: int) -> Batches:
    from s3torchconnector import S3ClientConfig, S3MapDataset
    from torch.utils.data import DataLoader

    files = S3MapDataset.from_prefix(
        f"{place.address}/",
        region=place.region,
        endpoint=place.endpoint,
        transform=_as_record,
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    loader = DataLoader(files, batch_size=BATCH_SIZE, shuffle=True, num_workers=workers, drop_last=True)
    return Batches(loader, _named)


CONNECTOR: dict[str, Any] = {
    "needs": ("s3torchconnector", "torch", "webdataset"),
    "modules": ("s3torchconnector", "torch.utils.data"),
    "resumes": False,
}
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
        write=write_image_mds,
        note="an empty cache, which it cannot do without; its connection had to be closed before its workers are "
        "started",
    ),
    "litdata": RemotePeer(
        start=lit,
        reads="litdata",
        needs=("litdata", "torch"),
        modules=("litdata",),
        write=write_image_litdata,
        note="an empty cache, which it cannot do without; its client had to be allowed HTTP without TLS",
    ),
    "s3torchconnector, tar files": RemotePeer(
        start=connector_tars,
        reads="tars",
        write=write_image_tars,
        note="S3IterableDataset over tar files of 32 MB; does not shuffle; has no state, and resumes by reading what "
        "comes before",
        **CONNECTOR,
    ),
    "s3torchconnector, an object each": RemotePeer(
        start=connector_files,
        reads="files",
        write=write_image_files,
        workers=(2,),
        note="2 workers; S3MapDataset, global shuffle; has no state: it resumes by reading what comes before",
        **CONNECTOR,
    ),
    "limit: parallel ranged GETs": RemotePeer(
        start=lambda place, workers: raw_counts(place, "image"),
        reads="headrace",
        needs=("headrace", "obstore"),
        modules=("remote_reads",),
        workers=(0,),
        limit=True,
        note="ranges of 4 MB, eight at a time, by Headrace's client; nothing is checked or made of them",
    ),
}
REFERENCE = "Headrace Loader"
