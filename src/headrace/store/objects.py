"""The objects under one prefix of a bucket: getting, putting, copying, listing and deleting them.

What is put may be put twice, because an answer can be lost after the store has done what it was asked: every operation
here makes no difference when it is repeated, or recognises its own work.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.errors import StorageError
from headrace.store.client import Client
from headrace.store.reading import Object, Range, object_of, stamp_of, version_in
from headrace.store.remote_address import RemoteAddress
from headrace.store.remote_errors import Kind, RefusedError
from headrace.store.store import FileRange, cut_off, written_by_another
from headrace.store.upload import PART_BYTES, Spool

READ_BYTES = 16 << 20
"""Whole files that are larger are read in ranges of this size, several at a time."""
_AT_ONCE = 4


class Objects:
    def __init__(self, client: Client, address: RemoteAddress) -> None:
        self.client, self.address = client, address

    def place(self, name: str) -> str:
        return f"{self.address}/{name}"

    # Reading

    def get_range(self, name: str, start: int, stop: int) -> Range:
        """A range of an object, shorter where the object ends."""
        if stop <= start:
            return self._empty_range(name, start)

        try:
            return self.client.get(self.address.key(name), self.place(name), start, stop)
        except RefusedError as error:
            if error.problem.kind is not Kind.PAST_END:
                raise
        return self._empty_range(name, start)

    def get_exactly(self, name: str, start: int, stop: int) -> memoryview:
        """All bytes of a range."""
        found = self.get_range(name, start, stop)
        if len(found.content) != stop - start:
            raise cut_off(self.place(name), found.size, start, stop)
        return found.content

    def get_together(self, ranges: Sequence[FileRange]) -> list[memoryview | None]:
        """All bytes of several ranges; None where `get_exactly` is needed, because something went wrong."""
        wanted = [(self.address.key(name), start, stop) for name, start, stop in ranges]
        found = self.client.get_together(wanted)
        return [
            each.content if each is not None and len(each.content) == stop - start else None
            for each, (_, start, stop) in zip(found, wanted, strict=True)
        ]

    def _empty_range(self, name: str, start: int) -> Range:
        found = self.describe(name)
        return Range(found.size, start, start, memoryview(b""), lambda: found)

    def get_from(self, name: str, start: int) -> memoryview:
        """All bytes of an object from `start` on; one request if it is not large."""
        first = self.get_range(name, start, start + READ_BYTES)
        if first.stop >= first.size:
            return first.content
        whole = bytearray(first.size - start)
        whole[: len(first.content)] = first.content

        # None, if the server has no tags: then nothing tells whether it is still the same object.
        tag = version_in(first.about().stamp).get("e_tag")
        # Weak tags compare equal to none.
        tag = None if tag is None or tag.startswith("W/") else tag
        view = memoryview(whole)

        def read_on(begin: int) -> None:
            end = min(begin + READ_BYTES, first.size)
            found = self.client.get(self.address.key(name), self.place(name), begin, end, tag)
            if found.size != first.size:
                raise self._changed(name)
            view[begin - start : end - start] = found.content

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            try:
                for _ in threads.map(read_on, range(first.stop, first.size, READ_BYTES)):
                    pass
            except RefusedError:
                raise self._changed(name) from None
        return memoryview(whole)

    def _changed(self, name: str) -> StorageError:
        return StorageError(f"{self.place(name)}: was replaced while it was read; read it again")

    def describe(self, name: str) -> Object:
        return self.client.head(self.address.key(name), self.place(name))

    def find(self, name: str) -> Object | None:
        try:
            return self.describe(name)
        except FileNotFoundError:
            return None

    # Listing

    def names(self) -> list[str]:
        """The names of the objects here, without those in folders."""
        return [key.rpartition("/")[2] for key in self.found_here()]

    def found_here(self) -> dict[str, Object]:
        """The keys of the objects here, without those in folders, and what the store says about them."""

        def request(store: Any) -> dict[str, Object]:
            import obstore

            return self._inside(obstore.list_with_delimiter(store, self.address.prefix or None)["objects"])

        return self._list(request)

    def has_any(self) -> bool:
        return bool(self._found(most=1))

    def all_sizes(self) -> dict[str, int]:
        """The keys of all objects here and in folders, with their sizes."""
        return {key: found.size for key, found in self.all_found().items()}

    def all_found(self) -> dict[str, Object]:
        """The keys of all objects here and in folders, and what the store says about them."""
        return self._found(most=None)

    def _found(self, most: int | None) -> dict[str, Object]:
        def request(store: Any) -> dict[str, Object]:
            import obstore

            found: dict[str, Object] = {}
            for chunk in obstore.list(store, self.address.prefix or None, chunk_size=1000):
                found |= self._inside(chunk)
                if most is not None and len(found) >= most:
                    break
            return found

        return self._list(request)

    def _inside(self, entries: Iterable[Any]) -> dict[str, Object]:
        """Listed objects, by key. Some programs mark a folder by an object with its name, which is not in it."""
        return {entry["path"]: object_of(entry) for entry in entries if entry["path"] != self.address.prefix}

    def _list(self, request: Callable[[Any], dict[str, Object]]) -> dict[str, Object]:
        try:
            return self.client.read(request, str(self.address))
        except FileNotFoundError:
            return {}

    # Writing

    def put(self, name: str, content: bytes | Spool, *, mode: Any = "overwrite") -> str:
        """Put an object, in parts if it is large; its stamp."""

        def request(store: Any) -> Any:
            import obstore

            body = content.rewound() if isinstance(content, Spool) else content
            key = self.address.key(name)
            return obstore.put(store, key, body, mode=mode, chunk_size=PART_BYTES, max_concurrency=_AT_ONCE)

        return stamp_of(self.client.write(request, self.place(name)))

    def put_new(self, name: str, spool: Spool) -> None:
        """Put an object whose name contains its checksum. If it is there already, nothing needs to be done."""
        if spool.size > PART_BYTES:
            # Uploads in parts have no condition.
            found = self.find(name)
            if found is None or found.size != spool.size:
                self.put(name, spool)
            return
        try:
            self.put(name, spool.content(), mode="create")
        except RefusedError:
            if self.describe(name).size != spool.size:
                # Of all contents, only this one belongs to the name: what is there was damaged.
                self.put(name, spool)

    def put_expecting(self, name: str, content: bytes, expected: str | None) -> str:
        """Replace an object, if it still has the stamp that is expected; None expects that there is none."""
        try:
            return self.put(name, content, mode="create" if expected is None else version_in(expected))
        except RefusedError:
            pass
        # The answer to our own write may have been lost.
        found = self.get_range(name, 0, max(1, len(content) + 1)) if self.find(name) else None
        if found is not None and found.content == content:
            return found.about().stamp
        raise written_by_another(self.place(name))

    def copy_from(self, folder: "Objects", name: str) -> None:
        def request(store: Any) -> None:
            import obstore

            obstore.copy(store, folder.address.key(name), self.address.key(name))

        self.client.write(request, folder.place(name), "copied")

    def delete(self, names: Iterable[str]) -> None:
        self.delete_keys([self.address.key(name) for name in names])

    def delete_keys(self, keys: Sequence[str]) -> None:
        def request(store: Any) -> None:
            import obstore

            obstore.delete(store, keys[0] if len(keys) == 1 else list(keys))

        if keys:
            try:
                self.client.write(request, str(self.address), "cleared")
            except FileNotFoundError:
                if len(keys) > 1:  # some stores say so, and stop at it
                    for key in keys:
                        self.delete_keys([key])
