"""Uploads in parts that nobody has finished: a writer that is killed leaves them, and they cost what objects cost.

They are in no listing of objects, and the client library cannot list them, so the few requests here are signed by
ourselves (AWS Signature Version 4, which servers that are compatible with S3 check as well). Azure forgets unfinished
uploads by itself, and GCS with a rule of the bucket: nothing is listed for them.
"""

import asyncio
import contextlib
import hashlib
import hmac
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from headrace.errors import StorageError
from headrace.store.client import Client
from headrace.store.credentials import Credentials, S3Settings
from headrace.store.remote import RemoteStore
from headrace.store.remote_errors import HttpAnswerError

_EMPTY_DIGEST = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class UnfinishedUpload:
    key: str
    id: str
    started: datetime


def unfinished_uploads(store: RemoteStore) -> list[UnfinishedUpload]:
    """All of them under the prefix of a store, with those in its folders. Some may still be under way."""
    if not store.address.is_s3:
        return []
    prefix = f"{store.address.prefix}/" if store.address.prefix else ""
    found: list[UnfinishedUpload] = []
    query = {"uploads": "", "prefix": prefix}
    while True:
        page = _parse(store, _request(store, "GET", "", query))
        found += _uploads_in(page)
        if page.findtext("IsTruncated") != "true":
            return found
        query["key-marker"] = page.findtext("NextKeyMarker") or ""
        query["upload-id-marker"] = page.findtext("NextUploadIdMarker") or ""


def upload_bytes(store: RemoteStore, upload: UnfinishedUpload) -> int:
    """What the parts take that have arrived; 0 if the upload is not there any more."""
    query, total = {"uploadId": upload.id}, 0
    while True:
        try:
            page = _parse(store, _request(store, "GET", upload.key, query))
        except FileNotFoundError:
            return total
        total += sum(int(part.findtext("Size") or 0) for part in page.iter("Part"))
        if page.findtext("IsTruncated") != "true":
            return total
        query["part-number-marker"] = page.findtext("NextPartNumberMarker") or ""


def abort_upload(store: RemoteStore, upload: UnfinishedUpload) -> None:
    """Delete the parts of an upload. Whoever is still at it gets an error."""
    # If it is not there, it was finished, or aborted by somebody else.
    with contextlib.suppress(FileNotFoundError):
        _request(store, "DELETE", upload.key, {"uploadId": upload.id})


def _uploads_in(page: ElementTree.Element) -> Iterator[UnfinishedUpload]:
    for upload in page.iter("Upload"):
        started = datetime.fromisoformat(upload.findtext("Initiated") or "1970-01-01T00:00:00+00:00")
        yield UnfinishedUpload(upload.findtext("Key") or "", upload.findtext("UploadId") or "", started)


def _parse(store: RemoteStore, content: bytes) -> ElementTree.Element:
    try:
        page = ElementTree.fromstring(content)
    except ElementTree.ParseError:
        raise StorageError(
            f"{store.name}: the server's list of unfinished uploads cannot be understood; use a rule of the bucket's "
            "lifecycle to remove them"
        ) from None
    for element in page.iter():
        element.tag = element.tag.rpartition("}")[2]
    return page


def _request(store: RemoteStore, method: str, key: str, query: Mapping[str, str]) -> bytes:
    client = store.client

    settings = client.settings
    if settings is None:
        raise StorageError(f"{store.name}: unfinished uploads can only be listed on S3")

    async def request(_: Any) -> bytes:
        return await asyncio.to_thread(_send, client, settings, method, key, query)

    return client.write(request, store.name, "searched for unfinished uploads")


def _send(client: Client, settings: S3Settings, method: str, key: str, query: Mapping[str, str]) -> bytes:
    url = _url(client.address.bucket, settings, key)
    headers = {} if settings.skip_signature else _sign(client, settings, method, url, query)
    text = "&".join(f"{_encoded(name)}={_encoded(value)}" for name, value in sorted(query.items()))
    request = urllib.request.Request(f"{url}?{text}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=client.options.write_seconds) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            body = error.read().decode(errors="replace")
        raise HttpAnswerError(error.code, body) from None
    except OSError as error:
        raise HttpAnswerError(0, str(error)) from None


def _url(bucket: str, settings: S3Settings, key: str) -> str:
    path = f"/{quote(key, safe='/~')}" if key else "/"
    region = settings.region or "us-east-1"
    scheme, _, host = (settings.endpoint or f"https://s3.{region}.amazonaws.com").rstrip("/").partition("://")
    if settings.is_virtual_hosted(bucket):
        return f"{scheme}://{bucket}.{host}{path}"
    return f"{scheme}://{host}/{bucket}{path if key else ''}"


def _sign(
    client: Client, settings: S3Settings, method: str, url: str, query: Mapping[str, str]
) -> dict[str, str]:
    """The headers that prove who asks."""
    credentials = _credentials(client)
    region = settings.region or "us-east-1"
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    parts = urlsplit(url)
    headers = {"host": parts.netloc, "x-amz-content-sha256": _EMPTY_DIGEST, "x-amz-date": moment}
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    names = ";".join(sorted(headers))
    text = "&".join(f"{_encoded(name)}={_encoded(value)}" for name, value in sorted(query.items()))
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    canonical = "\n".join([method, parts.path or "/", text, *lines, "", names, _EMPTY_DIGEST])
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{credentials.secret_access_key}".encode()
    for part in (moment[:8], region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}".encode(), "sha256").hex()
    del headers["host"]
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key_id}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    return headers


def _credentials(client: Client) -> Credentials:
    if client.provider is None:
        raise StorageError(
            f"{client.address}: unfinished uploads cannot be listed with credentials that belong to this machine; use "
            "AWS_PROFILE or AWS_ACCESS_KEY_ID, or a rule of the bucket's lifecycle that removes them"
        )
    return client.provider.current


def _encoded(text: str) -> str:
    return quote(text, safe="~")
