"""Files of bytes, plain or compressed: cut at delimiters, and read in blocks that end at a delimiter.

Plain files are mapped, and a range is `[start, stop)` in bytes, where both are the start of a record (or the end of
the file). A compressed file cannot be read from the middle: it is a single range, and its bytes are counted after
decompression.
"""

import gzip
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError, StorageError
from headrace.format.checksum import checksum
from headrace.readers.bounds import Bound
from headrace.readers.raw_file import Content, RawFile
from headrace.readers.search import first_delimiter

_READ_BYTES = 2**20
_ZSTD_READ_BYTES = 2**10
"""Few, because a kilobyte can become 32 megabytes when it is decompressed."""
_NEAR_BYTES = 2**16


def join(sizes: Sequence[int], target_bytes: int) -> list[tuple[int, int]]:
    """Ranges of consecutive units (row groups, batches) of about `target_bytes` each; at least one range."""
    cuts, total = [0], 0
    for number, size in enumerate(sizes):
        if total and total + size > target_bytes:
            cuts.append(number)
            total = 0
        total += size
    return list(zip(cuts, [*cuts[1:], len(sizes)], strict=True))


def is_compressed(raw: RawFile) -> bool:
    return raw.endings[-1:] in ([".gz"], [".zst"])


def cut(raw: RawFile, target_bytes: int, delimiter: bytes) -> list[tuple[int, int]]:
    """Ranges of about `target_bytes`, each ending after a delimiter. Only a few bytes around each cut are read."""
    size = raw.size()
    if is_compressed(raw) or size <= target_bytes:
        return [(0, size)]
    cuts = [0]
    content = raw.content()
    while cuts[-1] + target_bytes < size:
        # Start just before the target, so that a record that ends exactly there ends the range.
        wanted = max(cuts[-1], cuts[-1] + target_bytes - len(delimiter))
        found = first_delimiter(content, delimiter, cuts[-1], wanted)
        if found < 0 or found + len(delimiter) >= size:
            break
        cuts.append(found + len(delimiter))
    return list(zip(cuts, [*cuts[1:], size], strict=True))


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


def fingerprint(raw: RawFile, start: int, stop: int) -> str:
    """The checksum of a range's bytes as they are stored (compressed files are not decompressed)."""
    return checksum(raw.content()[start:stop])


def blocks(
    raw: RawFile, start: int, stop: int, delimiter: bytes, block_bytes: int, bound: Bound | None = None
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """Pieces of a range, each with its position; each ends after a delimiter, except perhaps the last.

    Records beyond the `bound` are left out.
    """
    if is_compressed(raw):
        return compressed_blocks(raw, delimiter, block_bytes, bound)
    return blocks_of(raw.content(), start, stop, delimiter, block_bytes, bound)


def blocks_of(
    content: Content, start: int, stop: int, delimiter: bytes, block_bytes: int, bound: Bound | None = None
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
    content: Content, position: int, stop: int, delimiter: bytes, block_bytes: int
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


def _block_end(content: Content, position: int, stop: int, delimiter: bytes, block_bytes: int) -> int:
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


def starting_in(content: Content, start: int, stop: int, delimiter: bytes) -> tuple[int, int] | None:
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
    raw: RawFile, delimiter: bytes, block_bytes: int, bound: Bound | None = None
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    position, searched, pending = 0, 0, bytearray()
    chunks = decompressed(raw)
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


def head(raw: RawFile, count: int) -> bytes:
    """The first `count` bytes, decompressed if the file's name says that it is compressed."""
    if not is_compressed(raw):
        with raw.reading() as content:
            return content[:count].tobytes()
    unpacked = bytearray()
    for chunk in decompressed(raw):
        unpacked += chunk
        if len(unpacked) >= count:
            break
    return bytes(unpacked[:count])


def read_all(raw: RawFile, bound: Bound | None = None) -> bytes | None:
    """A whole file, decompressed if its name says that it is compressed; None if it is beyond the bound."""
    if not is_compressed(raw):
        size = raw.size()
        if bound is not None and size > bound.most:
            bound.tell(0, size)
            return None
        return raw.content()[:size].tobytes()
    content = bytearray()
    size = 0
    for chunk in decompressed(raw):
        size += len(chunk)
        if bound is None or size <= bound.most:
            content += chunk
        else:
            content.clear()
    if bound is not None and size > bound.most:
        bound.tell(0, size)
        return None
    return bytes(content)


def decompressed(raw: RawFile) -> Iterator[bytes]:
    """The content of a compressed file, about one megabyte at a time."""
    raw.size()
    try:
        yield from _gzip_chunks(raw) if raw.endings[-1:] == [".gz"] else _zstd_chunks(raw)
    except HeadraceError:
        raise
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise StorageError(
            f"{raw}: cannot be decompressed: {error}. Check that it was written and copied completely"
        ) from error


def _gzip_chunks(raw: RawFile) -> Iterator[bytes]:
    with raw.open() as packed, gzip.open(packed, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            yield chunk


def _zstd_chunks(raw: RawFile) -> Iterator[bytes]:
    import zstandard

    # Not zstandard.open, which silently treats a truncated frame as the end of the file.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    with raw.open() as file:
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
