"""Making room: the files of datasets that no process uses are removed, those that were opened longest ago first.

A file may belong to several datasets (versions of one share most of their shards): it goes with the last of them.
Files that belong to no dataset go before all others. Call these functions with the cache's size locked.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterable

from headrace.store.cache.datasets import DatasetNote, lock_unused, read_notes
from headrace.store.cache.directory import CacheDirectory


def evict(directory: CacheDirectory, goal_bytes: int, spared: Collection[str] = ()) -> int:
    """Remove files until so many bytes are freed, or nothing is left that may go; returns what was freed. The groups
    in `spared` stay."""
    notes = read_notes(directory)
    freed = remove_groups(directory, ownerless_groups(directory, notes, spared), goal_bytes)
    for note in list(notes):
        wanted = goal_bytes - freed
        if wanted <= 0:
            break
        removed = remove_dataset(directory, note, notes, wanted, spared)
        if removed is None:
            continue
        freed += removed
        if removed < wanted:
            # It is gone: what it shared with another dataset is that one's alone now.
            notes.remove(note)
    return freed


def ownerless_groups(
    directory: CacheDirectory, notes: Iterable[DatasetNote], spared: Collection[str] = ()
) -> list[str]:
    owned = {group for note in notes for group in note.groups}
    return [group for group in directory.groups() if group not in owned and group not in spared]


def remove_dataset(
    directory: CacheDirectory,
    note: DatasetNote,
    notes: Iterable[DatasetNote],
    goal_bytes: int,
    spared: Collection[str] = (),
) -> int | None:
    """Remove files that belong to this dataset only, and the note of it with the last of them, until so many bytes are
    freed. Returns how many were, or None if the dataset is in use."""
    lock = lock_unused(directory, note.dataset_id)
    if lock is None:
        return None
    with lock:
        owners = Counter(group for each in notes for group in set(each.groups))
        # Another process may have removed this dataset since the notes were read; then its own groups are empty.
        exclusive = [group for group in note.groups if owners[group] <= 1 and group not in spared]
        freed = remove_groups(directory, exclusive, goal_bytes)
        if freed < goal_bytes:
            with contextlib.suppress(OSError):
                os.unlink(directory.datasets / note.dataset_id)
        return freed


def remove_groups(directory: CacheDirectory, groups: Iterable[str], goal_bytes: int) -> int:
    freed = 0
    for group in groups:
        if freed >= goal_bytes:
            break
        freed += _remove_group(directory, group, goal_bytes - freed)
    return freed


def _remove_group(directory: CacheDirectory, group: str, goal_bytes: int) -> int:
    freed = 0
    for name, size in directory.listing(group).complete.items():
        if freed >= goal_bytes:
            return freed
        with contextlib.suppress(OSError):
            os.unlink(directory.file(group, name))
            freed += size
    # Files of others, or files that are being written, keep the folder alive.
    with contextlib.suppress(OSError):
        os.rmdir(directory.data / group)
    return freed
