"""The directory of a cache: where everything is, and which files are ours."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import SettingsError, StorageError
from headrace.store.files import TEMPORARY_PREFIX

MARK_NAME = ".headrace-cache"
"""The empty file that marks a directory as a cache."""
HEADER_BYTES = 64
"""What a cached file holds in front of its bytes (`files.py`)."""

_GROUP = re.compile(r"[0-9a-f]{32}")
_KEY = re.compile(r"[0-9]{1,20}-([0-9]{1,20})")
_TEMPORARY = re.compile(re.escape(TEMPORARY_PREFIX) + r"[0-9a-f]{16}-[0-9]{1,20}-([0-9]{1,20})")
_DATASET = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}")


@dataclass
class Listing:
    """The files of a group that are ours, by name, with the size that the name tells."""

    complete: dict[str, int] = field(default_factory=dict)
    temporary: dict[str, int] = field(default_factory=dict)


class CacheDirectory:
    def __init__(self, path: Path) -> None:
        # Absolute from the start: files are opened later, perhaps from another working directory.
        self.path = path.absolute()
        self.data = self.path / "data"
        self._data_name = str(self.data)
        self.datasets = self.path / "datasets"
        self.locks = self.path / "locks"
        self.size = self.path / "size"

    def is_cache(self) -> bool:
        """Whether there is a cache here, which may be empty."""
        return (self.path / MARK_NAME).is_file()

    def is_empty(self) -> bool:
        return self.path.is_dir() and not os.listdir(self.path)

    def claim(self) -> None:
        """Make the directory a cache, if it is none yet. One with somebody else's files is refused."""
        self.path.mkdir(parents=True, exist_ok=True)
        held = os.listdir(self.path)
        if held and MARK_NAME not in held:
            raise SettingsError(
                f"{self.path}: holds files and is not a cache of Headrace, for example {sorted(held)[0]!r}; "
                f"choose an empty directory, such as {self.path / 'headrace'}"
            )
        if MARK_NAME not in held:
            # The mark comes first, so that nobody ever sees our files without it.
            (self.path / MARK_NAME).touch()
        for folder in (self.data, self.datasets, self.locks):
            folder.mkdir(exist_ok=True)
            if folder.is_symlink():
                raise SettingsError(
                    f"{folder}: is a symbolic link, but a cache must be in one place; move the whole cache "
                    "to another disk and link to it, or remove the link"
                )

    def file(self, group: str, key: str) -> str:
        # A text and not a Path, which would cost half as much as all the rest of a look into the cache.
        return f"{self._data_name}/{group}/{key}"

    def groups(self) -> list[str]:
        """The names of all folders of cached files."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.data) as entries:
            return sorted(
                entry.name
                for entry in entries
                if _GROUP.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
        return []

    def listing(self, group: str) -> Listing:
        """The files of a group. Sizes come from the names, which is much cheaper than asking for each."""
        listing = Listing()
        for entry in self._entries(self.data / group):
            if match := _KEY.fullmatch(entry.name):
                found = listing.complete
            elif match := _TEMPORARY.fullmatch(entry.name):
                found = listing.temporary
            else:
                continue
            if entry.is_file(follow_symlinks=False):
                found[entry.name] = HEADER_BYTES + int(match[1])
        return listing

    def dataset_ids(self) -> list[str]:
        return sorted(
            entry.name
            for entry in self._entries(self.datasets)
            if _DATASET.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        )

    def _entries(self, folder: Path) -> Iterator["os.DirEntry[str]"]:
        """What a folder holds; nothing if it has just been removed, or is not a folder of ours."""
        if folder.is_symlink():
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            yield from entries


def check_group(group: str) -> None:
    if not _GROUP.fullmatch(group):
        raise SettingsError(f"group={group!r}: must be a checksum of 32 hexadecimal digits")


def check_key(key: str, count: int) -> None:
    match = _KEY.fullmatch(key)
    if not match or int(match[1]) != count:
        raise SettingsError(f"key={key!r}: must be an offset and the length {count}, like '4096-{count}'")


def check_dataset_id(dataset_id: str) -> None:
    if not _DATASET.fullmatch(dataset_id):
        raise SettingsError(
            f"dataset_id={dataset_id!r}: must consist of at most 100 letters, digits, - and _"
        )


def check_folder(folder: Path) -> None:
    """A link in the place of a group's folder would lead out of the cache."""
    if folder.is_symlink():
        raise StorageError(f"{folder}: is a symbolic link, which leads out of the cache; remove it")
