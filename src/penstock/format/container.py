"""One file of named arrays: 64 bytes of preamble, a JSON header, then raw little-endian sections.

    0   8   magic "PENSTOCK"
    8   4   u32 format version (1)
    12  4   u32 bytes of JSON header, H
    16  8   u64 bytes of the whole file
    24  40  zero
    64  H   the header: JSON, padded with spaces so that 64 + H is a multiple of 64
    ...     the sections, each at a multiple of 64, gaps filled with zero

Shards and the dataset's index are both such files. `docs/format.md` is the specification.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptError, FormatError, VersionError
from penstock.format.checksum import hasher, header_checksum
from penstock.format.fields import DTYPES, MAX_DIMENSIONS
from penstock.store.local import atomic_file

MAGIC = b"PENSTOCK"
VERSION = 1
ALIGNMENT = 64
MAX_HEADER_BYTES = 64 * 2**20
_PREAMBLE = struct.Struct("<8sIIQ40x")


@dataclass(frozen=True)
class Section:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize

    def view(self, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        return buffer[self.offset : self.offset + self.size].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Header:
    kind: str
    attributes: Mapping[str, Any]
    sections: Mapping[str, Section]


@dataclass(frozen=True)
class StoredFile:
    """What the manifest says of a file: enough to check it cheaply at open and wholly in `verify`."""

    file: str
    bytes: int
    checksum: str
    header_bytes: int
    header_checksum: str


@dataclass(frozen=True)
class Chunks:
    """A section's content in pieces, so that a shard is never copied into one array first."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Sequence[NDArray[Any]]

    @staticmethod
    def of(array: NDArray[Any]) -> "Chunks":
        return Chunks(array.dtype, array.shape, [array])


def write_container(
    directory: Path, stem: str, kind: str, attributes: Mapping[str, Any], sections: Mapping[str, Chunks]
) -> StoredFile:
    """Write `<stem>-<first 16 digits of the checksum>.pstk` and describe it.

    The name depends on the content, so writing the same content again is harmless, and a new version of
    a dataset never overwrites a file that a reader of the old one has open.
    """
    head, offsets, total = _encode_head(kind, attributes, sections)
    digest = hasher()
    with atomic_file(directory / f"{stem}.pstk") as pending:

        def put(content: bytes | memoryview) -> int:
            digest.update(content)
            return pending.file.write(content)

        position = put(head)
        for offset, chunks in zip(offsets, sections.values(), strict=True):
            position += put(bytes(offset - position))
            for piece in chunks.pieces:
                raw = np.ascontiguousarray(piece, dtype=chunks.dtype).reshape(-1).view(np.uint8)
                position += put(memoryview(raw))
        position += put(bytes(total - position))
        if position != total:
            raise FormatError(f"{pending.path}: {position} bytes where the header says {total}: pieces do not match")
        pending.path = directory / f"{stem}-{digest.hexdigest()[:16]}.pstk"
    return StoredFile(pending.path.name, total, digest.hexdigest(), len(head), header_checksum(head))


def _encode_head(
    kind: str, attributes: Mapping[str, Any], sections: Mapping[str, Chunks]
) -> tuple[bytes, list[int], int]:
    def encode(base: int) -> tuple[bytes, list[int], int]:
        offsets, described, position = [], [], base
        for name, chunks in sections.items():
            position = _align(position)
            section = Section(chunks.dtype, chunks.shape, position)
            described.append(
                {"name": name, "dtype": chunks.dtype.name, "shape": list(chunks.shape), "offset": position}
            )
            offsets.append(position)
            position += section.size
        body = json.dumps({"kind": kind, **attributes, "sections": described}, sort_keys=True).encode()
        return body, offsets, _align(position)

    # Offsets are part of the header whose length they depend on: grow the room until it fits.
    room = 0
    while True:
        body, offsets, total = encode(ALIGNMENT + room)
        if len(body) <= room:
            padded = body.ljust(room)
            return _PREAMBLE.pack(MAGIC, VERSION, room, total) + padded, offsets, total
        room = _align(ALIGNMENT + len(body)) - ALIGNMENT


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def parse_head(head: bytes, file_bytes: int, name: str) -> Header:
    """Read a header that may have been damaged or forged: every number is checked before it is used."""
    header_bytes = check_preamble(head, file_bytes, name)
    if len(head) < ALIGNMENT + header_bytes:
        raise CorruptError(f"{name}: truncated inside its header")
    try:
        described = json.loads(head[ALIGNMENT : ALIGNMENT + header_bytes])
        kind, listed = described.pop("kind"), described.pop("sections")
        sections = dict(_parse_section(entry, file_bytes) for entry in listed)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{name}: damaged header: {error}") from None
    if not isinstance(kind, str):
        raise CorruptError(f"{name}: damaged header: kind {kind!r}")
    return Header(kind, described, sections)


def check_preamble(head: bytes, file_bytes: int, name: str) -> int:
    """The number of header bytes, once magic, version and sizes are known to be right."""
    if len(head) < _PREAMBLE.size:
        raise CorruptError(f"{name}: {file_bytes} bytes are too few for a Penstock file")
    magic, version, header_bytes, total = _PREAMBLE.unpack_from(head)
    if magic != MAGIC:
        raise FormatError(f"{name}: not a Penstock file: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise VersionError(
            f"{name}: format version {version}, and this Penstock reads version {VERSION}: "
            f"{'upgrade Penstock' if version > VERSION else 'rebuild the dataset'}"
        )
    if total != file_bytes:
        raise CorruptError(f"{name}: {file_bytes} bytes on disk, its header says {total}: truncated or overwritten")
    if header_bytes > min(MAX_HEADER_BYTES, file_bytes - ALIGNMENT):
        raise CorruptError(f"{name}: damaged header: it claims {header_bytes} bytes")
    return int(header_bytes)


def _parse_section(entry: Any, file_bytes: int) -> tuple[str, Section]:
    name, dtype, shape, offset = entry["name"], entry["dtype"], entry["shape"], entry["offset"]
    if not isinstance(name, str) or dtype not in DTYPES:
        raise FormatError(f"section {name!r} of dtype {dtype!r}")
    numbers: Iterable[Any] = [*shape, offset]
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers) or len(shape) > MAX_DIMENSIONS + 1:
        raise FormatError(f"section {name!r}: shape {str(shape)[:80]} at {offset!r}")
    section = Section(np.dtype(dtype).newbyteorder("<"), tuple(shape), offset)
    if offset % ALIGNMENT or offset + section.size > file_bytes:
        raise FormatError(f"section {name!r} at {offset} with {section.size} bytes does not fit the file")
    return name, section
