"""Which cache is used, and how large it may become, if nobody says so."""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from headrace.checks import parse_size, whole_number
from headrace.errors import SettingsError, StorageError
from headrace.store.cache.admission import noted_bytes
from headrace.store.cache.cache import Cache
from headrace.store.cache.directory import CacheDirectory

DIRECTORY_VARIABLE = "HEADRACE_CACHE"
BYTES_VARIABLE = "HEADRACE_CACHE_BYTES"
_OFF = ("", "off")
_LARGEST_SHARE_OF_DISK = 0.25
_LARGEST_SHARE_OF_SPACE = 0.5
_KEPT_FREE_BYTES = 5 * 2**30
_KEPT_FREE_SHARE = 0.05

_log = logging.getLogger(__name__)
_warned_of: set[str] = set()


def open_cache(
    directory: str | os.PathLike[str] | None = None, limit_bytes: int | str | None = None
) -> Cache | None:
    """The cache in this directory, or in that of the environment, or the user's; None if it is off or cannot be used.

    A size is a number of bytes or a text like '200GB'. By default it is a quarter of the disk and half of the space
    that is free or taken by the cache, whichever is less. The last 5 GiB and the last 5 % of the disk stay free.
    """
    chosen = find_directory(directory)
    if chosen is None:
        return None
    limit = find_limit(limit_bytes)
    if limit == 0:
        return None
    try:
        if limit is not None:
            return Cache(chosen, limit)
        limit, keep_free = default_limit(chosen)
        return Cache(chosen, limit, keep_free_bytes=keep_free)
    except StorageError as error:
        if str(chosen) not in _warned_of:
            _warned_of.add(str(chosen))
            _log.warning("%s; going on without a cache", error)
        return None


def find_directory(
    directory: str | os.PathLike[str] | None = None, environment: Mapping[str, str] = os.environ
) -> Path | None:
    """Where the cache is; None if there is to be none."""
    given = environment.get(DIRECTORY_VARIABLE) if directory is None else os.fspath(directory)
    if given is not None:
        return None if given in _OFF else Path(given).expanduser()
    root = environment.get("XDG_CACHE_HOME", "")
    # The standard says that a relative path is not to be used.
    if not os.path.isabs(root):
        root = os.path.expanduser("~/.cache")
    return Path(root) / "headrace" if os.path.isabs(root) else None


def find_limit(
    limit_bytes: int | str | None = None, environment: Mapping[str, str] = os.environ
) -> int | None:
    """How large the cache may become, if anybody says so."""
    if limit_bytes is None:
        given = environment.get(BYTES_VARIABLE)
        if not given:
            return None
        try:
            return parse_size(given)
        except SettingsError as error:
            raise SettingsError(f"{BYTES_VARIABLE}: {error}") from None
    if isinstance(limit_bytes, str):
        return parse_size(limit_bytes)
    return whole_number("cache_bytes", limit_bytes, 0)


def default_limit(directory: Path) -> tuple[int, int]:
    """A limit that leaves the disk to others as well, and how much of the disk must stay free."""
    disk = shutil.disk_usage(_existing(directory))
    keep_free = max(_KEPT_FREE_BYTES, int(disk.total * _KEPT_FREE_SHARE))
    space = disk.free + noted_bytes(CacheDirectory(directory))
    limit = min(
        int(disk.total * _LARGEST_SHARE_OF_DISK), int(space * _LARGEST_SHARE_OF_SPACE), space - keep_free
    )
    return max(0, limit), keep_free


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    absolute = path.absolute()
    for directory in (absolute, *absolute.parents):
        if directory.exists():
            return directory
    return absolute
