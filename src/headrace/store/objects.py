"""The objects under one prefix of a bucket: getting, putting, copying, listing and deleting them.

What comes is checked: that it is the range that was asked for, and that it is whole. What is put may be put twice,
because an answer can be lost after the store has done what it was asked: every operation here makes no difference when
it is repeated, or recognises its own work.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import StorageError
from headrace.store.client import Client
from headrace.store.remote_address import RemoteAddress
from headrace.store.remote_errors import Kind, RefusedError, WrongAnswerError
from headrace.store.store import cut_off, written_by_another
from headrace.store.upload import PART_BYTES, Spool

READ_BYTES = 16 << 20
"""Whole files that are larger are read in ranges of this size, several at a time."""
_AT_ONCE = 4


@dataclass(frozen=True)
class Object:
    """What a store says about an object."""

    size: int
    modified_ns: int
    stamp: str
    """Changes when the object is replaced by another."""


@dataclass(frozen=True)
class Range(Object):
    start: int
    stop: int
    content: memoryview


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

        async def request(store: Any) -> Range:
            import obstore

            options = {"range": (start, stop)}
            answer = await obstore.get_async(store, self.address.key(name), options=options)
            return _checked(answer, await answer.bytes_async(), start, stop)

        try:
            return self.client.read(request, self.place(name), count=stop - start)
        except RefusedError as error:
            if error.problem.kind is not Kind.PAST_END:
                raise
        return self._empty_range(name, start)

    def get_exactly(self, name: str, start: int, stop: int) -> memoryview:
        """All bytes of a range. It costs less than `get_range`, because the library is called once, and checks by
        itself that the answer is about this range."""

        async def request(store: Any) -> memoryview:
            import obstore

            body = await obstore.get_range_async(store, self.address.key(name), start=start, end=stop)
            return memoryview(body)

        if start < stop:
            with contextlib.suppress(RefusedError):
                content = self.client.read(request, self.place(name), count=stop - start)
                if len(content) == stop - start:
                    return content
        # The file ends too early, or the body of the answer did.
        found = self.get_range(name, start, stop)
        if len(found.content) != stop - start:
            raise cut_off(self.place(name), found.size, start, stop)
        return found.content

    def _empty_range(self, name: str, start: int) -> Range:
        found = self.describe(name)
        return Range(found.size, found.modified_ns, found.stamp, start, start, memoryview(b""))

    def get_from(self, name: str, start: int) -> memoryview:
        """All bytes of an object from `start` on; one request if it is not large."""
        first = self.get_range(name, start, start + READ_BYTES)
        if first.stop >= first.size:
            return first.content
        whole = bytearray(first.size - start)
        whole[: len(first.content)] = first.content

        async def one(store: Any, begin: int) -> None:
            import obstore

            end = min(begin + READ_BYTES, first.size)
            # None, if the server has no tags: then nothing tells whether it is still the same object.
            options = {"range": (begin, end), "if_match": _version_in(first.stamp).get("e_tag")}
            answer = await obstore.get_async(store, self.address.key(name), options=options)
            got = _checked(answer, await answer.bytes_async(), begin, end)
            whole[begin - start : end - start] = got.content

        self._read_ranges(name, one, range(first.stop, first.size, READ_BYTES))
        return memoryview(whole)

    def _read_ranges(self, name: str, one: Any, begins: Sequence[int]) -> None:
        """Read several ranges, a few at a time; those that have come are not asked for again."""
        left = set(begins)

        async def request(store: Any) -> None:
            limit = asyncio.Semaphore(_AT_ONCE)

            async def limited(begin: int) -> None:
                async with limit:
                    await one(store, begin)
                    left.discard(begin)

            # All of them end before an error is passed on: none writes behind our back.
            outcomes = await asyncio.gather(*map(limited, sorted(left)), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome

        try:
            self.client.read(request, self.place(name), count=len(begins) * READ_BYTES)
        except RefusedError:
            raise self._changed(name) from None

    def _changed(self, name: str) -> StorageError:
        return StorageError(f"{self.place(name)}: was replaced while it was read; read it again")

    def describe(self, name: str) -> Object:
        async def request(store: Any) -> Any:
            import obstore

            return await obstore.head_async(store, self.address.key(name))

        return _object_of(self.client.read(request, self.place(name)))

    def find(self, name: str) -> Object | None:
        try:
            return self.describe(name)
        except FileNotFoundError:
            return None

    # Listing

    def names(self) -> list[str]:
        """The names of the objects here, without those in folders."""

        async def request(store: Any) -> Any:
            import obstore

            return await obstore.list_with_delimiter_async(store, self.address.prefix or None)

        try:
            found = self.client.read(request, str(self.address))
        except FileNotFoundError:
            return []
        return [key.rpartition("/")[2] for key in self._inside(found["objects"])]

    def _inside(self, entries: Iterable[Any]) -> Iterator[str]:
        """The keys of listed objects. Some programs mark a folder by an object with its name, which is not in it."""
        return (entry["path"] for entry in entries if entry["path"] != self.address.prefix)

    def has_any(self) -> bool:
        return bool(self._sizes(most=1))

    def all_sizes(self) -> dict[str, int]:
        """The keys of all objects here and in folders, with their sizes."""
        return self._sizes(most=None)

    def _sizes(self, most: int | None) -> dict[str, int]:
        async def request(store: Any) -> dict[str, int]:
            import obstore

            sizes: dict[str, int] = {}
            async for chunk in obstore.list(store, self.address.prefix or None, chunk_size=1000):
                found = {entry["path"]: entry["size"] for entry in chunk}
                sizes |= {key: found[key] for key in self._inside(chunk)}
                if most is not None and len(sizes) >= most:
                    break
            return sizes

        try:
            return self.client.read(request, str(self.address))
        except FileNotFoundError:
            return {}

    # Writing

    def put(self, name: str, content: bytes | Spool, *, mode: Any = "overwrite") -> str:
        """Put an object, in parts if it is large; its stamp."""

        async def request(store: Any) -> Any:
            import obstore

            body = content.rewound() if isinstance(content, Spool) else content
            key = self.address.key(name)
            return await obstore.put_async(
                store, key, body, mode=mode, chunk_size=PART_BYTES, max_concurrency=_AT_ONCE
            )

        return _stamp_of(self.client.write(request, self.place(name)))

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
            return self.put(name, content, mode="create" if expected is None else _version_in(expected))
        except RefusedError:
            pass
        # The answer to our own write may have been lost.
        found = self.get_range(name, 0, max(1, len(content) + 1)) if self.find(name) else None
        if found is not None and found.content == content:
            return found.stamp
        raise written_by_another(self.place(name))

    def copy_from(self, folder: "Objects", name: str) -> None:
        async def request(store: Any) -> None:
            import obstore

            await obstore.copy_async(store, folder.address.key(name), self.address.key(name))

        self.client.write(request, folder.place(name), "copied")

    def delete(self, names: Iterable[str]) -> None:
        self.delete_keys([self.address.key(name) for name in names])

    def delete_keys(self, keys: Sequence[str]) -> None:
        async def request(store: Any) -> None:
            import obstore

            await obstore.delete_async(store, keys[0] if len(keys) == 1 else list(keys))

        if keys:
            try:
                self.client.write(request, str(self.address), "cleared")
            except FileNotFoundError:
                if len(keys) > 1:  # some stores say so, and stop at it
                    for key in keys:
                        self.delete_keys([key])


def _checked(answer: Any, body: Any, start: int, stop: int) -> Range:
    """An answer that is what was asked for. A server that ignores ranges sends everything, for example."""
    found = _object_of(answer.meta)
    began, ended = answer.range
    content = memoryview(body)
    if (began, ended) != (start, min(stop, found.size)):
        raise WrongAnswerError(f"bytes {began} to {ended} instead of {start} to {min(stop, found.size)}")
    if len(content) != ended - began:
        raise WrongAnswerError(f"{len(content)} bytes instead of {ended - began}")
    return Range(found.size, found.modified_ns, found.stamp, began, ended, content)


def _object_of(meta: Any) -> Object:
    modified_ns = int(meta["last_modified"].timestamp() * 1e9)
    return Object(meta["size"], modified_ns, _stamp_of(meta))


def _stamp_of(meta: Any) -> str:
    return json.dumps({"e_tag": meta["e_tag"], "version": meta["version"]})


def _version_in(stamp: str) -> dict[str, Any]:
    """What a store compares before it replaces an object: some have versions, all have tags."""
    return {name: value for name, value in json.loads(stamp).items() if value is not None}
