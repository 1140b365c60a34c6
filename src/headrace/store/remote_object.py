"""One version of an object, to be read: of an object that is replaced meanwhile, nothing is read.

Raw files in buckets are read in many requests, by many processes. Each request names the version that was listed at the
beginning, and each answer is compared with it, so that what comes together is never of two versions.
"""

from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

from headrace.errors import StorageError
from headrace.store.client import Client, RemoteOptions, client_for
from headrace.store.fetching import fetching
from headrace.store.objects import Objects
from headrace.store.reading import Object, version_in
from headrace.store.remote_address import RemoteAddress
from headrace.store.remote_errors import RefusedError

_MODIFIED = "modified "


class RemoteObject:
    def __init__(self, address: RemoteAddress, size: int, stamp: str) -> None:
        """`address` is that of the object itself, and `stamp` tells this version of it from others."""
        self.address, self.size, self.stamp = address, size, stamp

    def __repr__(self) -> str:
        return f"RemoteObject({str(self.address)!r})"

    def __str__(self) -> str:
        return str(self.address)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the client: another process finds credentials in its own environment.
        return RemoteObject, (self.address, self.size, self.stamp)

    @cached_property
    def _client(self) -> Client:
        return _client_of(self.address)

    def read(self, start: int, stop: int) -> memoryview:
        """Exactly these bytes of this version. Any thread may call it, and many at once."""
        if stop <= start:
            return memoryview(b"")
        try:
            found = self._client.get(self.address.prefix, str(self), start, stop, self._condition)
        except RefusedError:
            raise self._replaced() from None
        except FileNotFoundError:
            raise StorageError(
                f"{self}: cannot be read: it was deleted after it was listed; objects must not change while they are "
                "being read"
            ) from None
        is_same = found.size == self.size and _without_quotes(_stamp_of(found.about())) == _without_quotes(
            self.stamp
        )
        if not is_same:
            raise self._replaced()
        return found.content.toreadonly()

    @property
    def _condition(self) -> str | None:
        """The tag that the server compares. Weak tags, which compare equal to none, are compared only by us."""
        return self.stamp if self.stamp.startswith('"') else None

    def _replaced(self) -> StorageError:
        return StorageError(
            f"{self}: was replaced after it was listed; objects must not change while they are being read. Start again "
            "to read the object that is there now"
        )


def _stamp_of(found: Object) -> str:
    """The tag of an object, or the time of its last change (in seconds, as HTTP tells it) if its store has no tags."""
    tag = version_in(found.stamp).get("e_tag")
    return str(tag) if tag else f"{_MODIFIED}{found.modified_ns // 10**9}"


def _without_quotes(stamp: str) -> str:
    """The listings of some stores have tags without the quotes that they have elsewhere."""
    return stamp.removeprefix("W/").strip('"')


def find_object(address: RemoteAddress) -> RemoteObject | None:
    """The object at exactly this address."""
    if not address.prefix:
        return None
    try:
        found = _client_of(address).head(address.prefix, str(address))
    except FileNotFoundError:
        return None
    return RemoteObject(address, found.size, _stamp_of(found))


def objects_below(address: RemoteAddress, *, in_folders: bool) -> list[RemoteObject]:
    """The objects under a prefix, with or without those in folders, sorted by key. Nothing is said about the object
    that has the prefix itself as its key."""
    objects = Objects(_client_of(address), address)
    found = objects.all_found() if in_folders else objects.found_here()
    listed = [_listed(address, key, found[key]) for key in _without_folders(found)]
    empty = [each for each in listed if not each.size]
    # Listings leave out the slash that the keys of folders end with: an empty object that is not there by its name is
    # the mark of an empty folder.
    there = fetching().urgent([partial(find_object, each.address) for each in empty])
    folders = {id(each) for each, found_so in zip(empty, there, strict=True) if found_so is None}
    return [each for each in listed if id(each) not in folders]


def _listed(address: RemoteAddress, key: str, found: Object) -> RemoteObject:
    return RemoteObject(RemoteAddress(address.scheme, address.bucket, key), found.size, _stamp_of(found))


def _without_folders(found: dict[str, Object]) -> Iterable[str]:
    """The sorted keys, without those of empty objects that some programs write to mark a folder."""
    folders = {key[:place] for key in found for place, character in enumerate(key) if character == "/"}
    return sorted(key for key in found if found[key].size or key not in folders)


def _client_of(address: RemoteAddress) -> Client:
    return client_for(address, RemoteOptions.from_environment())
