"""From an address that a user names to the objects behind it: one object, all under a prefix, or those that match a
pattern.

The pattern of a path means the same in a bucket. `*`, `?` and `[...]` stand for characters of one name, `**` for any
number of folders, and names that begin with a dot must be written out:

    s3://bucket/texts/*.jsonl       the JSON lines in the folder texts
    s3://bucket/texts/**/*.jsonl    those in the folders inside it, too
"""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from headrace.errors import SettingsError, StorageError
from headrace.format.manifest import MANIFEST_NAME
from headrace.store.remote_address import REMOTE_SCHEMES, RemoteAddress, parse_address, redacted

if TYPE_CHECKING:
    from headrace.store.remote_object import RemoteObject

_ANY_FOLDERS = "**"


@dataclass(frozen=True)
class FoundObjects:
    is_directory: bool
    """Whether the objects are all those under a prefix."""
    objects: "Sequence[RemoteObject]"


def expand_address(text: str) -> FoundObjects:
    """The objects behind one input, at least one."""
    address = _parse(text)
    if address.is_http:
        return FoundObjects(False, [_file_of_web_server(text, address)])
    is_pattern = glob.has_magic(address.prefix)
    if is_pattern:
        matching = _matching(text, address)
        if matching:
            return FoundObjects(False, matching)
    found = _named_so(text, address)
    if found is not None:
        return found
    if is_pattern:
        raise SettingsError(f"input {text!r}: no object matches")
    raise StorageError(f"input {text!r}: no such object, and there is nothing under that prefix")


def _named_so(text: str, address: RemoteAddress) -> FoundObjects | None:
    """The object of exactly this name, or all objects under this prefix."""
    # Only here: most uses of Headrace need no object store, nor what that imports.
    from headrace.store.remote_object import find_object, objects_below

    names_an_object = not text.endswith("/")
    found = find_object(address) if names_an_object else None
    if found is not None and found.size:
        return FoundObjects(False, [found])
    below = objects_below(address, in_folders=True)
    if below:
        _refuse_dataset(text, address, below)
        return FoundObjects(True, [each for each in below if not _name(each).startswith(".")])
    return None if found is None else FoundObjects(False, [found])


def already_a_dataset(text: str) -> SettingsError:
    return SettingsError(
        f"input {text!r}: is already a Headrace dataset; give the raw files it was built from"
    )


def _parse(text: str) -> RemoteAddress:
    scheme = text.partition("://")[0].lower()
    if scheme not in REMOTE_SCHEMES:
        known = ", ".join(f"{name}://" for name in REMOTE_SCHEMES)
        raise SettingsError(
            f"input {redacted(text)!r}: files cannot be read from {scheme}://; give a local path, or one of {known}"
        )
    address = parse_address(text)
    # The host of a web server may have brackets, around numbers.
    if not address.is_http and glob.has_magic(address.bucket):
        raise SettingsError(
            f"input {text!r}: the name of a bucket cannot be a pattern; name the bucket, and put the pattern after it"
        )
    return address


def _file_of_web_server(text: str, address: RemoteAddress) -> "RemoteObject":
    from headrace.store.remote_object import find_object

    if glob.has_magic(address.prefix) or text.endswith("/"):
        raise SettingsError(
            f"input {text!r}: a web server cannot be listed; name its files one by one, or use s3://, gs:// or az://"
        )
    found = find_object(address)
    if found is None:
        raise StorageError(
            f"input {text!r}: no such file; if it is a folder, name its files one by one, since a web server cannot be "
            "listed"
        )
    return found


def _matching(text: str, address: RemoteAddress) -> "list[RemoteObject]":
    """The objects that match a pattern, with one listing."""
    from headrace.store.remote_object import objects_below

    parts = address.prefix.split("/")
    first_pattern = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    folder = RemoteAddress(address.scheme, address.bucket, "/".join(parts[:first_pattern]))
    patterns = parts[first_pattern:]
    is_deep = len(patterns) > 1 or patterns == [_ANY_FOLDERS]
    found = objects_below(folder, in_folders=is_deep)
    if text.endswith("/"):
        return []
    # Names may contain the characters of patterns. What has exactly this name is meant by it, as on a disk.
    named_so = [each for each in found if each.address == address]
    return named_so or [each for each in found if _matches(_parts_below(each, folder), patterns)]


def _parts_below(found: "RemoteObject", folder: RemoteAddress) -> list[str]:
    return found.address.prefix[len(folder.key("")) :].split("/")


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether the parts of a key match those of a pattern."""
    if not patterns or not parts:
        return not patterns and not parts
    first, *others = patterns
    if first != _ANY_FOLDERS:
        return _matches_name(parts[0], first) and _matches(parts[1:], others)
    if not others:
        return not any(part.startswith(".") for part in parts)
    if _matches(parts, others):
        return True
    return not parts[0].startswith(".") and _matches(parts[1:], patterns)


def _matches_name(name: str, pattern: str) -> bool:
    is_hidden = name.startswith(".") and not pattern.startswith(".")
    return not is_hidden and fnmatchcase(name, pattern)


def _refuse_dataset(text: str, address: RemoteAddress, below: "Sequence[RemoteObject]") -> None:
    manifest = address.key(MANIFEST_NAME)
    if any(each.address.prefix == manifest for each in below):
        raise already_a_dataset(text)


def _name(found: "RemoteObject") -> str:
    return found.address.prefix.rpartition("/")[2]
