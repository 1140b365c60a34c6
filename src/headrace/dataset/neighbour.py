"""Files of another system (a "neighbour") as a source of parts: tokens are mapped in place, the sidecar has the
documents."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.dataset.dataset import Histogram
from headrace.dataset.megatron import MegatronPair
from headrace.dataset.nanogpt import NanogptFile
from headrace.dataset.sidecar import load_or_build, sidecar_name
from headrace.errors import CorruptError, FormatError
from headrace.format.fields import Field, FieldKind
from headrace.format.index import LengthTable
from headrace.format.ragged import Ragged
from headrace.format.shard import Column

FIELD = "tokens"


class NeighbourSource:
    """Has one field, 'tokens'. No token is copied: values are views of the mapped file."""

    manifest = None

    def __init__(
        self,
        neighbour: MegatronPair | NanogptFile,
        in_memory: bool = False,
        expected_fingerprint: str | None = None,
    ) -> None:
        self._neighbour, self.in_memory = neighbour, in_memory
        self._index = load_or_build(neighbour, in_memory)
        if expected_fingerprint not in (None, self.fingerprint):
            raise FormatError(
                f"{self.name}: has changed since it was opened in another process; open it again there"
            )
        self._loaded = self._load_parts() if in_memory else None

    @property
    def name(self) -> str:
        return self._neighbour.store.locate(self._neighbour.file)

    @property
    def fields(self) -> Mapping[str, Field]:
        return {FIELD: Field(FieldKind.RAGGED, self._neighbour.dtype)}

    @property
    def part_records(self) -> Sequence[int]:
        return [len(offsets) - 1 for offsets in self._index.parts]

    @property
    def elements(self) -> Mapping[str, int]:
        return {FIELD: sum(int(offsets[-1]) for offsets in self._index.parts)}

    def part_elements(self, field: str) -> Sequence[int]:
        return [int(offsets[-1]) for offsets in self._index.parts]

    @property
    def fingerprint(self) -> str:
        """A checksum of the size and a sample of the tokens, and of the lengths of all documents: see `sidecar.py`."""
        return self._index.fingerprint

    @property
    def file_bytes(self) -> Mapping[str, int]:
        """The sizes of the neighbour's files, and of the index next to them if it could be written."""
        store = self._neighbour.store
        sizes = {file: store.status(file).bytes for file in self._neighbour.files}
        with contextlib.suppress(FileNotFoundError):
            kept = sidecar_name(self._neighbour.file)
            sizes[kept] = store.status(kept).bytes
        return sizes

    def load_part(self, number: int) -> Mapping[str, Column]:
        return (self._loaded or self._load_parts())[number]

    def histogram(self, field: str) -> Histogram:
        table = self.length_table(field)
        return table.lengths.astype(np.int64), table.counts

    def length_table(self, field: str) -> LengthTable:
        """The by-length table; `format/index.py` says how to read it."""
        return self._index.table

    def _load_parts(self) -> list[Mapping[str, Column]]:
        dtype = self.fields[FIELD].numpy_dtype
        buffer = self._neighbour.store.view(self._neighbour.file, in_memory=self.in_memory)
        begin = self._index.first_byte
        end = begin + self.elements[FIELD] * dtype.itemsize
        if end > len(buffer):
            raise CorruptError(
                f"{self.name}: {len(buffer)} bytes, but {end} when it was indexed: it was truncated; open it again"
            )
        values = buffer[begin:end].view(dtype)
        values.flags.writeable = False
        parts: list[Mapping[str, Column]] = []
        first = 0
        for offsets in self._index.parts:
            count = int(offsets[-1])
            parts.append({FIELD: Ragged(values[first : first + count], offsets)})
            first += count
        return parts

    def __reduce__(self) -> tuple[Any, ...]:
        return NeighbourSource, (self._neighbour, self.in_memory, self.fingerprint)
