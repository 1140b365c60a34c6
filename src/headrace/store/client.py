"""Requests to object stores: repeated when that may help, sent twice when they are slow, with credentials renewed."""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

from headrace.errors import MissingExtraError, SettingsError, how_to_install
from headrace.fork_lock import fork_lock
from headrace.store.credential_hints import about_missing_credentials
from headrace.store.credentials import CredentialProvider, S3Settings, read_settings
from headrace.store.http import Connections
from headrace.store.latencies import Latencies
from headrace.store.library import call
from headrace.store.reading import DirectReading, KeyRange, LibraryReading, Object, Range, Reading
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
from headrace.store.s3 import Endpoint, LibrarySigner, OwnSigner, S3Requests
from headrace.store.store import PAUSES

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
LibraryRequest = Callable[[Any], Result]
"""Makes a request of the library's store that it is given."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 3.0
_MOST_WRONG_ANSWERS, _WRONG_ANSWERS_SECONDS = 3, 10.0
_QUIET_SECONDS = 5.0
"""How long requests are repeated without a word."""
_WHOLE_REQUEST = timedelta(hours=1)
_PRESIGNED_FOR = timedelta(minutes=15)


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
        self.has_answered = False
        """Whether the bucket is known to be there."""
        self._latencies = Latencies(options.hedge_seconds)
        self._connections = Connections(options.connect_seconds, options.read_seconds)
        self._lock = fork_lock()
        self._generation = 0
        self._read_store: Any = None
        self._write_store: Any = None
        self._reading: Reading | None = None

    @property
    def endpoint_shown(self) -> str:
        """The server that is asked, as messages name it; empty if only the client library knows it."""
        if self.settings is not None:
            return self.settings.endpoint_shown
        return f"{self.address.scheme}://{self.address.bucket}" if self.address.is_http else ""

    # Asking

    def get(self, key: str, place: str, start: int, stop: int, tag: str | None = None) -> Range:
        return self.ask(lambda: self._current_reading().get(key, start, stop, tag), place, "read")

    def get_together(self, wanted: Sequence[KeyRange]) -> list[Range | None]:
        """Several ranges at the same time, each as far as it comes at the first attempt. What is None should be asked
        for with `get`, which repeats it and says what is wrong."""
        try:
            return self._current_reading().get_together(wanted)
        except _request_errors():
            return [None] * len(wanted)

    def head(self, key: str, place: str) -> Object:
        return self.ask(lambda: self._current_reading().head(key), place, "read")

    def read(self, request: LibraryRequest[Result], place: str) -> Result:
        """Make a request of the library that changes nothing."""
        return self.ask(lambda: call(lambda: request(self._library_read_store())), place, "read")

    def write(self, request: LibraryRequest[Result], place: str, doing: str = "written") -> Result:
        """Make a request of the library that changes something. It may be carried out more than once."""
        return self.ask(lambda: call(lambda: request(self._library_write_store())), place, doing)

    def ask(self, request: Callable[[], Result], place: str, doing: str) -> Result:
        """Make any request, and repeat it as long as that may help. `doing` is "read", "written" ..."""
        began, attempt = time.monotonic(), 0
        has_renewed = has_warned = False
        while True:
            generation = self._generation
            try:
                result = request()
                self.has_answered = True
                return result
            except _request_errors() as error:
                problem = self._problem_of(error)
            if problem.kind is Kind.DENIED and not has_renewed:
                has_renewed = True
                if self._renew(problem, generation):
                    continue
            if problem.kind in (Kind.EXISTS, Kind.CHANGED, Kind.PAST_END):
                raise RefusedError(problem)
            tried = time.monotonic() - began
            pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**attempt) * PAUSES.uniform(0.5, 1.0)
            attempt += 1
            if not self._may_repeat(problem, attempt, tried + pause):
                raise remote_error(problem, place, doing, tried, self.endpoint_shown)
            if tried > _QUIET_SECONDS and not has_warned:
                has_warned = True
                seconds = self.options.retry_seconds
                server = f" ({self.endpoint_shown})" if self.endpoint_shown else ""
                _log.warning("%s: %s%s; it is tried again for up to %.0f s", place, problem, server, seconds)
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
                lambda: obstore.list_with_delimiter(
                    self._library_read_store(), "headrace-looks-for-the-bucket"
                )
            )
        except _request_errors() as error:
            found = problem_of(error)
            return found if found.kind is Kind.NO_BUCKET else None
        self.has_answered = True
        return None

    # How objects are read

    def _current_reading(self) -> Reading:
        reading = self._reading
        if reading is None:
            with self._lock:
                reading = self._reading = self._reading or self._choose_reading()
        return reading

    def _choose_reading(self) -> Reading:
        requests = self.s3_requests()
        if requests is not None:
            return DirectReading(requests, self._latencies)
        return LibraryReading(self._library_read_store(), self._latencies)

    def s3_requests(self) -> S3Requests | None:
        """Our own requests; None where only the library knows how to make them."""
        if self.settings is None:
            return None
        endpoint = Endpoint(self.address.bucket, self.settings)
        if endpoint.has_proxy:
            return None
        if self.settings.source == "library":
            return S3Requests(LibrarySigner(self._presign), self._connections)
        return S3Requests(OwnSigner(endpoint, self.settings.region, self.provider), self._connections)

    def _presign(self, method: str, key: str) -> str:
        import obstore

        http_method: Any = method
        return str(call(lambda: obstore.sign(self._library_read_store(), http_method, key, _PRESIGNED_FOR)))

    # The library's stores

    # One for reading and one for writing, which differ in patience. Reads are repeated by `ask` alone: the library does
    # so without renewing credentials, and not for all reasons.

    def _library_read_store(self) -> Any:
        if self._read_store is None:
            self._read_store = self._make_store(self.options.read_seconds, {"max_retries": 0})
        return self._read_store

    def _library_write_store(self) -> Any:
        if self._write_store is None:
            self._write_store = self._make_store(self.options.write_seconds, self._retries_of_parts())
        return self._write_store

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
                self._read_store = self._write_store = self._reading = None
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
            reason = ""
            if self.address.is_azure and "Account" in str(error):
                reason = "the account is not known: set AZURE_STORAGE_ACCOUNT_NAME"
            wrong = f"a setting of the environment is wrong; {about_missing_credentials(str(self.address))}"
            raise SettingsError(f"{self.address}: cannot be used: {reason or wrong}") from None

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


def _request_errors() -> tuple[type[Exception], ...]:
    """All that a request may raise, apart from mistakes in our own code."""
    own = (WrongAnswerError, HttpAnswerError)
    if "obstore" not in sys.modules:
        return own
    from obstore.exceptions import BaseError

    return (*own, BaseError, FileNotFoundError, PermissionError)


# The clients of this process

_clients: dict[tuple[Any, ...], Client] = {}
_clients_lock = fork_lock()


def client_for(address: RemoteAddress, options: RemoteOptions) -> Client:
    """The client of a bucket: the same one as long as the environment says the same."""
    if find_spec("obstore") is None:
        raise MissingExtraError(f"{address}: object stores need obstore: {how_to_install('s3')}")
    settings = read_settings() if address.is_s3 else None
    key = (address.scheme, address.bucket, settings, options)
    with _clients_lock:
        if key not in _clients:
            _clients[key] = Client(RemoteAddress(address.scheme, address.bucket, ""), settings, options)
        return _clients[key]
