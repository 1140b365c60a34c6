"""Reading objects of a bucket: two ways to do it, of which `Client` takes the better one that is possible.

What comes is checked: that it is the range that was asked for, and that it is whole.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

from headrace.errors import StorageError
from headrace.store.http_messages import Answer
from headrace.store.latencies import Latencies
from headrace.store.library import call_hedged
from headrace.store.remote_errors import HttpAnswerError, WrongAnswerError
from headrace.store.s3 import S3Request, S3Requests

_MOST_ERROR_BYTES = 1 << 16

KeyRange = tuple[str, int, int]
"""A key, and which of its bytes."""


@dataclass(frozen=True)
class Object:
    """What a store says about an object."""

    size: int
    modified_ns: int
    stamp: str
    """Changes when the object is replaced by another."""


@dataclass(frozen=True)
class Range:
    size: int
    """Of the whole object."""
    start: int
    stop: int
    content: memoryview
    about: Callable[[], Object]
    """What the store said about the object. Most readers do not ask."""


class Reading(Protocol):
    def get(self, key: str, start: int, stop: int, tag: str | None = None) -> Range:
        """A range of an object, shorter where the object ends; with a tag, only of the object that has it."""
        ...

    def get_together(self, wanted: Sequence[KeyRange]) -> list[Range | None]:
        """Several ranges at the same time, each as far as that succeeds at the first attempt."""
        ...

    def head(self, key: str) -> Object: ...


class DirectReading:
    """Reads of S3 over our own connections, at half the cost in processor time, also in forked processes."""

    def __init__(self, requests: S3Requests, latencies: Latencies) -> None:
        self._requests, self._latencies = requests, latencies

    def get(self, key: str, start: int, stop: int, tag: str | None = None) -> Range:
        answer = self._requests.ask(_get(key, start, stop, tag), self._latencies.patience(stop - start))
        return self._range_in(answer, start, stop)

    def get_together(self, wanted: Sequence[KeyRange]) -> list[Range | None]:
        patience = self._latencies.patience(max((stop - start for _, start, stop in wanted), default=0))
        answers = self._requests.ask_together([_get(*each) for each in wanted], patience)
        return [
            self._range_if_right(answer, start, stop)
            for (_, start, stop), answer in zip(wanted, answers, strict=True)
        ]

    def _range_if_right(self, answer: Answer | HttpAnswerError, start: int, stop: int) -> Range | None:
        try:
            return self._range_in(answer, start, stop) if isinstance(answer, Answer) else None
        except WrongAnswerError:
            return None

    def _range_in(self, answer: Answer, start: int, stop: int) -> Range:
        self._latencies.add(stop - start, answer.seconds)
        if answer.status != 206:
            raise WrongAnswerError(f"the whole object instead of bytes {start} to {stop}")
        began, ended, size = _parsed_range(answer.headers.get("content-range", ""))
        found = Range(size, began, ended, answer.content, lambda: _object_in(answer, size))
        return _checked(found, start, stop)

    def head(self, key: str) -> Object:
        answer = self._requests.ask(S3Request(method="HEAD", key=key, most_bytes=_MOST_ERROR_BYTES))
        length = answer.headers.get("content-length", "")
        if not length.isdecimal() or len(length) > 18:
            raise WrongAnswerError("no size of the object")
        return _object_in(answer, int(length))


def _get(key: str, start: int, stop: int, tag: str | None = None) -> S3Request:
    headers = {"Range": f"bytes={start}-{stop - 1}"}
    if tag is not None:
        headers["If-Match"] = tag
    return S3Request(method="GET", key=key, headers=headers, most_bytes=max(stop - start, _MOST_ERROR_BYTES))


class LibraryReading:
    """Reads by the client library, for all other stores."""

    def __init__(self, store: Any, latencies: Latencies) -> None:
        self._store, self._latencies = store, latencies

    def get(self, key: str, start: int, stop: int, tag: str | None = None) -> Range:
        import obstore

        def request() -> Range:
            options: Any = {"range": (start, stop)} | ({} if tag is None else {"if_match": tag})
            answer = obstore.get(self._store, key, options=options)
            meta = answer.meta
            began, ended = answer.range
            content = memoryview(answer.bytes())
            return _checked(Range(meta["size"], began, ended, content, lambda: object_of(meta)), start, stop)

        patience = self._latencies.patience(stop - start)
        with self._latencies.measured(stop - start):
            return call_hedged(request, patience)

    def get_together(self, wanted: Sequence[KeyRange]) -> list[Range | None]:
        # The library needs a thread for each request, and those who ask have some.
        return [None] * len(wanted)

    def head(self, key: str) -> Object:
        import obstore

        return object_of(call_hedged(lambda: obstore.head(self._store, key), None))


def _checked(found: Range, start: int, stop: int) -> Range:
    """An answer that is what was asked for. A server that ignores ranges sends everything, for example."""
    stop = min(stop, found.size)
    if (found.start, found.stop) != (start, stop):
        raise WrongAnswerError(f"bytes {found.start} to {found.stop} instead of {start} to {stop}")
    if len(found.content) != stop - start:
        raise WrongAnswerError(f"{len(found.content)} bytes instead of {stop - start}")
    return found


def _parsed_range(text: str) -> tuple[int, int, int]:
    """Of `bytes 0-99/1234`, which names the last byte: 0, 100, 1234."""
    try:
        unit, _, rest = text.partition(" ")
        place, _, size = rest.partition("/")
        first, _, last = place.partition("-")
        if unit.lower() == "bytes":
            return int(first), int(last) + 1, int(size)
    except ValueError:
        pass
    raise WrongAnswerError(f"Content-Range: {text[:100]}")


def _object_in(answer: Answer, size: int) -> Object:
    modified = answer.headers.get("last-modified", "")
    try:
        modified_ns = int(parsedate_to_datetime(modified).timestamp() * 1e9)
    except ValueError:
        raise StorageError(
            "the server does not say when an object was changed (Last-Modified); use one that follows S3 there"
        ) from None
    stamp = _stamp(answer.headers.get("etag"), answer.headers.get("x-amz-version-id"))
    return Object(size, modified_ns, stamp)


def object_of(meta: Any) -> Object:
    """What the client library says about an object."""
    modified_ns = int(meta["last_modified"].timestamp() * 1e9)
    return Object(meta["size"], modified_ns, stamp_of(meta))


def stamp_of(meta: Any) -> str:
    return _stamp(meta["e_tag"], meta["version"])


def _stamp(tag: str | None, version: str | None) -> str:
    return json.dumps({"e_tag": tag, "version": version})


def version_in(stamp: str) -> dict[str, Any]:
    """What a store compares before it replaces an object: some have versions, all have tags."""
    return {name: value for name, value in json.loads(stamp).items() if value is not None}
