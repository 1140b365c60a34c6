"""Reads of pieces of a dataset's files, each checked before anyone sees it.

A piece comes from the local file that holds it, or from the cache, or over the network. Pieces of one shard that lie
near each other are fetched with one request. If the bytes are not those that the dataset's units promise, they are
fetched once more, since they may have been changed on their way; if they are wrong again, an error names object and
range.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CorruptError, HeadraceError
from headrace.fork_lock import fork_lock
from headrace.format.blocks import check_of, checksums_of
from headrace.format.container import StoredFile
from headrace.format.units import Piece
from headrace.store.cache import Cache
from headrace.store.fetching import fetching
from headrace.store.store import Store

_MERGED_GAP_BYTES = 2**16
"""Reading this much in vain costs less than another request."""
_MERGED_BYTES = 2**24

Files = Sequence[StoredFile]
Place = tuple[int, int, int]
"""Some bytes: the number of their file, where they begin and where they end."""
Gone = Callable[[StoredFile], HeadraceError]
"""The error for a file that is not there any more."""


class Reads(Protocol):
    def cached(self, wanted: Sequence[Piece]) -> list[NDArray[np.uint8]] | None:
        """The blocks of each piece, if none of them would have to be fetched."""
        ...

    def pieces(self, wanted: Sequence[Piece]) -> list[NDArray[np.uint8]]:
        """The blocks of each piece."""
        ...

    def damaged(self, file: int, start: int, stop: int) -> CorruptError:
        """The error for bytes that were wrong, and wrong again."""
        ...

    def unchecked(self, file: int, start: int, stop: int, *, again: bool = False) -> NDArray[np.uint8]:
        """Some bytes of a file, which the caller checks; `again` if they were wrong."""
        ...

    def unchecked_together(self, places: Sequence[Place]) -> list[NDArray[np.uint8]]:
        """Many of them, requested at the same time."""
        ...


class MappedReads:
    """Pieces of local files, which are mapped, and checked the first time if they are to be checked."""

    def __init__(self, store: Store, files: Files, gone: Gone, check: bool) -> None:
        self._store, self._files, self._gone = store, files, gone
        self._check = check
        self._checked: set[tuple[int, int]] = set()
        self._maps: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def cached(self, wanted: Sequence[Piece]) -> list[NDArray[np.uint8]] | None:
        return self.pieces(wanted)

    def pieces(self, wanted: Sequence[Piece]) -> list[NDArray[np.uint8]]:
        found = []
        for piece in wanted:
            content = self.unchecked(piece.shard, piece.blocks_start, piece.blocks_stop)
            place = piece.shard, piece.start
            if self._check and place not in self._checked:
                if not _is_right(piece, content):
                    raise self.damaged(piece.shard, piece.start, piece.stop)
                self._checked.add(place)
            found.append(content)
        return found

    def damaged(self, file: int, start: int, stop: int) -> CorruptError:
        return _damaged(self._store, self._files[file], start, stop)

    def unchecked(self, file: int, start: int, stop: int, *, again: bool = False) -> NDArray[np.uint8]:
        stored = self._files[file]
        mapped = self._maps.get(file)
        if mapped is None:
            try:
                mapped = self._maps[file] = self._store.view(stored.file)
            except FileNotFoundError:
                raise self._gone(stored) from None
        return mapped[start:stop]

    def unchecked_together(self, places: Sequence[Place]) -> list[NDArray[np.uint8]]:
        return [self.unchecked(*place) for place in places]


@dataclass
class Traffic:
    """What was read over the network, and what the cache has spared."""

    requests: int = 0
    bytes: int = 0
    cached_bytes: int = 0
    repeated: int = 0
    """How many requests brought wrong bytes and were made again."""


class FetchedReads:
    """Pieces of remote files, fetched or from the cache."""

    def __init__(
        self, store: Store, files: Files, gone: Gone, cache: Cache | None, traffic: Traffic | None = None
    ) -> None:
        self._store, self._files, self._gone, self._cache = store, files, gone, cache
        self.traffic = traffic or Traffic()
        self._counting = fork_lock()

    def cached(self, wanted: Sequence[Piece]) -> list[NDArray[np.uint8]] | None:
        found = []
        for piece in wanted:
            content = self._cached(piece)
            if content is None:
                return None
            found.append(content)
        return found

    def pieces(self, wanted: Sequence[Piece]) -> list[NDArray[np.uint8]]:
        found = {number: self._cached(piece) for number, piece in enumerate(wanted)}
        missing = [(number, wanted[number]) for number, content in found.items() if content is None]
        with self._turn(missing) as is_our_turn:
            if not is_our_turn:
                # Another process has just fetched them.
                found |= {number: self._cached(piece) for number, piece in missing}
                missing = [(number, piece) for number, piece in missing if found[number] is None]
            found.update(self._fetched(missing))
        return [content for _, content in sorted(found.items()) if content is not None]

    def _turn(self, missing: Sequence[tuple[int, Piece]]) -> AbstractContextManager[bool]:
        if self._cache is None or not missing:
            return contextlib.nullcontext(True)
        return self._cache.fetching(*self._cache_names(missing[0][1]))

    def _cached(self, piece: Piece) -> NDArray[np.uint8] | None:
        if self._cache is None:
            return None
        count = piece.blocks_stop - piece.blocks_start
        names = self._cache_names(piece)
        content = self._cache.get(*names, count)
        if content is None:
            return None
        if not _is_right(piece, content):
            # A disk, or somebody else, has changed it since it was written.
            self._cache.remove(*names, count)
            return None
        with self._counting:
            self.traffic.cached_bytes += count
        return content

    def _cache_names(self, piece: Piece) -> tuple[str, str]:
        count = piece.blocks_stop - piece.blocks_start
        return self._files[piece.shard].checksum, f"{piece.blocks_start}-{count}"

    def _fetched(self, wanted: Sequence[tuple[int, Piece]]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Pieces from the network, with their numbers."""
        groups = list(neighbours(wanted))
        for group, content in zip(groups, self.unchecked_together([*map(_place, groups)]), strict=True):
            begin = group[0][1].blocks_start
            for number, piece in group:
                come = content[piece.blocks_start - begin : piece.blocks_stop - begin]
                yield number, self._kept(piece, self._checked(piece, come))

    def _kept(self, piece: Piece, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The content as the cache has it, or as it is if the cache is full."""
        if self._cache is None or not len(content):
            return content
        kept = self._cache.put(*self._cache_names(piece), content.data)
        return content if kept is None else kept

    def _checked(self, piece: Piece, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if _is_right(piece, content):
            return content
        content = self.unchecked(piece.shard, piece.blocks_start, piece.blocks_stop, again=True)
        if not _is_right(piece, content):
            raise self.damaged(piece.shard, piece.start, piece.stop)
        return content

    def damaged(self, file: int, start: int, stop: int) -> CorruptError:
        return _damaged(self._store, self._files[file], start, stop)

    def unchecked(self, file: int, start: int, stop: int, *, again: bool = False) -> NDArray[np.uint8]:
        if start == stop:
            return np.empty(0, dtype=np.uint8)
        stored = self._files[file]
        try:
            content = self._store.fetch(stored.file, start, stop)
        except FileNotFoundError:
            raise self._gone(stored) from None
        self._count(stop - start, again)
        return np.frombuffer(content, dtype=np.uint8)

    def unchecked_together(self, places: Sequence[Place]) -> list[NDArray[np.uint8]]:
        found: dict[int, NDArray[np.uint8]] = {}
        asked = [number for number, (_, start, stop) in enumerate(places) if start < stop]
        if len(asked) > 1:
            ranges = [
                (self._files[file].file, start, stop) for file, start, stop in map(places.__getitem__, asked)
            ]
            for number, content in zip(asked, self._store.fetch_together(ranges), strict=True):
                if content is not None:
                    self._count(len(content))
                    found[number] = np.frombuffer(content, dtype=np.uint8)
        # The others need more attempts, or have an error to tell.
        missing = [number for number in range(len(places)) if number not in found]
        calls = [partial(self.unchecked, *places[number]) for number in missing]
        found.update(zip(missing, fetching().urgent(calls), strict=True))
        return [found[number] for number in range(len(places))]

    def _count(self, count: int, again: bool = False) -> None:
        with self._counting:
            self.traffic.requests += 1
            self.traffic.bytes += count
            self.traffic.repeated += again


def _place(group: Sequence[tuple[int, Piece]]) -> Place:
    first = group[0][1]
    return first.shard, first.blocks_start, max(piece.blocks_stop for _, piece in group)


def neighbours(wanted: Sequence[tuple[int, Piece]]) -> Iterator[list[tuple[int, Piece]]]:
    """Groups of pieces that one request can fetch: in the same shard, with little or nothing in between."""
    group: list[tuple[int, Piece]] = []
    end = 0
    for number, piece in sorted(wanted, key=lambda each: (each[1].shard, each[1].blocks_start)):
        if group:
            first = group[0][1]
            is_near = piece.shard == first.shard and piece.blocks_start - end <= _MERGED_GAP_BYTES
            if not is_near or piece.blocks_stop - first.blocks_start > _MERGED_BYTES:
                yield group
                group = []
        group.append((number, piece))
        end = max(end, piece.blocks_stop) if len(group) > 1 else piece.blocks_stop
    if group:
        yield group


def _is_right(piece: Piece, content: NDArray[np.uint8]) -> bool:
    return check_of(checksums_of(content)) == piece.check


def _damaged(store: Store, stored: StoredFile, start: int, stop: int) -> CorruptError:
    return CorruptError(
        f"{store.locate(stored.file)}: bytes {start} to {stop} do not match their checksum: the file was damaged or "
        "overwritten; run `headrace verify`, and copy or build the dataset again"
    )
