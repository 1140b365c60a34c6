"""How many rows of tokens each unit of a dataset has, for a `seq_len` and a way of packing.

A dataset stores these counts for the usual sequence lengths, in a further file with the purpose `rows`. So opening it
does not need the lengths of its documents. For any other setting, the lengths of all documents are read once.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset
from headrace.dataset.units import UnitSource
from headrace.errors import CorruptError
from headrace.format.container import Chunks, parse_head, write_container
from headrace.format.fields import Field, FieldKind
from headrace.format.manifest import FurtherFile
from headrace.pack.overlong import Overlong
from headrace.pack.packing import Packing
from headrace.rows.kernel import count_best_fit_rows
from headrace.rows.parts import PartTable
from headrace.rows.reference import TYPES
from headrace.store.store import Store

PURPOSE = "rows"
STORED_SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_COUNT_DTYPE = np.dtype("<u4")

_log = logging.getLogger(__name__)

_counted: "WeakKeyDictionary[Any, dict[tuple[Any, ...], NDArray[np.int64]]]" = WeakKeyDictionary()
"""What was counted already, by the source of a dataset and the settings: several Loaders may share a dataset."""
_warned: set[str] = set()
"""The checksums of the datasets whose lengths had to be read."""


def holds_tokens(field: Field) -> bool:
    return field.kind is FieldKind.RAGGED and not field.shape and field.dtype in TYPES


class RowCounter:
    """Counts the rows of a new dataset's units, shard by shard, and writes the file."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._counts: dict[str, list[NDArray[np.int64]]] = {
            name: [] for name, field in fields.items() if holds_tokens(field)
        }

    def add(self, name: str, lengths: NDArray[np.int64], edges: NDArray[np.int64]) -> None:
        """The lengths of a shard's records, and the records at which it is cut into units."""
        self._counts[name].append(count_best_fit_rows(lengths, edges, STORED_SEQ_LENS))

    @property
    def fields(self) -> Iterable[str]:
        return self._counts

    def write(self, into: Store) -> FurtherFile | None:
        if not self._counts:
            return None
        sections = {}
        nothing = np.empty((0, len(STORED_SEQ_LENS)), dtype=np.int64)
        for name, listed in self._counts.items():
            counts = np.concatenate([nothing, *listed]).astype(_COUNT_DTYPE)
            for column, seq_len in enumerate(STORED_SEQ_LENS):
                sections[f"{name}/{seq_len}"] = Chunks.of(np.ascontiguousarray(counts[:, column]))
        stored = write_container(into, "rows", "rows", {"packing": str(Packing.BEST_FIT)}, sections)
        return FurtherFile(purpose=PURPOSE, stored=stored)


def count_unit_rows(
    dataset: Dataset, table: PartTable, seq_len: int, packing: Packing, overlong: Overlong
) -> NDArray[np.int64]:
    """The number of rows of each unit: stored, or from the lengths of all documents."""
    source = dataset.source
    if packing is Packing.BEST_FIT and overlong is Overlong.SPLIT and isinstance(source, UnitSource):
        stored = _stored_counts(source, table.field_name, seq_len)
        if stored is not None:
            return stored
    known = _counted.setdefault(source, {})
    settings = (table.field_name, seq_len, packing, overlong)
    if settings not in known:
        if isinstance(source, UnitSource) and source.store.is_remote:
            _warn_of_reading(source)
        counts = [_count(lengths, seq_len, packing, overlong) for lengths in table.all_lengths()]
        known[settings] = np.array(counts, dtype=np.int64)
    return known[settings]


def _warn_of_reading(source: UnitSource) -> None:
    """Say what it costs, and how to do without; once for each dataset."""
    if source.manifest.checksum in _warned:
        return
    _warned.add(source.manifest.checksum)
    offset_bytes = source.units.offset_bytes
    size = f"{offset_bytes / 1e6:,.1f} MB" if offset_bytes >= 1e6 else f"{offset_bytes / 1e3:,.1f} KB"
    if source.manifest.has_further(PURPOSE):
        seq_lens = ", ".join(map(str, STORED_SEQ_LENS))
        why = (
            "the number of rows is stored only for packing='best-fit' and overlong='split' with a seq_len of "
            f"{seq_lens}; a Loader with these settings starts without that"
        )
    else:
        why = "the dataset does not store the number of rows; build it again, and most Loaders start without that"
    _log.warning("%s: the lengths of all documents are read first (%s): %s", source.name, size, why)


def stored_row_count(dataset: Dataset, seq_len: int) -> int | None:
    """How many rows a dataset has if its documents are packed within units; None if it does not say so."""
    source = dataset.source
    if not isinstance(source, UnitSource):
        return None
    counts = _stored_counts(source, dataset.token_field, seq_len)
    return None if counts is None else int(counts.sum())


def _count(lengths: NDArray[np.int64], seq_len: int, packing: Packing, overlong: Overlong) -> int:
    """The number of rows that the documents of one unit make."""
    if overlong is Overlong.TRUNCATE:
        lengths = np.minimum(lengths, seq_len)
    elif overlong is Overlong.DROP:
        lengths = lengths[lengths <= seq_len]
    if packing is Packing.PAD:
        return int((-(-lengths // seq_len)).sum())
    return int(count_best_fit_rows(lengths, [0, len(lengths)], [seq_len])[0, 0])


def _stored_counts(source: UnitSource, field: str, seq_len: int) -> NDArray[np.int64] | None:
    found = source.further(PURPOSE)
    if found is None or seq_len not in STORED_SEQ_LENS:
        return None
    stored, content = found
    name = source.store.locate(stored.file)
    header = parse_head(content[: stored.header_bytes], len(content), name)
    section = header.sections.get(f"{field}/{seq_len}")
    if header.kind != "rows" or section is None:
        return None
    if section.dtype != _COUNT_DTYPE or section.shape != (source.units.count,):
        raise CorruptError(f"{name}: damaged: {field}/{seq_len} does not match the units")
    return section.view(np.frombuffer(content, dtype=np.uint8)).astype(np.int64)
