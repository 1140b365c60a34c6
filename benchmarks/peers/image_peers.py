"""Images with a transform that costs: JPEG files of 500 x 375 decoded and resized to 224 x 224 by Pillow, 32 a batch.

Everybody calls the same `decode`. SPDL's own decoder needs FFmpeg's libraries on the machine; without them it is
left out, and SPDL's DataLoader runs Pillow, in 2 threads like the others and not in its default 8.
"""

import io
import multiprocessing
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peer import Peer

SIZE, STORED, BATCH_SIZE = 224, (500, 375), 32
EPOCH = 4096
"""Entries of an epoch: the files come several times in it, so that no epoch ends while it is measured."""


def make(folder: Path, images: int) -> None:
    from PIL import Image

    from headrace import Writer

    folder.mkdir()
    random_numbers = np.random.default_rng(0)
    with Writer(folder / "headrace", {"image": "bytes", "label": "int64"}) as writer:
        stored = []
        for number in range(images):
            # Coarse noise made larger: smooth areas and edges, so that the files are as large as photographs.
            coarse = Image.fromarray(random_numbers.integers(0, 256, (40, 53, 3), dtype=np.uint8))
            coarse.resize(STORED, Image.Resampling.BICUBIC).save(folder / f"{number:05d}.jpg", quality=90)
            stored.append((folder / f"{number:05d}.jpg").read_bytes())
        for entry in range(entries(images)):
            writer.write({"image": stored[entry % images], "label": entry})


def entries(images: int) -> int:
    return EPOCH if images >= 256 else 4 * images


def paths_of(folder: Path) -> list[str]:
    """Entry i of an epoch; entry and file have the same number modulo the number of files."""
    files = sorted(map(str, folder.glob("*.jpg")))
    return [files[entry % len(files)] for entry in range(entries(len(files)))]


def decode(content: bytes) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(content)).convert("RGB")
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR))


class Images:
    """The usual map-style dataset of files: (image, number of the entry)."""

    def __init__(self, folder: Path) -> None:
        self._paths = paths_of(folder)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, entry: int) -> Any:
        return decode(Path(self._paths[entry]).read_bytes()), entry


def _as_loader(make_loader: Any, folder: Path, count: int, **more: Any) -> Any:
    return make_loader(
        Images(folder),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=count,
        persistent_workers=count > 0,
        **more,
    )


def torch_loader(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return _as_loader(DataLoader, folder, workers)


def drop_in(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    from headrace.torch import DataLoader

    return _as_loader(DataLoader, folder, workers)


def drop_in_threads(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    from headrace.torch import DataLoader

    return _as_loader(DataLoader, folder, workers, worker_kind="thread")


def decode_record(sample: dict[str, Any]) -> dict[str, Any]:
    return {"image": decode(bytes(sample["image"])), "label": sample["label"]}


class _Pairs:
    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch.image, batch.label


def _loader(folder: Path, once: bool, processes: int) -> Iterable[Any]:
    import headrace.torch

    loader = headrace.torch.Loader(folder / "headrace", batch_size=BATCH_SIZE, epochs=1 if once else None)
    return _Pairs(loader.map(decode_record, processes=processes))


def loader_threads(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    return _loader(folder, once, 0)


def loader_processes(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    return _loader(folder, once, workers)


class _Shuffled:
    """SPDL's source: the entries of an epoch, in another order each time it is iterated."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __iter__(self) -> Iterator[tuple[str, int]]:
        numbers = list(range(len(self._paths)))
        random.shuffle(numbers)
        return ((self._paths[number], number) for number in numbers)


def _spdl(folder: Path, workers: int, one: Any, collate: Any) -> Iterable[Any]:
    from spdl.dataloader import DataLoader

    return DataLoader(
        _Shuffled(paths_of(folder)),
        preprocessor=one,
        batch_size=BATCH_SIZE,
        aggregator=collate,
        num_threads=workers,
    )


def spdl_pillow(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    import torch

    def one(item: tuple[str, int]) -> tuple[Any, int]:
        return decode(Path(item[0]).read_bytes()), item[1]

    def collate(items: list[tuple[Any, int]]) -> Any:
        return torch.from_numpy(np.stack([image for image, _ in items])), torch.tensor([n for _, n in items])

    return _spdl(folder, workers, one, collate)


def spdl_own(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    import spdl.io
    import torch

    described = spdl.io.get_video_filter_desc(scale_width=SIZE, scale_height=SIZE, pix_fmt="rgb24")
    # Its pipeline only logs an image that it cannot decode: without FFmpeg there would be nothing but silence.
    spdl.io.decode_packets(spdl.io.demux_image(paths_of(folder)[0]), filter_desc=described)

    def one(item: tuple[str, int]) -> tuple[Any, int]:
        return spdl.io.decode_packets(spdl.io.demux_image(item[0]), filter_desc=described), item[1]

    def collate(items: list[tuple[Any, int]]) -> Any:
        frames = spdl.io.to_torch(spdl.io.convert_frames([frame for frame, _ in items]))
        return frames, torch.tensor([number for _, number in items])

    return _spdl(folder, workers, one, collate)


def _decode_on(paths: list[str], done: Any) -> None:
    # One large block that is freed lets the C library keep freed memory, as importing torch does for the loaders;
    # without it every image pays for 334 new pages, a quarter of its time.
    np.ones(30 * 2**20, np.uint8)
    while True:
        for path in paths:
            decode(Path(path).read_bytes())
        done.release()


def decoding_alone(folder: Path, workers: int, once: bool) -> Iterator[Any]:
    """Two processes that decode and hand nothing over; a 'batch' is there when one has decoded 32 more images."""
    context = multiprocessing.get_context("fork")
    done, paths = context.Semaphore(0), paths_of(folder)
    crew = [
        context.Process(target=_decode_on, args=(paths[first : first + BATCH_SIZE], done), daemon=True)
        for first in (0, BATCH_SIZE)
    ]
    for process in crew:
        process.start()
    try:
        nothing = np.zeros((BATCH_SIZE, SIZE, SIZE, 3), np.uint8)
        while done.acquire():
            yield nothing, np.arange(BATCH_SIZE)
    finally:
        for process in crew:
            process.terminate()
            process.join()


PILLOW = ("pillow",)
PEERS = {
    "Headrace DataLoader, 2 processes": Peer(
        start=drop_in,
        needs=("headrace", "torch", *PILLOW),
        modules=("headrace.torch", "PIL.Image"),
        workers=(2,),
        note="the drop-in, on the same dataset as torch DataLoader",
    ),
    "Headrace DataLoader, 2 threads": Peer(
        start=drop_in_threads,
        needs=("headrace", "torch", *PILLOW),
        modules=("headrace.torch", "PIL.Image"),
        workers=(2,),
        note="the drop-in with worker_kind='thread'",
        quick=2,
    ),
    "Headrace Loader.map, 2 threads": Peer(
        start=loader_threads,
        needs=("headrace", "torch", *PILLOW),
        modules=("headrace.torch", "PIL.Image"),
        workers=(2,),
        note="the files as records of a Headrace dataset",
    ),
    "Headrace Loader.map, 2 processes": Peer(
        start=loader_processes,
        needs=("headrace", "torch", *PILLOW),
        modules=("headrace.torch", "PIL.Image"),
        workers=(2,),
        note="the files as records of a Headrace dataset",
    ),
    "torch DataLoader": Peer(
        start=torch_loader,
        needs=("torch", *PILLOW),
        modules=("torch.utils.data", "PIL.Image"),
        note="workers are processes",
    ),
    "SPDL, 2 threads, Pillow": Peer(
        start=spdl_pillow,
        needs=("spdl-core", "torch", *PILLOW),
        modules=("spdl.dataloader", "torch", "PIL.Image"),
        workers=(2,),
        note="batches in order of completion, its default",
    ),
    "SPDL, 2 threads, own decoder": Peer(
        start=spdl_own,
        needs=("spdl-core", "spdl-io", "torch"),
        modules=("spdl.dataloader", "spdl.io", "torch"),
        workers=(2,),
        note="decodes and resizes with FFmpeg, so its pixels differ a little",
    ),
    "limit: two processes only decode": Peer(
        start=decoding_alone,
        needs=PILLOW,
        modules=("PIL.Image",),
        workers=(2,),
        permutes=False,
        limit=True,
        note="nothing is batched or handed over",
    ),
}
REFERENCE = "Headrace DataLoader, 2 threads"
