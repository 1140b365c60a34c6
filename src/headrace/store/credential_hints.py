"""What to do about missing or refused credentials: each kind of store looks for them elsewhere."""

from headrace.store.remote_address import AZURE_SCHEMES, HTTP_SCHEMES

_S3 = "s3"
_GOOGLE = "gs"
_AZURE = "az"
_HTTP = "http"

_MISSING = {
    _S3: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for a bucket "
    "that is public",
    _GOOGLE: "set GOOGLE_SERVICE_ACCOUNT to the file of a service account's key, or GOOGLE_APPLICATION_CREDENTIALS to "
    "a file of credentials, or GOOGLE_SKIP_SIGNATURE=true for a bucket that is public",
    _AZURE: "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or "
    "AZURE_SKIP_SIGNATURE=true for a container that is public",
    _HTTP: "web servers are read without credentials; use an address that is public",
}
_DENIED = {
    _S3: "check the credentials (AWS_PROFILE or AWS_ACCESS_KEY_ID ...), the region, the bucket's policy and the "
    "spelling; some servers answer so for a missing object, too",
    _GOOGLE: "check the credentials (GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS), the roles that they "
    "have for the bucket, and the spelling",
    _AZURE: "check the credentials (AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or "
    "AZURE_STORAGE_SAS_TOKEN), the roles that they have for the container, and the spelling",
    _HTTP: "web servers are read without credentials; use an address that is public, or s3://, gs:// or az:// with "
    "credentials",
}


def about_missing_credentials(place: str) -> str:
    """How to give credentials for the store of an address."""
    return _MISSING[_family(place)]


def about_denial(place: str) -> str:
    """What to check if the store of an address denies access."""
    return _DENIED[_family(place)]


def is_s3(place: str) -> bool:
    return _family(place) == _S3


def _family(place: str) -> str:
    scheme = place.partition("://")[0].lower()
    if scheme == _GOOGLE:
        return _GOOGLE
    if scheme in AZURE_SCHEMES:
        return _AZURE
    return _HTTP if scheme in HTTP_SCHEMES else _S3
