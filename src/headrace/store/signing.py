"""The headers that prove to S3, or to a server that is compatible with it, who asks (AWS Signature Version 4)."""

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote

from headrace.store.credentials import Credentials

_EMPTY_DIGEST = hashlib.sha256(b"").hexdigest()


def encoded_path(path: str) -> str:
    return quote(path, safe="/~")


def encoded_query(query: Mapping[str, str]) -> str:
    return "&".join(
        f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in sorted(query.items())
    )


def signature_headers(
    credentials: Credentials, region: str, method: str, host: str, path: str, query: str
) -> dict[str, str]:
    """For a request without a body. `path` and `query` are encoded."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": _EMPTY_DIGEST, "x-amz-date": moment}
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    canonical = "\n".join([method, path, query, *lines, "", names, _EMPTY_DIGEST])
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{credentials.secret_access_key}".encode()
    for part in (moment[:8], region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}".encode(), "sha256").hex()
    del headers["host"]
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key_id}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    return headers
