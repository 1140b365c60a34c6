"""Addresses of object stores: `s3://bucket/prefix`, `gs://`, `az://`, `abfs(s)://` and, to read from, `http(s)://`.

Passwords and signatures have no place in an address: addresses end up in messages, states and manifests. Such an
address is refused, and what is secret in it is not repeated.
"""

import re
from dataclasses import dataclass

from headrace.errors import SettingsError

S3_SCHEMES = ("s3", "s3a")
AZURE_SCHEMES = ("az", "azure", "abfs", "abfss")
HTTP_SCHEMES = ("http", "https")
REMOTE_SCHEMES = (*S3_SCHEMES, "gs", *AZURE_SCHEMES, *HTTP_SCHEMES)
_ADDRESS = re.compile(r"([a-z0-9+.-]+)://([^/]*)/*(.*)", re.IGNORECASE | re.DOTALL)
_HIDDEN = "[hidden]"


@dataclass(frozen=True)
class RemoteAddress:
    scheme: str
    bucket: str
    """The bucket, or the container of Azure (`container@account...` for abfs), or the host of HTTP."""
    prefix: str
    """What the keys of all objects here begin with, without a slash at its end; may be empty."""

    def __str__(self) -> str:
        root = f"{self.scheme}://{self.bucket}"
        return f"{root}/{self.prefix}" if self.prefix else root

    @property
    def is_s3(self) -> bool:
        return self.scheme in S3_SCHEMES

    @property
    def is_azure(self) -> bool:
        return self.scheme in AZURE_SCHEMES

    @property
    def is_http(self) -> bool:
        return self.scheme in HTTP_SCHEMES

    def inside(self, name: str) -> "RemoteAddress":
        return RemoteAddress(self.scheme, self.bucket, self.key(name))

    def key(self, name: str) -> str:
        """The key of an object with this name here."""
        return f"{self.prefix}/{name}" if self.prefix else name


def parse_address(text: str) -> RemoteAddress:
    found = _ADDRESS.fullmatch(text)
    if found is None or not found[2]:
        raise SettingsError(f"{redacted(text)}: must name a bucket or host, like s3://bucket/prefix")
    scheme, bucket, prefix = found[1].lower(), found[2], found[3].strip("/")
    _refuse_secrets(scheme, bucket, prefix, text)
    parts = prefix.split("/") if prefix else []
    if any(part in ("", ".", "..") for part in parts):
        raise SettingsError(
            f"{redacted(text)}: has an empty, '.' or '..' part, which object stores do not resolve; write it without"
        )
    return RemoteAddress("s3" if scheme == "s3a" else scheme, bucket, prefix)


def _refuse_secrets(scheme: str, bucket: str, prefix: str, text: str) -> None:
    names_an_account = scheme in AZURE_SCHEMES and ":" not in bucket
    if "@" in bucket and not names_an_account:
        raise SettingsError(
            f"{redacted(text)}: an address must not hold a user name or password, because addresses are shown and "
            "saved; use the environment variables or files of your store for credentials"
        )
    if scheme in HTTP_SCHEMES and ("?" in prefix or "?" in bucket):
        raise SettingsError(
            f"{redacted(text)}: an address must not hold a query (as presigned addresses do), because each file has "
            "another address; use s3://, gs:// or az:// with credentials, or an address that is public"
        )


def redacted(address: str) -> str:
    """An address as it may be shown: without user, password, and the values of its query."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return f"{_HIDDEN}@{address.rpartition('@')[2]}" if "@" in address else address
    host, slash, path = rest.partition("/")
    path, question, _ = path.partition("?")
    host, host_question, _ = host.partition("?")
    user, at, place = host.rpartition("@")
    if at and not (scheme.lower() in AZURE_SCHEMES and ":" not in user):
        host = f"{_HIDDEN}@{place}"
    query = f"?{_HIDDEN}" if question or host_question else ""
    return f"{scheme}://{host}{slash}{path}{query}"


def is_within(address: str, folder: str) -> bool:
    """Whether an object is under a prefix, or is the object that has the prefix as its key."""
    scheme = folder.partition("://")[0].lower()
    if scheme not in REMOTE_SCHEMES:
        return False
    inner, outer = parse_address(address), parse_address(folder)
    is_same_bucket = (inner.scheme, inner.bucket) == (outer.scheme, outer.bucket)
    return is_same_bucket and f"{inner.prefix}/".startswith(outer.key(""))
