"""Records between delimiters: each reader finds the records of its block alone, without asking anyone.

A block's records are those that start in its bytes; a record starts at byte 0 and after each delimiter. So a reader
goes to the first delimiter that ends at its cut or later, and reads on until a record ends at the next cut or after it.
Blocks of 6 bytes, lines:

    a b c \\n d e | f g \\n h \\n i | j k l m n o | p \\n
    "abc", "defg"   "h", "ijklmnop"  nothing        nothing, as the end of the file starts no record
"""

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from headrace.readers import ranges
from headrace.streams.blocks import Block
from headrace.streams.formats.reader import opened

READ_BYTES = 2**20
_READ_BEYOND = 2**14
"""How much is read at first of a record that goes on beyond its block."""


def pieces(block: Block, delimiter: bytes) -> Iterator[tuple[bytes, int]]:
    """The block's records, some whole ones at a time, and the byte at which they begin."""
    path = Path(block.file.path)
    with opened(block.file) as file:
        if ranges.is_compressed(path):
            # One block, whose bytes are counted after decompression.
            yield from _whole_records(ranges.decompressed(path), 0, None, delimiter)
            return
        start = _first_start(file, block, delimiter)
        if start is not None:
            yield from _whole_records(chunks(file, start, block.limit), start, block.limit, delimiter)


def chunks(file: BinaryIO, start: int, limit: int) -> Iterator[bytes]:
    """The file from `start` to its end, mostly in pieces of a megabyte that go up to `limit` and no farther."""
    file.seek(start)
    position, beyond = start, _READ_BEYOND
    while True:
        if position < limit:
            wanted = min(READ_BYTES, limit - position)
        else:
            wanted, beyond = beyond, min(2 * beyond, READ_BYTES)
        chunk = file.read(wanted)
        if not chunk:
            return
        position += len(chunk)
        yield chunk


def _first_start(file: BinaryIO, block: Block, delimiter: bytes) -> int | None:
    """Where the first record of the block begins."""
    if block.cut == 0:
        return 0 if block.limit else None
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        wanted = max(0, block.cut - len(delimiter))
        found = ranges.first_delimiter(content, delimiter, 0, wanted, block.limit)
    start = found + len(delimiter)
    return start if found >= 0 and start < block.limit else None


def _whole_records(
    chunks: Iterable[bytes], start: int, limit: int | None, delimiter: bytes
) -> Iterator[tuple[bytes, int]]:
    """From the start of a record on, until one ends at `limit` or later."""
    held, at, searched = bytearray(), start, 0
    for chunk in chunks:
        held += chunk
        end = _end(held, delimiter, searched, None if limit is None else limit - at)
        if end:
            yield bytes(held[:end]), at
            at += end
            del held[:end]
            if limit is not None and at >= limit:
                return
        searched = max(0, len(held) - len(delimiter) + 1)
    if held:
        yield bytes(held), at


def _end(held: bytearray, delimiter: bytes, searched: int, wanted: int | None) -> int:
    """Where the first record ends that ends at `wanted` or later, else the last whole record, else 0."""
    length = len(delimiter)
    if not ranges.overlaps_itself(delimiter):
        found = -1
        if wanted is not None and wanted - length <= len(held):
            found = held.find(delimiter, max(searched, wanted - length))
        if found < 0:
            found = held.rfind(delimiter, searched)
        return found + length if found >= 0 else 0
    # Occurrences that overlap are no delimiters: go from one to the next.
    end, found = 0, held.find(delimiter, searched)
    while found >= 0:
        end = found + length
        if wanted is not None and end >= wanted:
            break
        found = held.find(delimiter, end)
    return end
