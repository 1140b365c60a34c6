"""Uploads in parts that nobody has finished: a writer that is killed leaves them, and they cost what objects cost.

They are in no listing of objects, and the client library cannot list them, so the requests are our own. Azure forgets
unfinished uploads by itself, and GCS with a rule of the bucket: nothing is listed for them.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from xml.etree import ElementTree

from headrace.errors import StorageError
from headrace.store.remote import RemoteStore
from headrace.store.s3 import S3Request

_MOST_BYTES = 1 << 24


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
        marker = {
            "key-marker": page.findtext("NextKeyMarker") or "",
            "upload-id-marker": page.findtext("NextUploadIdMarker") or "",
        }
        if marker.items() <= query.items():
            return found  # a server that always says that there is more
        query |= marker


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
    requests = client.s3_requests()
    if requests is None or client.settings is None or client.settings.source == "library":
        raise StorageError(
            f"{store.name}: unfinished uploads cannot be listed through a proxy, nor with credentials of this machine; "
            "use AWS_PROFILE or AWS_ACCESS_KEY_ID, or a rule of the bucket's lifecycle that removes them"
        )

    asked = S3Request(method=method, key=key, query=query, most_bytes=_MOST_BYTES)

    def request() -> bytes:
        return bytes(requests.ask(asked).content)

    return client.ask(request, store.name, "searched for unfinished uploads")
