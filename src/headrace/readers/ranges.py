"""Files of bytes, plain or compressed: cut at delimiters, and read in blocks that end at a delimiter.

Plain files are mapped, and a range is `[start, stop)` in bytes, where both are the start of a record (or the end of
the file). A compressed file cannot be read from the middle: it is a single range, and its bytes are counted after
decompression.
"""

import gzip
import mmap
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import StorageError
from headrace.format.checksum import checksum
from headrace.readers.bounds import Bound
from headrace.store.files import read_head
from headrace.store.maps import map_bytes

_READ_BYTES = 2**20
_ZSTD_READ_BYTES = 2**10
"""Few, because a kilobyte can become 32 megabytes when it is decompressed."""
_NEAR_BYTES = 2**16


class Content(Protocol):
    """The bytes of a file: an array over a map, or an object that reads them on demand."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> NDArray[np.uint8]: ...


def file_size(path: Path) -> int:
    """The size of a regular file. Raises StorageError for anything else, or if the file cannot be read."""
    try:
        status = path.stat()
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        raise StorageError(f"{path}: is a directory; give the files to read")
    if not stat.S_ISREG(status.st_mode):
        kind = "a pipe" if stat.S_ISFIFO(status.st_mode) else "a device or socket"
        raise StorageError(
            f"{path}: is {kind}, and only regular files can be read; leave it out, or copy its content to a file "
            "(a build can also read its standard input)"
        )
    if not os.access(path, os.R_OK):
        raise StorageError(f"{path}: cannot be read: permission denied; check the permissions of the file")
    return status.st_size


def mapped(path: Path) -> NDArray[np.uint8]:
    """A file's bytes as a read-only map."""
    file_size(path)
    return map_bytes(path)


def join(sizes: Sequence[int], target_bytes: int) -> list[tuple[int, int]]:
    """Ranges of consecutive units (row groups, batches) of about `target_bytes` each; at least one range."""
    cuts, total = [0], 0
    for number, size in enumerate(sizes):
        if total and total + size > target_bytes:
            cuts.append(number)
            total = 0
        total += size
    return list(zip(cuts, [*cuts[1:], len(sizes)], strict=True))


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in (".gz", ".zst")


def cut(path: Path, target_bytes: int, delimiter: bytes) -> list[tuple[int, int]]:
    """Ranges of about `target_bytes`, each ending after a delimiter. Only a few bytes around each cut are read."""
    size = file_size(path)
    if is_compressed(path) or size <= target_bytes:
        return [(0, size)]
    cuts = [0]
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        while cuts[-1] + target_bytes < size:
            # Start just before the target, so that a record that ends exactly there ends the range.
            wanted = max(cuts[-1], cuts[-1] + target_bytes - len(delimiter))
            found = first_delimiter(content, delimiter, cuts[-1], wanted)
            if found < 0 or found + len(delimiter) >= size:
                break
            cuts.append(found + len(delimiter))
    return list(zip(cuts, [*cuts[1:], size], strict=True))


def first_delimiter(
    content: mmap.mmap, delimiter: bytes, start: int, wanted: int, stop: int | None = None
) -> int:
    """The first delimiter at `wanted` or later that ends by `stop`, as found by reading from `start`, or -1.

    In "x\\n\\n\\ny" two occurrences of "\\n\\n" overlap, and only the first is a delimiter. So go back to where a
    chain of overlapping occurrences begins, and forward from there.
    """
    length = len(delimiter)
    chain = wanted
    while (earlier := content.rfind(delimiter, max(start, chain - length + 1), chain + length - 1)) >= 0:
        chain = earlier
    end = len(content) if stop is None else stop
    found = content.find(delimiter, chain, end)
    while 0 <= found < wanted:
        found = content.find(delimiter, found + length, end)
    return found


def _last_delimiter(content: bytes | bytearray, delimiter: bytes, start: int) -> int:
    """The last delimiter at `start` or later, as found by reading from there; -1 if there is none."""
    found = content.rfind(delimiter, start)
    if found < 0 or not overlaps_itself(delimiter):
        return found
    position = content.find(delimiter, start)
    while position >= 0:
        found, position = position, content.find(delimiter, position + len(delimiter))
    return found


def overlaps_itself(delimiter: bytes) -> bool:
    return any(delimiter.startswith(delimiter[-size:]) for size in range(1, len(delimiter)))


def fingerprint(path: Path, start: int, stop: int) -> str:
    """The checksum of a range's bytes as they are on disk (compressed files are not decompressed)."""
    return checksum(mapped(path)[start:stop])


def blocks(
    path: Path, start: int, stop: int, delimiter: bytes, block_bytes: int, bound: Bound | None = None
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """Pieces of a range, each with its position; each ends after a delimiter, except perhaps the last.

    Records beyond the `bound` are left out.
    """
    if is_compressed(path):
        return compressed_blocks(path, delimiter, block_bytes, bound)
    return blocks_of(mapped(path), start, stop, delimiter, block_bytes, bound)


def blocks_of(
    content: "Content", start: int, stop: int, delimiter: bytes, block_bytes: int, bound: Bound | None = None
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    position = start
    while position < stop:
        # The last block takes everything that is left, rather than leaving a tiny rest for one more.
        is_last = stop - position <= block_bytes + block_bytes // 2
        end = stop if is_last else _block_end(content, position, stop, delimiter, block_bytes)
        if bound is not None and end - position > bound.most:
            first_end, size = _first_record(content, position, end, delimiter, block_bytes)
            if size > bound.most:
                bound.tell(position, size)
                position = first_end
                continue
        yield from _within(content[position:end], position, delimiter, bound)
        position = end


def _first_record(
    content: "Content", position: int, stop: int, delimiter: bytes, block_bytes: int
) -> tuple[int, int]:
    """Where the record that begins at `position` ends, and its size without the delimiter. Only some of it is in
    memory at a time."""
    searched = position
    while searched < stop:
        end = min(searched + block_bytes + len(delimiter), stop)
        found = content[searched:end].tobytes().find(delimiter)
        if found >= 0:
            return searched + found + len(delimiter), searched + found - position
        searched = end if end == stop else end - len(delimiter) + 1
    return stop, stop - position


def _within(
    data: NDArray[np.uint8], position: int, delimiter: bytes, bound: Bound | None
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """The parts of a block between the records that are beyond the bound; usually the whole block."""
    if bound is None or len(data) <= bound.most:
        yield data, position
        return
    content = data.tobytes()
    first = start = 0
    while start < len(content):
        found = content.find(delimiter, start)
        stop = len(content) if found < 0 else found
        end = min(stop + len(delimiter), len(content))
        if stop - start > bound.most:
            if start > first:
                yield data[first:start], position + first
            bound.tell(position + start, stop - start)
            first = end
        start = end
    if first < len(content):
        yield data[first:], position + first


def _block_end(content: "Content", position: int, stop: int, delimiter: bytes, block_bytes: int) -> int:
    """Where a block of about `block_bytes` that begins at `position` ends: after a delimiter, or at `stop`."""
    end, searched = position + block_bytes, position
    while end < stop:
        # Most blocks have a delimiter near their end. Otherwise each byte is searched only once more, however long the
        # record is.
        near = searched if overlaps_itself(delimiter) else max(searched, end - _NEAR_BYTES)
        found = _last_delimiter(content[near:end].tobytes(), delimiter, 0)
        if found < 0 and near > searched:
            near = searched
            found = _last_delimiter(content[near:end].tobytes(), delimiter, 0)
        if found >= 0:
            return near + found + len(delimiter)
        searched = max(position, end - len(delimiter) + 1)
        end = min(end + block_bytes, stop)
    return end


def starting_in(content: mmap.mmap, start: int, stop: int, delimiter: bytes) -> tuple[int, int] | None:
    """The range of the records that start in bytes [start, stop), each ending with a delimiter; None if there are none.

    A record starts at byte 0 and after each delimiter. For lines, with a cut every 6 bytes:

        a b c \\n d e | f g \\n h \\n i | j k l m n o | p \\n
        "abc", "defg"   "h", "ijklmnop"  none           none, since no record starts at the end of the file
    """
    length, size = len(delimiter), len(content)
    first = 0
    if start:
        found = first_delimiter(content, delimiter, 0, max(0, start - length), stop)
        first = found + length if found >= 0 else size
    if first >= min(stop, size):
        return None
    if stop >= size:
        return first, size
    found = first_delimiter(content, delimiter, first, max(first, stop - length))
    return first, size if found < 0 else found + length


def compressed_blocks(
    path: Path, delimiter: bytes, block_bytes: int, bound: Bound | None = None
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    position, searched, pending = 0, 0, bytearray()
    chunks = decompressed(path)
    for chunk in chunks:
        pending += chunk
        if len(pending) < block_bytes:
            continue
        found = _last_delimiter(pending, delimiter, searched)
        if found >= 0:
            end = found + len(delimiter)
            yield from _within(np.frombuffer(bytes(pending[:end]), np.uint8), position, delimiter, bound)
            position += end
            del pending[:end]
            searched = 0
        else:
            searched = max(0, len(pending) - len(delimiter) + 1)
            if bound is not None and searched > bound.most:
                size = _skip_record(chunks, pending, delimiter)
                bound.tell(position, size)
                position += size + len(delimiter)
                searched = 0
    if pending:
        yield from _within(np.frombuffer(bytes(pending), dtype=np.uint8), position, delimiter, bound)


def _skip_record(chunks: Iterator[bytes], pending: bytearray, delimiter: bytes) -> int:
    """Read on until the record that begins with `pending` has ended, keeping only what follows it. Returns its size."""
    size = 0
    for chunk in chunks:
        # A delimiter may begin in one chunk and end in the next.
        kept = len(delimiter) - 1
        size += len(pending) - kept
        del pending[: len(pending) - kept]
        pending += chunk
        found = pending.find(delimiter)
        if found >= 0:
            del pending[: found + len(delimiter)]
            return size + found
    size += len(pending)
    pending.clear()
    return size


def head(path: Path, count: int) -> bytes:
    """The first `count` bytes, decompressed if the file's name says that it is compressed."""
    if not is_compressed(path):
        return read_head(path, count)[0]
    content = bytearray()
    for chunk in decompressed(path):
        content += chunk
        if len(content) >= count:
            break
    return bytes(content[:count])


def read_all(path: Path, bound: Bound | None = None) -> bytes | None:
    """A whole file, decompressed if its name says that it is compressed; None if it is beyond the bound."""
    if not is_compressed(path):
        size = file_size(path)
        if bound is not None and size > bound.most:
            bound.tell(0, size)
            return None
        return mapped(path).tobytes()
    content = bytearray()
    size = 0
    for chunk in decompressed(path):
        size += len(chunk)
        if bound is None or size <= bound.most:
            content += chunk
        else:
            content.clear()
    if bound is not None and size > bound.most:
        bound.tell(0, size)
        return None
    return bytes(content)


def decompressed(path: Path) -> Iterator[bytes]:
    """The content of a compressed file, about one megabyte at a time."""
    file_size(path)
    try:
        yield from _gzip_chunks(path) if path.suffix.lower() == ".gz" else _zstd_chunks(path)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise StorageError(
            f"{path}: cannot be decompressed: {error}. Check that it was written and copied completely"
        ) from error


def _gzip_chunks(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            yield chunk


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    import zstandard

    # Not zstandard.open, which silently treats a truncated frame as the end of the file.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    with open(path, "rb") as file:
        while compressed := file.read(_ZSTD_READ_BYTES):
            # Files that were written by several threads, or appended to, hold several frames one after the other.
            while compressed:
                frame = frame or decompressor.decompressobj()
                try:
                    chunk = frame.decompress(compressed)
                except zstandard.ZstdError as error:
                    raise ValueError(str(error)) from error
                compressed = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
                if chunk:
                    yield chunk
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")
