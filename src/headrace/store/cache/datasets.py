"""Which cached files belong to which dataset, and whether it is in use.

A process that reads a dataset holds a shared lock on `datasets/<id>`, and so do its forked children. Whoever wants to
remove the dataset from the cache needs an exclusive lock. The file's time of modification is when the dataset was last
opened.
"""

import contextlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec

from headrace.errors import StorageError
from headrace.store.cache.directory import CacheDirectory, check_dataset_id, check_group
from headrace.store.cache.locks import LockFile, flocked, open_to_lock, pauses

_LONGEST_WAIT_SECONDS = 10.0


class _Content(msgspec.Struct):
    """What the file of a dataset says."""

    description: str
    groups: list[str]


@dataclass(frozen=True)
class DatasetNote:
    """A dataset that the cache knows."""

    dataset_id: str
    description: str
    groups: tuple[str, ...]
    last_used_seconds: float
    """Since 1970."""


class Lease:
    """Keeps the files of a dataset in the cache until the object and all copies in forked children are gone."""

    def __init__(self, directory: CacheDirectory, dataset_id: str) -> None:
        check_dataset_id(dataset_id)
        self.dataset_id = dataset_id
        path = directory.datasets / dataset_id
        self.descriptor = _lock_shared(path)
        # Closed and not unlocked: the lock is also that of forked children, until they are gone.
        weakref.finalize(self, os.close, self.descriptor)

    def note(self, groups: Sequence[str], description: str) -> None:
        """Write down what the lease is for, and that the dataset is opened now."""
        for group in groups:
            check_group(group)
        found = _read(self.descriptor)
        if found is None or sorted(found.groups) != sorted(groups):
            content = msgspec.json.encode(_Content(without_secrets(description), list(groups)))
            os.pwrite(self.descriptor, content, 0)
            os.ftruncate(self.descriptor, len(content))
        # A file of another user can be shared, but its time can be changed by its owner only.
        with contextlib.suppress(PermissionError):
            os.utime(self.descriptor)


def _lock_shared(path: Path) -> int:
    for _ in pauses(_LONGEST_WAIT_SECONDS):
        descriptor = open_to_lock(path)
        try:
            # If it was removed between our opening and our locking, others see a new file, and ours protects nothing.
            if flocked(descriptor, shared=True) and _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise StorageError(f"{path}: is locked by a process that removes it; try again")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> _Content | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, os.fstat(descriptor).st_size, 0), type=_Content)
    except msgspec.DecodeError:
        return None


def read_notes(directory: CacheDirectory) -> list[DatasetNote]:
    """All datasets of the cache, the one that was opened longest ago first."""
    notes = []
    for dataset_id in directory.dataset_ids():
        with contextlib.suppress(FileNotFoundError):
            notes.append(_read_note(directory.datasets / dataset_id))
    return sorted(notes, key=lambda note: note.last_used_seconds)


def _read_note(path: Path) -> DatasetNote:
    descriptor = open_to_lock(path, create=False)
    try:
        content = _read(descriptor) or _Content("", [])
        last_used = os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
    return DatasetNote(path.name, content.description, tuple(content.groups), last_used)


def lock_unused(directory: CacheDirectory, dataset_id: str) -> LockFile | None:
    """The exclusive lock of a dataset that nobody uses; None if somebody does, or if it is gone."""
    try:
        file = LockFile(directory.datasets / dataset_id, create=False)
    except OSError:
        return None
    if file.lock():
        return file
    file.close()
    return None


def without_secrets(address: str) -> str:
    """An address without user, password and query, which may contain keys."""
    if "://" not in address:
        return address
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""  # nobody can say which part of it is secret
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
