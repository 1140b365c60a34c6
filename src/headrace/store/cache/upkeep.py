"""Looking after a cache: what it holds, removing it, checking it. None of this disturbs the processes that use it."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.errors import StorageError
from headrace.store.cache.admission import CacheSize, count_bytes, locked_size
from headrace.store.cache.datasets import DatasetNote, lock_unused, read_notes
from headrace.store.cache.directory import HEADER_BYTES, CacheDirectory
from headrace.store.cache.eviction import ownerless_groups, remove_dataset, remove_groups
from headrace.store.cache.files import DamagedFile, check_file

_BYTES_AT_ONCE = 2**30
"""How much is removed before other processes may write again."""
_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class CachedDataset:
    """What the cache holds of a dataset."""

    dataset_id: str
    """Empty for files that belong to no dataset."""
    address: str
    bytes: int
    files: int
    last_used_unix_seconds: float | None
    """When it was last opened, or now if it is in use, in seconds since 1970."""
    in_use: bool


@dataclass(frozen=True)
class Contents:
    """What a cache holds. Datasets may share files, so that the totals can be less than the sums."""

    datasets: list[CachedDataset]
    bytes: int
    files: int


def contents(directory: CacheDirectory) -> Contents:
    """All datasets, the one that was used last first."""
    notes = read_notes(directory)
    sizes = {group: list(directory.listing(group).complete.values()) for group in directory.groups()}
    datasets = [_describe(directory, note, sizes) for note in notes]
    datasets.sort(key=lambda each: -(each.last_used_unix_seconds or 0))
    ownerless = [size for group in ownerless_groups(directory, notes) for size in sizes.get(group, [])]
    if ownerless:
        datasets.append(CachedDataset("", "", sum(ownerless), len(ownerless), None, False))
    total = sum(sum(files) for files in sizes.values())
    return Contents(datasets, total, sum(len(files) for files in sizes.values()))


def _describe(directory: CacheDirectory, note: DatasetNote, sizes: dict[str, list[int]]) -> CachedDataset:
    lock = lock_unused(directory, note.dataset_id)
    in_use = lock is None
    if lock is not None:
        lock.close()
    files = [size for group in set(note.groups) for size in sizes.get(group, [])]
    last_used = time.time() if in_use else note.last_used_seconds
    return CachedDataset(note.dataset_id, note.description, sum(files), len(files), last_used, in_use)


@dataclass(frozen=True)
class Cleared:
    freed_bytes: int
    kept: list[str]
    """The datasets that are in use."""


def clear(
    directory: CacheDirectory,
    dataset_id: str | None = None,
    progress: Callable[[int], None] = lambda freed: None,
) -> Cleared:
    """Remove everything that is not in use, or one dataset only. Files that it shares with other datasets stay."""
    freed, kept = 0, []
    for note in read_notes(directory):
        if dataset_id not in (None, note.dataset_id):
            continue
        removed = _repeat(directory, progress, functools.partial(_remove, directory, note))
        if removed is None:
            kept.append(note.dataset_id)
        freed += removed or 0
    if dataset_id is None:
        freed += _repeat(directory, progress, functools.partial(_remove_ownerless, directory)) or 0
    with _size(directory) as size:
        # Counting also removes what writers have left that were killed.
        size.set_counted(count_bytes(directory))
    return Cleared(freed, kept)


def _remove(directory: CacheDirectory, note: DatasetNote) -> int | None:
    return remove_dataset(directory, note, read_notes(directory), _BYTES_AT_ONCE)


def _remove_ownerless(directory: CacheDirectory) -> int:
    groups = ownerless_groups(directory, read_notes(directory))
    return remove_groups(directory, groups, _BYTES_AT_ONCE)


def _repeat(
    directory: CacheDirectory, progress: Callable[[int], None], remove: Callable[[], int | None]
) -> int | None:
    """Remove some, let others write, and go on until there is nothing left. None if nothing could be removed."""
    total = 0
    while True:
        with _size(directory) as size:
            freed = remove()
            size.add(-(freed or 0))
        if freed is None:
            return total or None
        total += freed
        progress(freed)
        if freed < _BYTES_AT_ONCE:
            return total


@contextlib.contextmanager
def _size(directory: CacheDirectory) -> Iterator[CacheSize]:
    try:
        with locked_size(directory, _WAIT_SECONDS) as size:
            yield size
    except BlockingIOError as error:
        raise StorageError(
            f"{directory.path}: the cache has been locked by another process for {_WAIT_SECONDS:.0f} seconds; "
            "end that process, or try again"
        ) from error


@dataclass(frozen=True)
class CheckedFile:
    group: str
    key: str
    bytes: int
    problem: str = ""


def check(directory: CacheDirectory) -> Iterator[CheckedFile]:
    """Read every file and compare its checksum. Those that are damaged are removed."""
    for group in directory.groups():
        for key, size in directory.listing(group).complete.items():
            try:
                if check_file(directory.file(group, key), f"{group}/{key}", size - HEADER_BYTES):
                    yield CheckedFile(group, key, size)
            except DamagedFile as error:
                _remove_file(directory, group, key, size)
                yield CheckedFile(group, key, size, str(error))


def _remove_file(directory: CacheDirectory, group: str, key: str, size: int) -> None:
    with _size(directory) as whole, contextlib.suppress(FileNotFoundError):
        os.unlink(directory.file(group, key))
        whole.add(-size)
