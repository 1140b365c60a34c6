"""What tests of the cache share: groups, units of bytes that are told apart, and a look at the directory."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.store.cache import Cache
from headrace.store.cache.directory import HEADER_BYTES

GROUPS = [f"{number:032x}" for number in range(16)]
UNIT_BYTES = 1000
UNIT_ON_DISK = UNIT_BYTES + HEADER_BYTES


def unit_key(number: int, count: int = UNIT_BYTES) -> str:
    return f"{number * count}-{count}"


def unit_content(group: str, number: int, count: int = UNIT_BYTES) -> bytes:
    return np.random.default_rng([int(group, 16), number]).bytes(count)


def put_unit(cache: Cache, group: str, number: int, count: int = UNIT_BYTES) -> bool:
    """Whether the cache has admitted it; what it gives back is what was put."""
    content = unit_content(group, number, count)
    mapped = cache.put(group, unit_key(number, count), content)
    assert mapped is None or mapped.tobytes() == content
    return mapped is not None


def has_unit(cache: Cache, group: str, number: int, count: int = UNIT_BYTES) -> bool:
    """Whether the cache has it; what it has is right."""
    mapped = cache.get(group, unit_key(number, count), count)
    assert mapped is None or mapped.tobytes() == unit_content(group, number, count)
    return mapped is not None


def held_units(cache: Cache, group: str, numbers: int = 100) -> list[int]:
    return [number for number in range(numbers) if has_unit(cache, group, number)]


def files_below(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def disk_bytes(cache: Cache) -> int:
    """What all files below `data` take, whoever wrote them."""
    total = 0
    for path in cache.directory.data.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # removed in the meantime
    return total


def change_file(path: Path, change: Callable[[bytearray], None]) -> None:
    """In place, so that the file keeps its size and what maps it sees the change."""
    content = bytearray(path.read_bytes())
    change(content)
    with open(path, "r+b") as file:
        file.write(content)
