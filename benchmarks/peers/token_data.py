"""The same rows of tokens for everybody, and in the format that each peer's documentation advises.

tokens.bin   uint16, nanoGPT's format; also what the map-style datasets and grain read
headrace/    Headrace's shards
mds/ litdata/ arrow/ wds/   MosaicML's, litdata's, Hugging Face's and webdataset's own
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LEN, BATCH_SIZE = 2049, 32
SHARDS = 8


def make(folder: Path, rows: int) -> None:
    """`tokens.bin` and Headrace's shards."""
    from headrace import Ragged, Writer

    folder.mkdir()
    random, lengths = np.random.default_rng(0), _document_lengths(rows * SEQ_LEN)
    with (
        open(folder / "tokens.bin", "wb") as flat,
        Writer(folder / "headrace", {"tokens": "uint16[*]"}, shard_bytes=1) as writer,
    ):
        for part in np.array_split(lengths, SHARDS):
            offsets = np.concatenate([[0], np.cumsum(part)])
            values = random.integers(0, 50_000, offsets[-1], dtype=np.uint16)
            values.tofile(flat)
            writer.write_columns({"tokens": Ragged(values, offsets)})


def _document_lengths(tokens: int) -> Any:
    """Documents of about 1,000 tokens that end where the last row ends. Rows are cut across them."""
    cuts = np.unique(np.random.default_rng(1).integers(1, tokens, tokens // 1000))
    return np.diff(np.concatenate([[0], cuts, [tokens]]))


def rows_of(folder: Path) -> Any:
    """All rows, (n, SEQ_LEN) uint16: a plain array over the map, whose slices cost a third of a memmap's."""
    return np.asarray(np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r")).reshape(-1, SEQ_LEN)


def write_mds(folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mds"), columns={"tokens": f"ndarray:uint16:{SEQ_LEN}"}) as writer:
        for row in rows_of(folder):
            writer.write({"tokens": row})


def litdata_part(task: tuple[str, int, int]) -> Iterator[Any]:
    import torch

    folder, first, last = task
    for row in rows_of(Path(folder))[first:last]:
        yield torch.from_numpy(row.copy())


def write_litdata(folder: Path) -> None:
    import litdata

    count = len(rows_of(folder))
    bounds = np.linspace(0, count, SHARDS + 1).astype(int).tolist()
    tasks = [(str(folder), first, last) for first, last in zip(bounds, bounds[1:], strict=False)]
    litdata.optimize(
        fn=litdata_part,
        inputs=tasks,
        output_dir=str(folder / "litdata"),
        chunk_size=SEQ_LEN * max(64, min(8192, count // SHARDS)),
        item_loader=litdata.TokensLoader(block_size=SEQ_LEN),
        num_workers=1,
        verbose=False,
    )


def write_arrow(folder: Path) -> None:
    import pyarrow as pa
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()
    rows = rows_of(folder)
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), SEQ_LEN)
    features = Features({"tokens": List(Value("uint16"), length=SEQ_LEN)})
    Dataset(pa.table({"tokens": column}, schema=features.arrow_schema)).save_to_disk(folder / "arrow")


def write_tars(folder: Path) -> None:
    import webdataset as wds

    (folder / "wds").mkdir()
    rows = rows_of(folder)
    pattern, size = str(folder / "wds" / "rows-%06d.tar"), -(-len(rows) // SHARDS)
    with wds.ShardWriter(pattern, maxcount=size, verbose=0) as writer:
        for number, row in enumerate(rows):
            writer.write({"__key__": f"{number:08d}", "tokens.npy": row})
