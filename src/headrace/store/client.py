"""Requests to object stores: repeated when that may help, sent twice when they are slow, with credentials renewed."""

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from headrace.errors import MissingExtraError, SettingsError
from headrace.fork_lock import fork_lock
from headrace.store.credentials import CredentialProvider, S3Settings, read_settings
from headrace.store.event_loop import call, refuse_forks
from headrace.store.latencies import Latencies
from headrace.store.remote_address import RemoteAddress, redacted
from headrace.store.remote_errors import (
    HttpAnswerError,
    Kind,
    Problem,
    RefusedError,
    WrongAnswerError,
    problem_of,
    remote_error,
)

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
Request = Callable[[Any], Coroutine[Any, Any, Result]]
"""Makes a request of the library's store that it is given."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 3.0
_MOST_WRONG_ANSWERS, _WRONG_ANSWERS_SECONDS = 3, 10.0
_MOST_HEDGES = 4
_QUIET_SECONDS = 5.0
"""How long requests are repeated without a word."""
_WHOLE_REQUEST = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """How patient a client is."""

    retry_seconds: float = 60.0
    """How long a request is repeated that fails for a reason that may pass."""
    connect_seconds: float = 5.0
    read_seconds: float = 10.0
    """How long a read waits for the next bytes, before the request is made again."""
    write_seconds: float = 120.0
    """How long a write of at most a part of an upload may take."""
    hedge_seconds: float = 1.0
    """The least time after which a slow read is sent a second time."""
    renew_seconds: float = 10.0
    """How often a writer renews its lease."""
    lease_seconds: float = 60.0
    """How long a lease lasts that is not renewed."""

    @classmethod
    def from_environment(cls) -> "RemoteOptions":
        text = os.environ.get("HEADRACE_RETRY_SECONDS", "")
        if not text:
            return cls()
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise SettingsError(f"HEADRACE_RETRY_SECONDS={text}: must be a number of seconds, at least 0")
        return cls(retry_seconds=seconds)


class Client:
    """All requests to one bucket. Threads may share it."""

    def __init__(self, address: RemoteAddress, settings: S3Settings | None, options: RemoteOptions) -> None:
        self.address, self.settings, self.options = address, settings, options
        signs = settings is not None and settings.source in ("environment", "profile")
        self.provider = CredentialProvider(settings) if settings is not None and signs else None
        self._latencies = Latencies(options.hedge_seconds)
        self._hedges = 0
        self.has_answered = False
        """Whether the bucket is known to be there."""
        self._lock = fork_lock()
        self._generation = 0
        self._stores: tuple[Any, Any] | None = None

    # Asking

    def read(self, request: Request[Result], place: str, *, count: int = 0) -> Result:
        """Make a request that changes nothing, of about so many bytes."""
        return self._ask(lambda: self._hedged(request, count), place, "read")

    def write(self, request: Request[Result], place: str, doing: str = "written") -> Result:
        """Make a request that changes something. It may be carried out more than once."""
        return self._ask(lambda: request(self._library_stores()[1]), place, doing)

    def _ask(self, start: Callable[[], Coroutine[Any, Any, Result]], place: str, doing: str) -> Result:
        refuse_forks()
        began, attempt = time.monotonic(), 0
        has_renewed = has_warned = False
        while True:
            generation = self._generation
            try:
                result = call(start)
                self.has_answered = True
                return result
            except _library_errors() as error:
                problem = self._problem_of(error)
            if problem.kind is Kind.DENIED and not has_renewed:
                has_renewed = True
                if self._renew(problem, generation):
                    continue
            if problem.kind in (Kind.EXISTS, Kind.CHANGED, Kind.PAST_END):
                raise RefusedError(problem)
            tried = time.monotonic() - began
            pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**attempt) * random.uniform(0.5, 1.0)
            attempt += 1
            if not self._may_repeat(problem, attempt, tried + pause):
                raise remote_error(problem, place, doing, tried)
            if tried > _QUIET_SECONDS and not has_warned:
                has_warned = True
                seconds = self.options.retry_seconds
                _log.warning("%s: %s; it is tried again for up to %.0f s", place, problem, seconds)
            time.sleep(pause)

    def _may_repeat(self, problem: Problem, attempt: int, seconds: float) -> bool:
        if problem.kind in (Kind.WRONG_RANGE, Kind.NO_CREDENTIALS):
            return attempt < _MOST_WRONG_ANSWERS and seconds <= _WRONG_ANSWERS_SECONDS
        return problem.kind is Kind.PASSING and seconds <= self.options.retry_seconds

    def _problem_of(self, error: Exception) -> Problem:
        if self.provider is not None and self.provider.failure is not None:
            failure, self.provider.failure = self.provider.failure, None
            raise failure from None
        problem = problem_of(error)
        if problem.kind is Kind.MISSING and not problem.code and not self.has_answered:
            # An answer to HEAD has no code that would tell a missing object from a missing bucket.
            problem = self._look_for_bucket() or problem
        return problem

    def _look_for_bucket(self) -> Problem | None:
        import obstore

        if self.address.is_http:
            return None
        try:
            call(
                lambda: obstore.list_with_delimiter_async(
                    self._library_stores()[0], "headrace-looks-for-the-bucket"
                )
            )
        except _library_errors() as error:
            found = problem_of(error)
            return found if found.kind is Kind.NO_BUCKET else None
        self.has_answered = True
        return None

    async def _hedged(self, request: Request[Result], count: int) -> Result:
        """Make a request, and a second one if it takes much longer than others took."""
        store = self._library_stores()[0]
        loop = asyncio.get_running_loop()
        began = loop.time()
        patience = self._latencies.patience(count)
        first = loop.create_task(request(store))
        try:
            await asyncio.wait({first}, timeout=patience)
            tasks = {first}
            if not first.done() and self._hedges < _MOST_HEDGES:
                tasks = {first, loop.create_task(request(store))}
            self._hedges += len(tasks) - 1
            try:
                result = await _first_success(tasks)
            finally:
                self._hedges -= len(tasks) - 1
        finally:
            first.cancel()
        self._latencies.add(count, loop.time() - began)
        return result

    # The library's stores

    def _library_stores(self) -> tuple[Any, Any]:
        """One for reading and one for writing, which differ in patience. Reads are repeated by `_ask` alone: the
        library does so without renewing credentials, and not for all reasons."""
        stores = self._stores
        if stores is None:
            with self._lock:
                stores = self._stores = self._stores or (
                    self._make_store(self.options.read_seconds, {"max_retries": 0}),
                    self._make_store(self.options.write_seconds, self._retries_of_parts()),
                )
        return stores

    def _renew(self, problem: Problem, generation: int) -> bool:
        """Look for other credentials after a denial; whether it is worth asking again."""
        with self._lock:
            if self._generation != generation:
                return True  # another thread has done it
            if self.provider is not None:
                is_new = self.provider.renew()
            else:
                is_s3_of_library = self.settings is not None and self.settings.source == "library"
                is_new = is_s3_of_library and (not problem.code or "Expired" in problem.code)
            if is_new:
                self._generation += 1
                self._stores = None
            return is_new

    def _retries_of_parts(self) -> dict[str, Any]:
        """The library repeats one part of an upload, where `_ask` would repeat the whole upload."""
        pauses = {"max_backoff": timedelta(seconds=_LONGEST_PAUSE_SECONDS)}
        seconds = self.options.retry_seconds
        return {"max_retries": 1000, "retry_timeout": timedelta(seconds=seconds), "backoff": pauses}

    def _make_store(self, read_seconds: float, retries: dict[str, Any]) -> Any:
        from obstore.exceptions import BaseError

        client_options = {
            "allow_http": True,
            "connect_timeout": timedelta(seconds=self.options.connect_seconds),
            "read_timeout": timedelta(seconds=read_seconds),
            "timeout": _WHOLE_REQUEST,
        }
        try:
            return self._make_kind({"client_options": client_options, "retry_config": retries})
        except (BaseError, ValueError) as error:
            reason = (
                "the account is not known: set AZURE_STORAGE_ACCOUNT_NAME" if "Account" in str(error) else ""
            )
            raise SettingsError(
                f"{self.address}: cannot be used: {reason or 'a setting of the environment is wrong'}"
            ) from None

    def _make_kind(self, common: dict[str, Any]) -> Any:
        from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

        root = f"{self.address.scheme}://{self.address.bucket}"
        if self.address.is_http:
            return HTTPStore.from_url(root, **common)
        if self.address.is_azure:
            is_url = "@" in self.address.bucket
            return (
                AzureStore.from_url(root, **common) if is_url else AzureStore(self.address.bucket, **common)
            )
        if self.settings is None:
            return GCSStore(self.address.bucket, **common)
        config = s3_config(self.address.bucket, self.settings)
        return S3Store(self.address.bucket, config=config, credential_provider=self.provider, **common)


def s3_config(bucket: str, settings: S3Settings) -> dict[str, Any]:
    """The settings in the words of the library. AWS itself is asked by `bucket.host`, all others by `host/bucket`."""
    virtual = settings.is_virtual_hosted(bucket)
    config: dict[str, Any] = {
        "region": settings.region or "us-east-1",
        "virtual_hosted_style_request": virtual,
    }
    if settings.endpoint:
        scheme, _, host = settings.endpoint.rstrip("/").partition("://")
        if not host:
            raise SettingsError(
                f"AWS_ENDPOINT_URL={redacted(settings.endpoint)}: must begin with http:// or https://"
            )
        config["endpoint"] = f"{scheme}://{bucket}.{host}" if virtual else f"{scheme}://{host}"
    if settings.skip_signature:
        config["skip_signature"] = True
    return config


def _library_errors() -> tuple[type[Exception], ...]:
    """All that a request may raise, apart from mistakes in our own code."""
    from obstore.exceptions import BaseError

    return (BaseError, FileNotFoundError, PermissionError, WrongAnswerError, HttpAnswerError)


async def _first_success(tasks: "set[asyncio.Task[Result]]") -> Result:
    """The first result of several tasks that do the same; an error only if all fail. The others are cancelled."""
    failure: BaseException = RuntimeError("there was no task")
    left = set(tasks)
    try:
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    return task.result()
                failure = error
    finally:
        for task in left:
            task.cancel()
            task.add_done_callback(_ignore_outcome)
    raise failure


def _ignore_outcome(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()


# The clients of this process

_clients: dict[tuple[Any, ...], Client] = {}
_clients_lock = fork_lock()


def client_for(address: RemoteAddress, options: RemoteOptions) -> Client:
    """The client of a bucket: the same one as long as the environment says the same."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            f"{address}: object stores need obstore: pip install 'headrace[s3]'"
        ) from None
    settings = read_settings() if address.is_s3 else None
    key = (address.scheme, address.bucket, settings, options)
    with _clients_lock:
        if key not in _clients:
            _clients[key] = Client(RemoteAddress(address.scheme, address.bucket, ""), settings, options)
        return _clients[key]
