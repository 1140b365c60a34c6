"""The by-length index of a remote dataset, of which only the blocks are read that someone asks for.

The index of a billion documents has four gigabytes, and a batch needs a few entries of it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.reads import FetchedReads, Gone, Reads, Traffic
from headrace.dataset.sparse import BlockList, SparseBytes, fill
from headrace.errors import CorruptError
from headrace.format.blocks import BLOCK_BYTES, count_blocks
from headrace.format.checksum import header_checksum
from headrace.format.container import Section, parse_head
from headrace.format.index import LengthTable, check_histogram, read_table
from headrace.format.manifest import Manifest
from headrace.format.units import Units
from headrace.order.distinct import distinct
from headrace.store.store import Store

_INDEX = 0


class SparseIndex:
    def __init__(
        self, store: Store, manifest: Manifest, units: Units, gone: Gone, traffic: Traffic | None = None
    ) -> None:
        stored = manifest.index
        self._name = store.locate(stored.file)
        self._records = manifest.records
        reads = FetchedReads(store, [stored], gone, None, traffic)
        head = reads.unchecked(_INDEX, 0, stored.header_bytes).tobytes()
        if header_checksum(head) != stored.header_checksum:
            raise CorruptError(f"{self._name}: its header does not match the manifest; run `headrace verify`")
        self._header = parse_head(head, stored.bytes, self._name)
        end = units.index_blocks
        blocks = BlockList(_INDEX, end, 0, count_blocks(end), units.index_check, self._name)
        self._reads = reads
        self._content = SparseBytes(reads, 0, end, blocks)

    def table(self, field: str, elements: int) -> LengthTable:
        """A field's table, whose order is read when it is asked for."""
        table = read_table(self._content.content, self._header, field, self._records, self._name)
        sections = self._header.sections
        short = (sections[f"{field}/lengths"], sections[f"{field}/starts"])
        fill(self._reads, [(self._content, each.offset, each.offset + each.size) for each in short])
        check_histogram(table, self._records, elements, self._name)
        order: Any = SparseOrder(self._reads, self._content, sections[f"{field}/order"])
        return LengthTable(table.lengths, table.starts, order)


class SparseOrder:
    """Behaves like the array of the order where batches use it: `order[places]`."""

    def __init__(self, reads: Reads, content: SparseBytes, section: Section) -> None:
        self._reads, self._content, self._section = reads, content, section
        self._values: NDArray[Any] = section.view(content.content)
        self.nbytes, self.dtype, self.shape = self._values.nbytes, self._values.dtype, self._values.shape

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[Any]:
        begin, width = self._section.offset, self._values.dtype.itemsize
        blocks = distinct((begin + np.asarray(places, dtype=np.int64) * width) // BLOCK_BYTES)
        fill(self._reads, [(self._content, block * BLOCK_BYTES, block * BLOCK_BYTES + 1) for block in blocks])
        found: NDArray[Any] = self._values[places]
        return found
