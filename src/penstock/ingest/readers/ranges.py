"""Files of bytes, plain or compressed: cut at delimiters, read in blocks that end at a delimiter.

Plain files are mapped, and a range is `[start, stop)` in bytes, both at the start of a record (or the end of the
file). A compressed file cannot be entered in the middle: it is one range, and its bytes are counted after
decompression.
"""

import gzip
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StorageError
from penstock.format.checksum import checksum
from penstock.store.local import map_bytes

_READ_BYTES = 2**20


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in (".gz", ".zst")


def cut(path: Path, target_bytes: int, delimiter: bytes) -> list[tuple[int, int]]:
    """Ranges of about `target_bytes`, each ending after a delimiter. Looks at a few bytes around each cut."""
    size = path.stat().st_size
    if is_compressed(path) or size <= target_bytes:
        return [(0, size)]
    cuts = [0]
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        while cuts[-1] + target_bytes < size:
            # Start just before the target, so that a record which ends exactly there ends the range.
            found = content.find(delimiter, max(cuts[-1], cuts[-1] + target_bytes - len(delimiter)))
            if found < 0 or found + len(delimiter) >= size:
                break
            cuts.append(found + len(delimiter))
    return list(zip(cuts, [*cuts[1:], size], strict=True))


def fingerprint(path: Path, start: int, stop: int) -> str:
    """The checksum of a range's bytes as they lie on disk (compressed ones as they are)."""
    return checksum(map_bytes(path)[start:stop])


def blocks(
    path: Path, start: int, stop: int, delimiter: bytes, block_bytes: int
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """Pieces of a range with their place in it, each ending after a delimiter, but perhaps the last."""
    if is_compressed(path):
        yield from _compressed_blocks(path, delimiter, block_bytes)
        return
    content = map_bytes(path)[start:stop]
    position = 0
    while position < len(content):
        end = min(position + block_bytes, len(content))
        while end < len(content):
            window = content[position:end].tobytes()
            found = window.rfind(delimiter)
            if found >= 0:
                end = position + found + len(delimiter)
                break
            end = min(end + block_bytes, len(content))
        yield content[position:end], start + position
        position = end


def _compressed_blocks(path: Path, delimiter: bytes, block_bytes: int) -> Iterator[tuple[NDArray[np.uint8], int]]:
    position, pending = 0, bytearray()
    for chunk in _decompressed(path):
        pending += chunk
        if len(pending) < block_bytes:
            continue
        found = pending.rfind(delimiter)
        if found >= 0:
            end = found + len(delimiter)
            yield np.frombuffer(bytes(pending[:end]), dtype=np.uint8), position
            position += end
            del pending[:end]
    if pending:
        yield np.frombuffer(bytes(pending), dtype=np.uint8), position


def read_all(path: Path) -> bytes:
    """A whole file, decompressed if its name says so."""
    return b"".join(_decompressed(path)) if is_compressed(path) else path.read_bytes()


def _decompressed(path: Path) -> Iterator[bytes]:
    try:
        with _open_compressed(path) as file:
            while chunk := file.read(_READ_BYTES):
                yield chunk
    except (EOFError, OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be decompressed: {error}") from error


def _open_compressed(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    import zstandard

    # Files written by several threads or appended to hold several frames: read across them.
    return cast(BinaryIO, zstandard.open(path, "rb", dctx=zstandard.ZstdDecompressor(max_window_size=2**31)))


