"""One file of named arrays: 64 bytes of preamble, a JSON header, then raw little-endian sections.

    0   8   magic "HEADRACE"
    8   4   u32 format version (1)
    12  4   u32 bytes of JSON header, H
    16  8   u64 bytes of the whole file
    24  40  zero
    64  H   the header: JSON, padded with spaces so that 64 + H is a multiple of 64
    ...     the sections, each at a multiple of 64, gaps filled with zero
    ...     the last section, `blocks`: checksums of all bytes before it (blocks.py)

Shards and the dataset's index are both such files. `docs/format.md` is the specification.
"""

import json
import math
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CorruptError, FormatError, SettingsError, VersionError
from headrace.format.blocks import CHECKSUM_DTYPE, SECTION, BlockHasher, count_blocks
from headrace.format.checksum import hasher, header_checksum
from headrace.format.fields import DTYPES, MAX_DIMENSIONS
from headrace.store.store import Store

MAGIC = b"HEADRACE"
VERSION = 1
ALIGNMENT = 64
MAX_HEADER_BYTES = 64 * 2**20
MAX_SECTION_BYTES = 2**62
_PREAMBLE = struct.Struct("<8sIIQ40x")
_RESERVED_FROM = 24
_SMALL_GAP_BYTES = 16 * 2**10
"""Sections that are no further apart are fetched together."""


@dataclass(frozen=True)
class Section:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        # Zeros are left out: NumPy refuses shapes whose other sizes multiply to more than it can address.
        if math.prod(size or 1 for size in self.shape) * self.dtype.itemsize >= MAX_SECTION_BYTES:
            raise FormatError(
                f"shape {self.shape} of {self.dtype.name}: the section has more than 2^62 bytes"
            )

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        return buffer[self.offset : self.offset + self.size].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Header:
    kind: str
    attributes: Mapping[str, Any]
    sections: Mapping[str, Section]


@dataclass(frozen=True)
class StoredFile:
    """What the manifest says about a file: enough to check it quickly on opening, and completely in `verify`."""

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
    store: Store,
    stem: str,
    kind: str,
    attributes: Mapping[str, Any],
    sections: Mapping[str, Chunks],
    *,
    name: str | None = None,
) -> StoredFile:
    """Write `<stem>-<first 16 digits of the checksum>.hdrc`, or a file called `name`, and describe it.

    The name depends on the content, so writing the same content again is harmless, and a new version of
    a dataset never overwrites a file that a reader of the old one has open.
    """
    head, offsets, total = _encode_head(kind, attributes, sections)
    *offsets, blocks_offset = offsets
    digest, blocks = hasher(), BlockHasher()
    with store.pending(f"{stem}.hdrc") as pending:

        def put(content: bytes | memoryview) -> int:
            digest.update(content)
            blocks.update(content)
            return pending.file.write(content)

        position = put(head)
        for (section, chunks), offset in zip(sections.items(), offsets, strict=True):
            position += put(bytes(offset - position))
            end = offset + Section(chunks.dtype, chunks.shape, offset).size
            for piece in chunks.pieces:
                raw = np.ascontiguousarray(piece, dtype=chunks.dtype).reshape(-1).view(np.uint8)
                position += put(raw.data)
            # Otherwise padding would fill the gap with zeros, and a reader would take them for data.
            if position != end:
                raise FormatError(
                    f"{store.locate(pending.name)}: section {section!r} got {position - offset} bytes, but its "
                    f"shape {chunks.shape} needs {end - offset}"
                )
        put(bytes(blocks_offset - position))
        position = blocks_offset + put(blocks.finish().tobytes())
        put(bytes(total - position))
        pending.name = name or f"{stem}-{digest.hexdigest()[:16]}.hdrc"
    return StoredFile(pending.name, total, digest.hexdigest(), len(head), header_checksum(head))


def _encode_head(
    kind: str, attributes: Mapping[str, Any], sections: Mapping[str, Chunks]
) -> tuple[bytes, list[int], int]:
    """The head, the offsets of the sections and of the blocks' checksums, and the size of the file."""

    def encode(base: int) -> tuple[bytes, list[int], int]:
        offsets, described, position = [], [], base
        for name, chunks in sections.items():
            position = _align(position)
            section = Section(chunks.dtype, chunks.shape, position)
            described.append(_describe(name, section))
            offsets.append(position)
            position += section.size
        position = _align(position)
        blocks = Section(CHECKSUM_DTYPE, (count_blocks(position),), position)
        described.append(_describe(SECTION, blocks))
        offsets.append(position)
        position += blocks.size
        body = json.dumps({"kind": kind, **attributes, "sections": described}, sort_keys=True).encode()
        return body, offsets, _align(position)

    # Offsets depend on the length of the header that they are part of: grow the room until it fits.
    room = 0
    while True:
        body, offsets, total = encode(ALIGNMENT + room)
        if len(body) <= room:
            padded = body.ljust(room)
            return _PREAMBLE.pack(MAGIC, VERSION, room, total) + padded, offsets, total
        room = _align(ALIGNMENT + len(body)) - ALIGNMENT
        if room > MAX_HEADER_BYTES:
            raise SettingsError(
                f"the header would have {room:,} bytes; the maximum is {MAX_HEADER_BYTES:,}, so use fewer fields"
            )


def _describe(name: str, section: Section) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": section.dtype.name,
        "shape": list(section.shape),
        "offset": section.offset,
    }


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def parse_head(head: bytes, file_bytes: int, name: str) -> Header:
    """Read a header that may have been damaged or forged: every number is checked before it is used."""
    header_bytes = check_preamble(head, file_bytes, name)
    if len(head) != ALIGNMENT + header_bytes:
        raise CorruptError(
            f"{name}: damaged header: it says that it has {ALIGNMENT + header_bytes} bytes, "
            f"but the manifest says {len(head)}"
        )
    try:
        described = json.loads(head[ALIGNMENT:].decode("utf-8"))
        kind, listed = described.pop("kind"), described.pop("sections")
        sections = _parse_sections(listed, len(head), file_bytes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{name}: damaged header: {str(error)[:300]}") from None
    if not isinstance(kind, str):
        raise CorruptError(f"{name}: damaged header: kind {str(kind)[:80]}")
    return Header(kind, described, sections)


def view_sections(
    store: Store, stored: StoredFile, wanted: Callable[[str], bool]
) -> tuple[NDArray[np.uint8], Header]:
    """A container in which at least the wanted sections can be read, and its header.

    A local file is mapped. Of a remote one only the header and these sections are fetched, and the rest is zeros.
    """
    name = store.locate(stored.file)
    if not store.is_remote:
        buffer = store.view(stored.file)
        return buffer, parse_head(buffer[: stored.header_bytes].tobytes(), len(buffer), name)
    head, file_bytes = store.head(stored.file, stored.header_bytes)
    header = parse_head(head, file_bytes, name)
    buffer = np.frombuffer(mmap.mmap(-1, file_bytes), dtype=np.uint8)
    for start, stop in _stretches(header, wanted):
        buffer[start:stop] = np.frombuffer(store.fetch(stored.file, start, stop), dtype=np.uint8)
    return buffer, header


def _stretches(header: Header, wanted: Callable[[str], bool]) -> list[list[int]]:
    """The bytes of the wanted sections, in as few stretches as possible: a request costs more than a few bytes."""
    stretches: list[list[int]] = []
    for name, section in header.sections.items():
        if not wanted(name) or not section.size:
            continue
        if not stretches or section.offset - stretches[-1][1] > _SMALL_GAP_BYTES:
            stretches.append([section.offset, section.offset])
        stretches[-1][1] = section.offset + section.size
    return stretches


def find_blocks(header: Header, name: str) -> Section | None:
    """The section with the checksums of blocks; None if the file was written before there were any."""
    section = header.sections.get(SECTION)
    if section is None:
        return None
    if section.dtype != CHECKSUM_DTYPE or section.shape != (count_blocks(section.offset),):
        raise CorruptError(f"{name}: damaged header: the section {SECTION!r} does not fit its file")
    return section


def check_preamble(head: bytes, file_bytes: int, name: str) -> int:
    """Check magic, version and sizes, and return the number of header bytes."""
    if len(head) < _PREAMBLE.size:
        raise CorruptError(f"{name}: {len(head)} bytes of header are too few for a Headrace file")
    magic, version, header_bytes, total = _PREAMBLE.unpack_from(head)
    if magic != MAGIC:
        raise FormatError(f"{name}: not a Headrace file: it starts with {magic!r} instead of {MAGIC!r}")
    check_version(version, name)
    if total != file_bytes:
        raise CorruptError(
            f"{name}: {file_bytes} bytes on disk, but its header says {total}: the file was truncated or overwritten"
        )
    if header_bytes % ALIGNMENT or header_bytes > min(MAX_HEADER_BYTES, file_bytes - ALIGNMENT):
        raise CorruptError(f"{name}: damaged header: it claims {header_bytes} bytes")
    if any(head[_RESERVED_FROM:ALIGNMENT]):
        raise CorruptError(f"{name}: damaged header: its first {ALIGNMENT} bytes do not end in zeros")
    return int(header_bytes)


def check_version(version: int, name: str) -> None:
    if version != VERSION:
        raise VersionError(
            f"{name}: format version {version}, but this Headrace reads version {VERSION}: "
            f"{'upgrade Headrace' if version > VERSION else 'rebuild the dataset'}"
        )


def _parse_sections(listed: Any, data_from: int, file_bytes: int) -> dict[str, Section]:
    """The sections in file order, none of which overlaps the header, another section, or the end of the file."""
    if not isinstance(listed, list):
        raise FormatError("sections are not a list")
    sections: dict[str, Section] = {}
    end = data_from
    for entry in listed:
        name, section = _parse_section(entry)
        if name in sections:
            raise FormatError(f"there are two sections {name[:80]!r}")
        if section.offset % ALIGNMENT or section.offset < end or section.offset + section.size > file_bytes:
            raise FormatError(
                f"section {name[:80]!r} at {section.offset} with {section.size} bytes "
                f"does not fit between {end} and {file_bytes}"
            )
        sections[name] = section
        end = section.offset + section.size
    return sections


def _parse_section(entry: Any) -> tuple[str, Section]:
    name, dtype, shape, offset = entry["name"], entry["dtype"], entry["shape"], entry["offset"]
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"section {str(name)[:80]!r} has the unknown dtype {str(dtype)[:80]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS + 1:
        raise FormatError(f"section {name[:80]!r}: shape {str(shape)[:80]}")
    if not all(type(number) is int and 0 <= number < 2**63 for number in [*shape, offset]):
        raise FormatError(f"section {name[:80]!r}: shape {str(shape)[:80]} at {str(offset)[:80]}")
    return name, Section(np.dtype(dtype).newbyteorder("<"), tuple(shape), offset)
