"""Requests to a bucket of S3 that have no body, signed by ourselves."""

import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Protocol
from urllib.parse import urlsplit

from headrace.errors import SettingsError
from headrace.store.credentials import CredentialProvider, S3Settings
from headrace.store.http import Answer, ConnectionFailure, Connections, Host, Request, first_answer
from headrace.store.remote_address import redacted
from headrace.store.remote_errors import HttpAnswerError
from headrace.store.signing import encoded_path, encoded_query, signature_headers

_SIGNED_SECONDS = 300.0
"""How long an address is used that the client library has signed. It is valid for longer."""
_MOST_SIGNED = 10_000


class Signer(Protocol):
    def sign(self, method: str, key: str, query: str) -> tuple[Host, str, dict[str, str]]:
        """The host, the target and the headers of a request."""
        ...


class Endpoint:
    """Where the keys of a bucket are: AWS itself is asked by `bucket.host`, most others by `host/bucket`."""

    def __init__(self, bucket: str, settings: S3Settings) -> None:
        region = settings.region or "us-east-1"
        text = settings.endpoint or f"https://s3.{region}.amazonaws.com"
        self.host, root = _parsed(text)
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
    parts = urlsplit(endpoint)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(
            f"AWS_ENDPOINT_URL={redacted(endpoint)}: must begin with http:// or https://, and name a host"
        )
    is_secure = parts.scheme == "https"
    return Host(parts.hostname, port or (443 if is_secure else 80), is_secure), parts.path.rstrip("/")


class OwnSigner:
    """Signs with credentials that we have found ourselves, or not at all."""

    def __init__(self, endpoint: Endpoint, region: str, provider: CredentialProvider | None) -> None:
        self._endpoint, self._region, self._provider = endpoint, region or "us-east-1", provider

    def sign(self, method: str, key: str, query: str) -> tuple[Host, str, dict[str, str]]:
        host, path = self._endpoint.host, self._endpoint.path(key)
        target = f"{path}?{query}" if query else path
        if self._provider is None:
            return host, target, {}
        credentials = self._provider.current
        return host, target, signature_headers(credentials, self._region, method, str(host), path, query)


class LibrarySigner:
    """Takes addresses that the client library has signed, with credentials that only it can get."""

    def __init__(self, presign: Callable[[str, str], str]) -> None:
        self._presign = presign
        self._signed: dict[tuple[str, str], tuple[float, str]] = {}
        self._lock = threading.Lock()

    def sign(self, method: str, key: str, query: str) -> tuple[Host, str, dict[str, str]]:
        now = time.monotonic()
        signed_at, address = self._signed.get((method, key), (-_SIGNED_SECONDS, ""))
        if now - signed_at >= _SIGNED_SECONDS:
            address = self._presign(method, key)
            with self._lock:
                if len(self._signed) >= _MOST_SIGNED:
                    self._signed.clear()
                self._signed[method, key] = now, address
        host, _ = _parsed(address)
        parts = urlsplit(address)
        return host, f"{parts.path}?{parts.query}", {}


class S3Requests:
    def __init__(self, signer: Signer, connections: Connections) -> None:
        self._signer, self._connections = signer, connections

    def ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        most_bytes: int,
        patience: float | None = None,
    ) -> Answer:
        """The answer, if it is a success. After `patience` seconds, the request is sent a second time."""
        host, target, signed = self._signer.sign(method, key, encoded_query(query or {}))
        request = Request(host, method, target, {**signed, **(headers or {})}, most_bytes)
        try:
            answer = first_answer(self._connections, request, patience)
        except ConnectionFailure as failure:
            raise HttpAnswerError(0, str(failure)) from None
        if answer.status >= 300:
            region = answer.headers.get("x-amz-bucket-region", "")
            body = bytes(answer.content).decode(errors="replace")
            raise HttpAnswerError(answer.status, f"{body}<Region>{region}</Region>" if region else body)
        return answer
