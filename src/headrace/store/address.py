"""Find the store that a path or an address like `memory://name` refers to.

To add a kind of store, add a module to this folder and a line to `_KINDS`.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from headrace.errors import SettingsError
from headrace.store.local import LocalStore
from headrace.store.memory import SCHEME, MemoryStore
from headrace.store.remote_address import HTTP_SCHEMES, REMOTE_SCHEMES, parse_address, redacted
from headrace.store.store import Store

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_MISTYPED = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)(?:(?P<colon>:)/(?!/)|//+)", re.IGNORECASE)


def open_store(place: str | os.PathLike[str] | Store) -> Store:
    """The store at a path or an address; a store is returned as it is."""
    if isinstance(place, str | os.PathLike):
        address = os.fspath(place)
        refuse_mistyped(address)
        scheme = _SCHEME.match(address)
        return _kind(address, scheme[1].lower())(address) if scheme else LocalStore(address)
    return place


def open_output(place: str | os.PathLike[str] | Store) -> Store:
    """The store at a place that will be written to. Nothing is asked of a place that can only be read."""
    store = open_store(place)
    scheme = _SCHEME.match(store.name)
    if scheme and scheme[1].lower() in HTTP_SCHEMES:
        raise SettingsError(f"{store.name}: can only be read over HTTP; write to s3://, gs:// or az://")
    return store


def is_address(place: object) -> bool:
    """Whether a place is written like `scheme://...`, and so is not a path of the local file system."""
    return isinstance(place, str) and _SCHEME.match(place) is not None


def split_place(place: str | os.PathLike[str]) -> tuple[Store, str]:
    """The store that holds a file, and the file's name in it."""
    address = os.fspath(place)
    refuse_mistyped(address)
    parent, slash, file = address.rpartition("/") if is_address(address) else ("", "", "")
    if slash and not parent.endswith("/"):
        _refuse_wrong_address(address)
        return open_store(parent), file
    path = Path(address)
    return LocalStore(path.parent), path.name


def refuse_mistyped(place: str) -> None:
    """Raise an error for a text like `s3:/bucket/x` or `s3//bucket/x`, which would name a folder of the local disk."""
    meant = _meant_address(place)
    if meant is not None:
        raise SettingsError(f"{_hidden_like(place, meant)}: did you mean {redacted(meant)}?")


def local_path(place: str | os.PathLike[str]) -> Path:
    """The path of an output that must be a file of this machine."""
    text = os.fspath(place)
    # A `Path` of an address has lost one of its slashes.
    address = text if is_address(text) else _meant_address(text)
    if address is not None:
        raise SettingsError(
            f"{redacted(address)}: must be a local path; write the file to this machine first"
        )
    return Path(text)


def _meant_address(place: str) -> str | None:
    """The address that a text was probably meant to be; None if it is an address, or looks like a path."""
    found = _MISTYPED.match(place)
    if found is None or found["scheme"].lower() not in _KINDS:
        return None
    # A folder may have the name of a scheme, and somebody may write two slashes after it.
    if not found["colon"] and os.path.isdir(found["scheme"]):
        return None
    return f"{found['scheme']}://{place[found.end() :]}"


def _hidden_like(place: str, meant: str) -> str:
    """What a user has written, without what is secret in the address that was meant."""
    scheme, _, rest = meant.partition("://")
    separator = place[len(scheme) : len(place) - len(rest)]
    return f"{scheme}{separator}{redacted(meant).partition('://')[2]}"


def _refuse_wrong_address(address: str) -> None:
    scheme = _SCHEME.match(address)
    if scheme and scheme[1].lower() in REMOTE_SCHEMES:
        parse_address(address)


def _kind(address: str, scheme: str) -> Callable[[str], Store]:
    if scheme not in _KINDS:
        known = ", ".join(f"{name}://" for name in _KINDS)
        raise SettingsError(
            f"{redacted(address)}: there is no store for {scheme}://; give a local path, or one of {known}"
        )
    return _KINDS[scheme]


_memories: dict[str, MemoryStore] = {}


def _open_memory(address: str) -> MemoryStore:
    """The same store for the same name, everywhere in this process."""
    name, *folders = [part for part in address[len(SCHEME) :].split("/") if part] or [""]
    if not name:
        raise SettingsError(f"{address}: must name a store, like {SCHEME}mine")
    store = _memories.setdefault(name, MemoryStore(SCHEME + name))
    for folder in folders:
        store = store.folder(folder)
    return store


def _open_remote(address: str) -> Store:
    # Only here: most uses of Headrace need no object store, nor what that imports.
    from headrace.store.remote import RemoteStore

    return RemoteStore(address)


_KINDS: dict[str, Callable[[str], Store]] = {
    "memory": _open_memory,
    **dict.fromkeys(REMOTE_SCHEMES, _open_remote),
}
