"""Documents packed into rows of 2,048 tokens with their boundaries, 32 rows a batch.

The documents are the blocks of Python's standard library, cut where its style asks for two empty lines: functions,
classes and module heads, as bytes. `headrace.build` makes Headrace's dataset from the source files themselves; the
peers get the same tokens as a flat file with offsets. Those longer than a row are cut beforehand for the peers, which
would refuse or truncate them; Headrace cuts them itself.

MosaicML Streaming, litdata, webdataset and torch's loaders do not pack documents, so they are not here.
"""

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peer import Peer

SEQ_LEN, BATCH_SIZE = 2048, 32
GRAIN_BINS = 128
"""Rows that grain fills at the same time: more are fuller rows and more time for each document."""


def make(folder: Path, most_bytes: int) -> None:
    import headrace

    folder.mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    sources, size = [], 0
    for path in sorted(library.rglob("*.py")):
        if "site-packages" in path.parts or not path.stat().st_size:
            continue
        sources.append(str(path))
        size += path.stat().st_size
        if size > most_bytes:
            break
    out = folder / "headrace"
    headrace.build(sources, out=out, tokenizer="bytes", split="separator", separator="\n\n\n", workers=2)
    data = headrace.open(out)
    documents = [np.asarray(data[number]["tokens"]) for number in range(len(data))]
    np.concatenate(documents).astype(np.uint16).tofile(folder / "tokens.bin")
    pieces = [_piece_lengths(len(document)) for document in documents]
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(np.concatenate(pieces))]))


def _piece_lengths(length: int) -> Any:
    full, rest = divmod(length, SEQ_LEN)
    return np.array([SEQ_LEN] * full + [rest] * bool(rest), np.int64)


class Documents:
    """Document i as uint16; those longer than a row are several."""

    def __init__(self, folder: Path) -> None:
        self._tokens = np.asarray(np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r"))
        self._offsets = np.load(folder / "offsets.npy")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, document: int) -> Any:
        return self._tokens[self._offsets[document] : self._offsets[document + 1]]


class _Source(Documents):
    def __getitem__(self, document: int) -> Any:
        return {"tokens": super().__getitem__(int(document))}


class Whole:
    """Batches with all of their fields, as the others give them; a Loader would leave out what is not used."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(batch) for batch in self._loader)


def _headrace(make_loader: Any, folder: Path, workers: int, once: bool) -> Whole:
    more: dict[str, Any] = {"drop_last": False, "epochs": 1} if once else {"epochs": None}
    if not workers:
        more["prefetch"] = 0
    loader = make_loader(
        folder / "headrace", seq_len=SEQ_LEN, batch_size=BATCH_SIZE, packing="best-fit", **more
    )
    return Whole(loader)


def headrace_torch(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    import headrace.torch

    return _headrace(headrace.torch.Loader, folder, workers, once)


def _grain(packer: str, folder: Path, workers: int, once: bool) -> Iterable[Any]:
    import grain
    import grain.experimental

    # Documents are slices of a map: its documentation advises no threads for data in memory.
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    documents = grain.MapDataset.source(_Source(folder)).shuffle(seed=0)
    documents = documents if once else documents.repeat()
    packed = getattr(grain.experimental, packer)(
        documents.to_iter_dataset(reading), length_struct={"tokens": SEQ_LEN}, num_packing_bins=GRAIN_BINS
    )
    batches = packed.batch(BATCH_SIZE, drop_remainder=not once).map(_widened)
    return batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)) if workers else batches


def _widened(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "tokens": batch["tokens"].astype(np.int64)}


def grain_best_fit(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    return _grain("BestFitPackIterDataset", folder, workers, once)


def grain_first_fit(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    return _grain("FirstFitPackIterDataset", folder, workers, once)


def trl_packed(folder: Path, workers: int, once: bool) -> Iterable[Any]:
    """As its SFTTrainer does with packing=True: packs all beforehand, then batches without padding."""
    import datasets
    import pyarrow as pa
    from torch.utils.data import DataLoader
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    datasets.disable_progress_bars()
    tokens = np.fromfile(folder / "tokens.bin", np.uint16)
    column = pa.LargeListArray.from_arrays(np.load(folder / "offsets.npy"), pa.array(tokens))
    packed = pack_dataset(datasets.Dataset(pa.table({"input_ids": column})), SEQ_LEN, strategy="bfd")
    return DataLoader(
        packed,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=workers,
        drop_last=not once,
        persistent_workers=workers > 0,
        collate_fn=DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    )


def segments(batch: Any) -> Iterator[Any]:
    """Every document (or piece of one) of a batch, whoever made it."""
    if "cu_seq_lens_q" in batch:
        bounds = batch["cu_seq_lens_q"].tolist()
        flat = batch["input_ids"][0].numpy()
        yield from (flat[first:last] for first, last in zip(bounds, bounds[1:], strict=False))
        return
    own = "segment_ids" in batch
    tokens = np.asarray(batch["tokens"])
    numbers = np.asarray(batch["segment_ids" if own else "tokens_segment_ids"])
    for row, marks in zip(tokens, numbers, strict=True):
        for number in range(1, int(marks.max()) + 1):
            yield row[marks == number]


def rows_and_dtype(batch: Any) -> tuple[int, str]:
    if "cu_seq_lens_q" in batch:
        return 0, str(batch["input_ids"].dtype)
    return len(batch["tokens"]), str(batch["tokens"].dtype)


GRAIN = (
    "tokens, segment ids and positions as NumPy arrays; no labels, no cu_seqlens; fills 128 rows at a time"
)
PEERS = {
    "Headrace Loader": Peer(
        start=headrace_torch,
        needs=("headrace", "torch"),
        modules=("headrace.torch",),
        note="best fit over all documents; tokens, labels, positions, segment ids, loss mask and cu_seqlens",
        quick=2,
    ),
    "grain, best fit": Peer(start=grain_best_fit, needs=("grain",), modules=("grain",), note=GRAIN),
    "grain, first fit": Peer(start=grain_first_fit, needs=("grain",), modules=("grain",), note=GRAIN),
    "TRL, best fit": Peer(
        start=trl_packed,
        needs=("trl", "datasets", "torch"),
        modules=("trl", "datasets", "trl.trainer.sft_trainer"),
        note="packs everything before the first batch, 1,000 documents at a time; rows are then laid end to end, so "
        "that batches have no padding but no fixed shape; padding is that of its rows",
    ),
}
REFERENCE = "Headrace Loader, 2 workers"
