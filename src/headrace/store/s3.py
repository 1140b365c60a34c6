"""Requests to a bucket of S3 that have no body, signed by ourselves."""

import math
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from headrace.errors import SettingsError
from headrace.store.credentials import CredentialProvider, Credentials, S3Settings
from headrace.store.http import Connections
from headrace.store.http_asking import Outcome, outcomes_of
from headrace.store.http_connection import ConnectionFailure
from headrace.store.http_messages import Answer, Host, Request
from headrace.store.remote_address import redacted
from headrace.store.remote_errors import HttpAnswerError
from headrace.store.signing import encoded_path, encoded_query, signature_headers

_SIGNED_SECONDS = 60.0
"""How long a signature is used again. It is valid for longer."""
_MOST_SIGNED = 1000


Result = TypeVar("Result")


class Signer(Protocol):
    def sign(self, method: str, key: str, query: str) -> tuple[Host, str, dict[str, str]]:
        """The host, the target and the headers of a request."""
        ...


class Endpoint:
    """Where the keys of a bucket are: AWS itself is asked by `bucket.host`, most others by `host/bucket`."""

    def __init__(self, bucket: str, settings: S3Settings) -> None:
        self.host, root = _parsed(settings.endpoint or settings.endpoint_of_amazon)
        if settings.is_virtual_hosted(bucket):
            self.host = Host(f"{bucket}.{self.host.name}", self.host.port, self.host.is_secure)
            self._root = f"{root}/"
        else:
            self._root = f"{root}/{bucket}/"

    def path(self, key: str) -> str:
        return encoded_path(f"{self._root}{key}" if key else self._root.rstrip("/") or "/")

    @property
    def has_proxy(self) -> bool:
        """Whether the environment wants requests to this host to go through a proxy."""
        proxies = urllib.request.getproxies()
        scheme = "https" if self.host.is_secure else "http"
        wanted = proxies.get(scheme) or proxies.get("all")
        return bool(wanted) and not urllib.request.proxy_bypass(self.host.name)


def _parsed(endpoint: str) -> tuple[Host, str]:
    try:
        parts = urlsplit(endpoint)
        port = parts.port
        is_understood = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_understood = False
    if not is_understood or not parts.hostname:
        raise SettingsError(
            f"AWS_ENDPOINT_URL={redacted(endpoint)}: must begin with http:// or https:// and name a host, with a port "
            "if it is not the usual one"
        )
    is_secure = parts.scheme == "https"
    return Host(parts.hostname, port or (443 if is_secure else 80), is_secure), parts.path.rstrip("/")


class _Recent(Generic[Result]):
    """A function whose results are used again for a while."""

    def __init__(self, function: Callable[..., Result]) -> None:
        self._function = function
        self._results: dict[tuple[Any, ...], tuple[float, Result]] = {}

    def __call__(self, *arguments: Any) -> Result:
        # By the clock that servers compare: it goes on while a machine sleeps.
        now = time.time()
        made_at, result = self._results.get(arguments, (-math.inf, None))
        if result is None or not 0 <= now - made_at <= _SIGNED_SECONDS:
            if len(self._results) >= _MOST_SIGNED:
                self._results = {}
            result = self._function(*arguments)
            self._results[arguments] = now, result
        return result


class OwnSigner:
    """Signs with credentials that we have found ourselves, or not at all."""

    def __init__(self, endpoint: Endpoint, region: str, provider: CredentialProvider | None) -> None:
        self._endpoint, self._region, self._provider = endpoint, region or "us-east-1", provider
        self._headers = _Recent(self._sign)

    def sign(self, method: str, key: str, query: str) -> tuple[Host, str, dict[str, str]]:
        host, path = self._endpoint.host, self._endpoint.path(key)
        target = f"{path}?{query}" if query else path
        if self._provider is None:
            return host, target, {}
        # What is signed is the object, not the range: requests for other ranges of it use the same signature.
        return host, target, self._headers(self._provider.current, method, path, query)

    def _sign(self, credentials: Credentials, method: str, path: str, query: str) -> dict[str, str]:
        host = str(self._endpoint.host)
        return signature_headers(credentials, self._region, method, host, path, query)


class LibrarySigner:
    """Takes addresses that the client library has signed, with credentials that only it can get."""

    def __init__(self, presign: Callable[[str, str], str]) -> None:
        self._address = _Recent(presign)

    def sign(self, method: str, key: str, query: str) -> tuple[Host, str, dict[str, str]]:
        address = self._address(method, key)
        host, _ = _parsed(address)
        parts = urlsplit(address)
        return host, f"{parts.path}?{parts.query}", {}


@dataclass(frozen=True, kw_only=True)
class S3Request:
    method: str
    key: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    most_bytes: int
    """A longer body is not read."""


class S3Requests:
    def __init__(self, signer: Signer, connections: Connections) -> None:
        self._signer, self._connections = signer, connections

    def ask(self, request: S3Request, patience: float | None = None) -> Answer:
        """The answer, if it is a success. After `patience` seconds, the request is sent a second time."""
        (answer,) = self.ask_together([request], patience)
        if isinstance(answer, HttpAnswerError):
            raise answer
        return answer

    def ask_together(
        self, requests: Sequence[S3Request], patience: float | None
    ) -> list[Answer | HttpAnswerError]:
        """The answers to requests that are made at the same time."""
        signed = [self._signed(request) for request in requests]
        return [_judged(outcome) for outcome in outcomes_of(self._connections, signed, patience)]

    def _signed(self, request: S3Request) -> Request:
        host, target, signed = self._signer.sign(request.method, request.key, encoded_query(request.query))
        return Request(host, request.method, target, {**signed, **request.headers}, request.most_bytes)


def _judged(outcome: Outcome) -> Answer | HttpAnswerError:
    if isinstance(outcome, ConnectionFailure):
        return HttpAnswerError(0, str(outcome))
    if outcome.status < 300:
        return outcome
    region = outcome.headers.get("x-amz-bucket-region", "")
    body = bytes(outcome.content).decode(errors="replace")
    return HttpAnswerError(outcome.status, f"{body}<Region>{region}</Region>" if region else body)
