"""`headrace.open`: find out what lies at a path and open it."""

import os
from typing import Any

from headrace.dataset.dataset import Dataset
from headrace.dataset.megatron import MegatronPair
from headrace.dataset.nanogpt import DEFAULT_DTYPE, NanogptFile
from headrace.dataset.neighbour import NeighbourSource
from headrace.dataset.stored import StoredSource
from headrace.errors import DatasetNotFoundError, FormatError, SettingsError
from headrace.public import public
from headrace.store.address import open_store, split_place
from headrace.store.store import Store


@public
def open_dataset(
    path: str | os.PathLike[str] | Store,
    *,
    in_memory: bool = False,
    dtype: Any = None,
    eos_id: int | None = None,
) -> Dataset:
    """Open a dataset. This reads the manifest only; shards are checked and mapped when they are first used.

    Args:
        path: The directory of a dataset, the address of a store (`memory://name`) or a store; or a file of another
            system, which is used where it lies: a Megatron pair (its prefix, its `.bin` or its `.idx`), or a nanoGPT
            `.bin` of raw tokens. The first time, an index is written beside such a file, as `<name>.headrace-index`.
        in_memory: Read everything into RAM first, for data that fits.
        dtype: Of a `.bin` of raw tokens: their type, "uint16" by default.
        eos_id: Of a `.bin` of raw tokens: the token that ends a document. Without it, the whole file is one document.

    Returns:
        A `Dataset`: `len(ds)`, `ds[i]`, `ds[-5:]`, `ds[[i, j, k]]`, iteration.
    """
    neighbour = find_neighbour(path, dtype, eos_id) if isinstance(path, str | os.PathLike) else None
    if neighbour is not None:
        return Dataset(NeighbourSource(neighbour, in_memory))
    store = open_store(path)
    if store.exists():
        _refuse_raw_settings(store.name, "a Headrace dataset", dtype, eos_id)
    return Dataset(StoredSource(store, in_memory))


def find_neighbour(
    path: str | os.PathLike[str], dtype: Any = None, eos_id: int | None = None
) -> MegatronPair | NanogptFile | None:
    """The neighbour's files at a path; None for a directory, or if there is nothing."""
    if open_store(path).exists():
        return None
    store, file = split_place(path)
    prefix = file[:-4] if file.endswith((".bin", ".idx")) else file
    tokens, idx = f"{prefix}.bin", f"{prefix}.idx"
    is_there = store.has(file)
    is_raw = is_there and (file.endswith(".bin") or (dtype is not None and not file.endswith(".idx")))
    if store.has(idx) and not (is_raw and not file.endswith(".bin")):
        what = "a Megatron pair, whose .idx knows its own dtype and documents"
        _refuse_raw_settings(str(path), what, dtype, eos_id)
        if not store.has(tokens):
            raise DatasetNotFoundError(
                f"{store.locate(tokens)}: missing, though {idx} is there; a Megatron pair needs both"
            )
        return MegatronPair(store, tokens)
    if is_raw:
        return NanogptFile(store, file, DEFAULT_DTYPE if dtype is None else dtype, eos_id)
    if is_there:
        raise FormatError(
            f"{path}: not a dataset; give a dataset's directory, a Megatron prefix, or a .bin of raw tokens "
            "(a file of another name needs dtype too)"
        )
    if store.has(tokens):
        raise DatasetNotFoundError(
            f"{store.locate(idx)}: missing; a Megatron pair needs it. "
            f"For a file of raw tokens give {store.locate(tokens)}"
        )
    return None


def _refuse_raw_settings(path: str, what: str, dtype: Any, eos_id: int | None) -> None:
    for name, value in (("dtype", dtype), ("eos_id", eos_id)):
        if value is not None:
            raise SettingsError(
                f"{name}={value!r}: {path} is {what}; {name} is for files of raw tokens only, leave it out"
            )
