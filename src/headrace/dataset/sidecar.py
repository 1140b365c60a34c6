"""The index that Headrace keeps next to a token file of another system: `<name>.headrace-index`.

A file of another system (Megatron's, nanoGPT's) holds tokens that are used in place. What it lacks is kept here, in a
container (`format/container.py`) of kind "sidecar": offsets, as in a shard, and the by-length order of all documents,
as in a dataset's index (`format/index.py`).

    <part>/offsets, lengths, starts, order

A part holds at most 2^24 documents, so that sorting by length takes little memory. With documents of 2, 3 and 1
tokens and parts of two documents there are two parts: offsets [0 2 5], which begins at token 0, and offsets
[0 1], which begins at token 5.

The sidecar is used only if it was made from these very files: their sizes, their modification times in
nanoseconds, a checksum of a sample of their bytes (`sample_checksum`), the dtype and the eos id must all be the same.
Otherwise it is made again. Where it cannot be written, the index is held in RAM, and a warning says so. For files in an
object store it is always held in RAM, unless somebody has put it there.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CorruptError, DatasetNotFoundError, FormatError, StorageError
from headrace.format.checksum import hasher
from headrace.format.container import Chunks, Header, parse_head, write_container
from headrace.format.fields import MAX_LENGTH
from headrace.format.index import (
    LengthTable,
    check_histogram,
    fill_order,
    histogram,
    merge_histograms,
    number_dtype,
)
from headrace.store.store import Store

SUFFIX = ".headrace-index"
KIND = "sidecar"
PART_RECORDS = 2**24
SAMPLE_BLOCKS = 16
SAMPLE_BLOCK_BYTES = 4096

_log = logging.getLogger(__name__)

Offsets = NDArray[np.uint64]
"""Where the documents of a part begin, in tokens from the start of the part, and where the last one ends."""


@dataclass(frozen=True)
class Documents:
    """Where the documents of a neighbour are: contiguous, from `first_byte` of the token file on.

    `ends` gives the end of each document in tokens after `first_byte`, ascending, in blocks of any size.
    """

    first_byte: int
    ends: Iterator[NDArray[np.int64]]


class Neighbour(Protocol):
    """Files of another system, and how to find the documents in them."""

    @property
    def store(self) -> Store: ...
    @property
    def file(self) -> str: ...  # the one that holds the tokens
    @property
    def files(self) -> Sequence[str]: ...  # every file that the index is made from
    @property
    def dtype(self) -> str: ...
    @property
    def eos_id(self) -> int | None: ...
    def documents(self) -> Documents: ...


@dataclass(frozen=True)
class SidecarIndex:
    parts: Sequence[Offsets]
    table: LengthTable
    first_byte: int
    fingerprint: str


def sidecar_name(tokens: str) -> str:
    return tokens + SUFFIX


def load_or_build(neighbour: Neighbour, in_memory: bool = False) -> SidecarIndex:
    """The stored index if it was made from these files as they are now, else a new one, stored if possible.

    Nothing is written into a bucket by somebody who only reads from it: there, a new index stays in RAM.
    """
    store, file = neighbour.store, sidecar_name(neighbour.file)
    made_from = describe(neighbour)
    kept = _load(store, file, made_from, in_memory)
    if kept is not None:
        return kept
    index = _build(neighbour, made_from)
    if describe(neighbour) != made_from:
        raise StorageError(
            f"{store.locate(neighbour.file)}: changed while it was being indexed; open it again when it is complete"
        )
    if store.is_remote:
        return index
    try:
        _write(store, file, index, made_from)
    except OSError as error:
        _log.warning(
            "%s: the index cannot be written (%s); it is held in RAM and made again each time the dataset is opened. "
            "Make the directory writable, or open the dataset once from where it is writable",
            store.locate(file),
            error,
        )
        return index
    return _load(store, file, made_from, in_memory) or index


def describe(neighbour: Neighbour) -> dict[str, Any]:
    """What an index is made from. If two descriptions are equal, it need not be made again."""
    store, files = neighbour.store, []
    for file in neighbour.files:
        try:
            status = store.status(file)
        except FileNotFoundError:
            raise DatasetNotFoundError(
                f"{store.locate(file)}: no such file; restore it or correct the path"
            ) from None
        sample = sample_checksum(store, file, status.bytes)
        files.append({"bytes": status.bytes, "mtime_ns": status.modified_ns, "sample": sample})
    return {"files": files, "dtype": neighbour.dtype, "eos_id": neighbour.eos_id}


def sample_checksum(store: Store, file: str, size: int) -> str:
    """The XXH3-128 of 16 blocks of 4 KiB, evenly spaced from the first to the last; of a small file, that of all bytes.

    It costs the same for any size, so it is checked each time. A change between the blocks that also keeps the size and
    the modification time goes unnoticed.
    """
    last = max(0, size - SAMPLE_BLOCK_BYTES)
    starts: Sequence[int] = [last * i // (SAMPLE_BLOCKS - 1) for i in range(SAMPLE_BLOCKS)]
    if size <= SAMPLE_BLOCKS * SAMPLE_BLOCK_BYTES:
        starts = range(0, size, SAMPLE_BLOCK_BYTES)
    digest = hasher()
    for start in starts:
        digest.update(store.read(file, start, SAMPLE_BLOCK_BYTES))
    return str(digest.hexdigest())


def build_parts(
    ends: Iterable[NDArray[np.int64]], name: str, part_records: int = PART_RECORDS
) -> list[Offsets]:
    """The offsets of all documents, in parts. Takes 8 bytes for each document."""
    parts: list[Offsets] = []
    gathered: list[NDArray[np.int64]] = []
    held = start = 0
    for block in ends:
        while len(block):
            taken = block[: part_records - held]
            block = block[len(taken) :]
            gathered.append(taken)
            held += len(taken)
            if held == part_records:
                parts.append(_part(np.concatenate(gathered), start, name))
                start, held, gathered = int(taken[-1]), 0, []
    if held:
        parts.append(_part(np.concatenate(gathered), start, name))
    return parts


def _part(ends: NDArray[np.int64], start: int, name: str) -> Offsets:
    offsets = np.zeros(len(ends) + 1, dtype="<u8")
    np.subtract(ends, start, out=offsets[1:], casting="unsafe")
    lengths = np.diff(offsets).astype(np.int64)
    longest = int(lengths.max())
    if not 0 <= int(lengths.min()) <= longest <= MAX_LENGTH:
        raise FormatError(
            f"{name}: a document has {longest:,} tokens; the maximum is {MAX_LENGTH:,}. "
            "Check that eos_id is right; if it is, split the document"
        )
    offsets.flags.writeable = False
    return offsets


def build_table(parts: Sequence[Offsets]) -> LengthTable:
    """The by-length order of all documents. Takes 4 bytes for each document, and what sorting one part takes."""
    lengths, starts = merge_histograms(histogram(np.diff(offsets)) for offsets in parts)
    order = np.empty(int(starts[-1]), dtype=number_dtype(int(starts[-1])))
    fill_order(order, lengths, starts, (np.diff(offsets) for offsets in parts))
    for array in (lengths, starts, order):
        array.flags.writeable = False
    return LengthTable(lengths, starts, order)


def _build(neighbour: Neighbour, made_from: Mapping[str, Any]) -> SidecarIndex:
    documents = neighbour.documents()
    parts = build_parts(documents.ends, neighbour.store.locate(neighbour.file))
    return SidecarIndex(parts, build_table(parts), documents.first_byte, _fingerprint(made_from, parts))


def _fingerprint(made_from: Mapping[str, Any], parts: Sequence[Offsets]) -> str:
    """A checksum of the size and a sample of the tokens, and of all lengths; not of times, which copies lose."""
    tokens = made_from["files"][0]
    digest = hasher()
    digest.update(f"{made_from['dtype']};{tokens['bytes']};{tokens['sample']};".encode())
    for offsets in parts:
        digest.update(np.diff(offsets).astype("<u4"))
    return str(digest.hexdigest())


def _write(store: Store, file: str, index: SidecarIndex, made_from: Mapping[str, Any]) -> None:
    attributes = {
        "made_from": made_from,
        "records": [len(offsets) - 1 for offsets in index.parts],
        "first_byte": index.first_byte,
        "fingerprint": index.fingerprint,
    }
    sections = {f"{number}/offsets": Chunks.of(offsets) for number, offsets in enumerate(index.parts)}
    sections |= {name: Chunks.of(getattr(index.table, name)) for name in ("lengths", "starts", "order")}
    # Many processes may open a file for the first time at once; the last one wins, with the same content.
    write_container(store, "index", KIND, attributes, sections, name=file)


def _load(store: Store, file: str, made_from: Mapping[str, Any], in_memory: bool) -> SidecarIndex | None:
    """The stored index; None if there is none, or if it was not made from these files as they are now."""
    name = store.locate(file)
    try:
        buffer = store.view(file, in_memory=in_memory)
        header = parse_head(buffer[: 64 + _header_bytes(buffer)].tobytes(), len(buffer), name)
        if header.kind != KIND:
            raise CorruptError(f"{name}: is a {header.kind!r} file, but a {KIND} is expected")
        if header.attributes.get("made_from") != made_from:
            _log.info("%s: was made from other files or settings, so it is made again", name)
            return None
        return _parse(header, buffer, name)
    except FileNotFoundError:
        return None
    except (OSError, FormatError) as error:
        _log.warning("%s: cannot be used (%s), so it is made again", name, error)
        return None


def _header_bytes(buffer: NDArray[np.uint8]) -> int:
    # Only a hint of how much to copy: `parse_head` checks it.
    return min(int.from_bytes(buffer[12:16].tobytes(), "little"), len(buffer))


def _parse(header: Header, buffer: NDArray[np.uint8], name: str) -> SidecarIndex:
    """Views of the arrays, once their shapes and ends are known to match each other and the token file."""
    records, first_byte, fingerprint = _parse_attributes(header, name)
    count = sum(records)
    parts = [_view(header, buffer, f"{number}/offsets", "<u8") for number in range(len(records))]
    if [len(offsets) - 1 for offsets in parts] != records or any(offsets[0] != 0 for offsets in parts):
        raise CorruptError(f"{name}: its offsets do not match its header")
    table = _parse_table(header, buffer, count, name)
    tokens = sum(int(offsets[-1]) for offsets in parts)
    check_histogram(table, count, tokens, name)
    made_from = header.attributes["made_from"]
    room = made_from["files"][0]["bytes"] - first_byte
    if first_byte < 0 or tokens * np.dtype(made_from["dtype"]).itemsize > room:
        raise CorruptError(f"{name}: {tokens} tokens do not fit into the file")
    return SidecarIndex(parts, table, first_byte, fingerprint)


def _parse_table(header: Header, buffer: NDArray[np.uint8], records: int, name: str) -> LengthTable:
    table = LengthTable(
        _view(header, buffer, "lengths", "<u4"),
        _view(header, buffer, "starts", "<u8"),
        _view(header, buffer, "order", number_dtype(records)),
    )
    if len(table.order) != records or len(table.starts) != len(table.lengths) + 1:
        raise CorruptError(f"{name}: the arrays of its order do not match each other")
    return table


def _parse_attributes(header: Header, name: str) -> tuple[list[int], int, str]:
    """The records of each part, the first byte of the tokens, and the fingerprint."""
    records, first_byte = header.attributes.get("records"), header.attributes.get("first_byte")
    fingerprint = header.attributes.get("fingerprint")
    has_counts = isinstance(records, list) and all(type(count) is int and count >= 0 for count in records)
    if not (has_counts and type(first_byte) is int and isinstance(fingerprint, str)):
        raise CorruptError(f"{name}: its header is damaged")
    return list(records or ()), first_byte, fingerprint


def _view(header: Header, buffer: NDArray[np.uint8], name: str, dtype: Any) -> NDArray[Any]:
    section = header.sections.get(name)
    if section is None or section.dtype != np.dtype(dtype) or len(section.shape) != 1:
        raise CorruptError(f"section '{name}' is missing or has another type")
    return section.view(buffer)
