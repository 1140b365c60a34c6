"""`headrace.open`: find out what lies at a path and open it."""

import os
from pathlib import Path
from typing import Any

from headrace.dataset.dataset import Dataset
from headrace.dataset.directory import DirectorySource
from headrace.dataset.megatron import MegatronPair
from headrace.dataset.nanogpt import DEFAULT_DTYPE, NanogptFile
from headrace.dataset.neighbour import NeighbourSource
from headrace.errors import DatasetNotFoundError, FormatError, SettingsError


def open_dataset(
    path: str | os.PathLike[str], *, in_memory: bool = False, dtype: Any = None, eos_id: int | None = None
) -> Dataset:
    """Open a dataset. This reads the manifest and checks sizes and headers; files are mapped when they are first used.

    Args:
        path: The directory of a dataset, or a file of another system, which is used where it lies: a Megatron pair (its
            prefix, its `.bin` or its `.idx`), or a nanoGPT `.bin` of raw tokens. The first time, an index is written
            beside such a file, as `<name>.headrace-index`.
        in_memory: Read everything into RAM first, for data that fits.
        dtype: Of a `.bin` of raw tokens: their type, "uint16" by default.
        eos_id: Of a `.bin` of raw tokens: the token that ends a document. Without it, the whole file is one document.

    Returns:
        A `Dataset`: `len(ds)`, `ds[i]`, `ds[-5:]`, `ds[[i, j, k]]`, iteration.
    """
    place = Path(path)
    neighbour = find_neighbour(place, dtype, eos_id)
    if neighbour is not None:
        return Dataset(NeighbourSource(neighbour, in_memory))
    if place.is_dir():
        _refuse_raw_settings(place, "a Headrace dataset", dtype, eos_id)
    return Dataset(DirectorySource(str(place), in_memory))


def find_neighbour(
    path: Path, dtype: Any = None, eos_id: int | None = None
) -> MegatronPair | NanogptFile | None:
    """The neighbour's files at a path; None for a directory, or if there is nothing."""
    if path.is_dir():
        return None
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    tokens, idx = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
    is_raw = path.is_file() and (path.suffix == ".bin" or (dtype is not None and path.suffix != ".idx"))
    if idx.is_file() and not (is_raw and path.suffix != ".bin"):
        _refuse_raw_settings(
            path, "a Megatron pair, whose .idx knows its own dtype and documents", dtype, eos_id
        )
        if not tokens.is_file():
            raise DatasetNotFoundError(
                f"{tokens}: missing, though {idx.name} is there; a Megatron pair needs both"
            )
        return MegatronPair(tokens)
    if is_raw:
        return NanogptFile(path, DEFAULT_DTYPE if dtype is None else dtype, eos_id)
    if path.is_file():
        raise FormatError(
            f"{path}: not a dataset; give a dataset's directory, a Megatron prefix, or a .bin of raw tokens "
            "(a file of another name needs dtype too)"
        )
    if tokens.is_file():
        raise DatasetNotFoundError(
            f"{idx}: missing; a Megatron pair needs it. For a file of raw tokens give {tokens}"
        )
    return None


def _refuse_raw_settings(path: Path, what: str, dtype: Any, eos_id: int | None) -> None:
    for name, value in (("dtype", dtype), ("eos_id", eos_id)):
        if value is not None:
            raise SettingsError(
                f"{name}={value!r}: {path} is {what}; {name} is for files of raw tokens only, leave it out"
            )
