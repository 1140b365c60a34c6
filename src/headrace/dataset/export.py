"""A dataset's tokens as a Megatron pair: one document for each record, one sequence for each document.

Parts are written one after another in blocks, so memory stays bounded. The .bin gets its name first; the .idx, which
makes the two a pair, comes last.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset
from headrace.dataset.megatron import DTYPE_CODES, HEADER, MAGIC, MAX_SEQUENCE_LENGTH, VERSION
from headrace.errors import CorruptError, FieldError, SettingsError
from headrace.format.ragged import Ragged
from headrace.store.address import local_path
from headrace.store.files import atomic_file

BLOCK = 2**20
"""How many tokens or documents are written at a time."""

Progress = Callable[[int], object]
"""Called with the number of tokens written since the last call."""


@dataclass(frozen=True)
class Exported:
    bin_path: Path
    idx_path: Path
    documents: int
    tokens: int
    dtype: str
    left_out: tuple[str, ...]
    """Fields that a Megatron pair cannot hold."""


def export_megatron(
    dataset: Dataset,
    prefix: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress = lambda tokens: None,
) -> Exported:
    """Write `<prefix>.bin` and `<prefix>.idx`. uint32 tokens become int32, which all of them must fit."""
    name = dataset.token_field
    field = dataset.fields[name]
    dtype = "int32" if field.dtype == "uint32" else field.dtype
    code = {known: code for code, known in DTYPE_CODES.items()}.get(dtype)
    if code is None or field.shape:
        raise FieldError(
            f"field {name!r} is {field.notation}: a Megatron pair holds one number for each token, "
            f"of type {', '.join(DTYPE_CODES.values())} or uint32"
        )
    longest = max(dataset.length_histogram(name)[0], default=0)
    if longest > MAX_SEQUENCE_LENGTH:
        raise SettingsError(
            f"a record has {longest:,} tokens, but Megatron's documents have at most {MAX_SEQUENCE_LENGTH:,}; "
            "split it before exporting"
        )
    bin_path, idx_path = _pair(prefix, overwrite)
    with atomic_file(idx_path) as idx, atomic_file(bin_path) as tokens:
        _write_tokens(tokens.file, dataset, name, np.dtype(dtype).newbyteorder("<"), progress)
        idx.file.write(HEADER.pack(MAGIC, VERSION, code, len(dataset), len(dataset) + 1))
        _write_arrays(idx.file, dataset, name, np.dtype(dtype).itemsize)
        # An old .idx must not be next to the new .bin, not even between the two renames.
        idx_path.unlink(missing_ok=True)
    left_out = tuple(other for other in dataset.fields if other != name)
    return Exported(bin_path, idx_path, len(dataset), dataset.num_tokens, dtype, left_out)


def _pair(prefix: str | os.PathLike[str], overwrite: bool) -> tuple[Path, Path]:
    base = local_path(prefix)
    base = base.with_suffix("") if base.suffix in (".bin", ".idx") else base
    if not base.name or base.is_dir():
        raise SettingsError(
            f"prefix {str(prefix)!r}: must be a file name without its ending, like out/tokens"
        )
    pair = base.with_name(base.name + ".bin"), base.with_name(base.name + ".idx")
    for path in pair:
        if path.exists() and not overwrite:
            raise SettingsError(f"{path}: already exists; choose another prefix, or give overwrite=True")
    base.parent.mkdir(parents=True, exist_ok=True)
    return pair


def _columns(dataset: Dataset, name: str) -> Iterator[Ragged]:
    for number in range(len(dataset.source.part_records)):
        column = dataset.part(number)[name]
        if isinstance(column, Ragged):
            yield column


def _write_tokens(
    file: BinaryIO, dataset: Dataset, name: str, dtype: np.dtype[Any], progress: Progress
) -> None:
    for column in _columns(dataset, name):
        for start in range(int(column.offsets[0]), int(column.offsets[-1]), BLOCK):
            block = column.values[start : min(start + BLOCK, int(column.offsets[-1]))]
            if block.dtype == np.uint32 and block.max() >= 2**31:
                raise SettingsError(
                    f"field {name!r}: token {block.max()} does not fit into Megatron's int32; "
                    "Megatron has no type for ids of 2^31 or more"
                )
            file.write(np.ascontiguousarray(block, dtype=dtype).view(np.uint8).data)
            progress(len(block))


def _write_arrays(file: BinaryIO, dataset: Dataset, name: str, itemsize: int) -> None:
    """Write lengths, byte pointers and document index, each in its own pass over the offsets to save RAM."""
    for lengths in _lengths(dataset, name):
        file.write(lengths.astype("<i4").tobytes())
    end = 0
    for lengths in _lengths(dataset, name):
        ends = end + np.cumsum(lengths, dtype=np.int64) * itemsize
        file.write((ends - lengths * itemsize).astype("<i8").tobytes())
        end = int(ends[-1])
    count = len(dataset) + 1
    for start in range(0, count, BLOCK):
        file.write(np.arange(start, min(start + BLOCK, count), dtype="<i8").tobytes())


def _lengths(dataset: Dataset, name: str) -> Iterator[NDArray[np.int64]]:
    for column in _columns(dataset, name):
        for start in range(0, len(column), BLOCK):
            lengths = np.diff(column.offsets[start : start + BLOCK + 1]).astype(np.int64)
            if (lengths < 0).any():
                raise CorruptError(f"the offsets of {name!r} decrease; run `headrace verify` on the dataset")
            yield lengths
