"""What an answer of an object store means, and how to say it.

The client library puts everything about a failure into the text of its errors. The text may hold addresses with
signatures, and is never shown: it is read here for the status and the code of the answer, and for known reasons.
"""

import enum
import re
from dataclasses import dataclass

from headrace.errors import StorageError
from headrace.store.credential_hints import about_denial, about_missing_credentials, is_s3

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_REGION = re.compile(r"<Region>([\w-]+)</Region>")
_PASSING_STATUSES = (408, 425, 429)
_NEVER_STATUSES = (501, 505)
"""What the server does not support at all. Everything else from 500 on may pass."""
# An upload that somebody has aborted (NoSuchUpload) is begun again.
_PASSING_CODES = ("RequestTimeout", "SlowDown", "InternalError", "OperationAborted", "NoSuchUpload")
_EXPIRED_CODES = (
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
    "RequestExpired",
    "InvalidToken",
)
# The services that the client library asks for credentials: of machines, of containers, and for web identities.
_ASKS_FOR_CREDENTIALS = re.compile(
    r"performing \w+ https?://(169\.254\.|\[fd00:ec2|sts\.|metadata\.)|/latest/(api/token|meta-data)|metadata\.google"
    r"|performing token request"
)
NO_TLS = "the server does not speak TLS"
_REASONS = {
    "dns error": "the host's name cannot be resolved",
    "Connection refused": "the connection was refused",
    "Connection reset": "the connection was reset",
    "connection closed before message completed": "the connection was closed",
    "InvalidContentType": NO_TLS,
    "certificate": "the certificate of the server is not trusted",
    "end of file before message length reached": "the answer was cut off",
    "IncompleteBody": "the answer was cut off",
    "operation timed out": "there was no answer in time",
    "TimedOut": "there was no answer in time",
    "error decoding response body": "the answer was cut off",
    "tcp connect error": "no connection could be made",
}


class Kind(enum.Enum):
    MISSING = "there is no such object"
    NO_BUCKET = "there is no such bucket"
    DENIED = "access was denied"
    EXISTS = "the object exists already"
    CHANGED = "the object is another one than expected"
    PAST_END = "the range begins behind the end of the object"
    NO_CREDENTIALS = "there are no credentials"
    WRONG_RANGE = "the server sent another range than it was asked for"
    PASSING = "the request failed"
    PERMANENT = "the request is not supported"


@dataclass(frozen=True)
class Problem:
    kind: Kind
    status: int = 0
    """Of the HTTP answer; 0 if there was none."""
    code: str = ""
    """Of the error in S3's XML."""
    reason: str = ""
    region: str = ""

    def __str__(self) -> str:
        if self.status:
            return f"the server answered {self.status} {self.code}".rstrip()
        return self.reason or self.kind.value


class WrongAnswerError(Exception):
    """An answer that is not what was asked for: another range, or fewer bytes."""


class HttpAnswerError(Exception):
    """A failed request that was not made by the client library; its text has the same form."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status code: {status}: {body}" if status else body)


class RefusedError(Exception):
    """The store has refused a request for a reason that the caller knows what to do about."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def problem_of(error: Exception) -> Problem:
    """What one failed request means."""
    if isinstance(error, WrongAnswerError):
        return Problem(Kind.WRONG_RANGE, reason=str(error))
    name, text = type(error).__name__, str(error)
    # The text ends with a second version of itself, for developers.
    text = text.partition("Debug source:")[0] or text
    if not isinstance(error, HttpAnswerError):
        # Our own answers may repeat the key of an object, which may be anything.
        if _ASKS_FOR_CREDENTIALS.search(text):
            return Problem(Kind.NO_CREDENTIALS)
        if "redirect without LOCATION" in text:
            return Problem(Kind.PERMANENT, 301)
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    code = found[1] if (found := _CODE.search(text)) else ""
    region = found[1] if (found := _REGION.search(text)) else ""
    is_own = isinstance(error, HttpAnswerError) and not status
    reason = text if is_own else _reason_in(str(error))
    kind = Kind.PERMANENT if reason == NO_TLS and not status else _kind_of(error, name, text, status, code)
    return Problem(kind, status, code, reason, region)


def _kind_of(error: Exception, name: str, text: str, status: int, code: str) -> Kind:
    if code == "NoSuchBucket":
        return Kind.NO_BUCKET
    if code in _EXPIRED_CODES or (status == 400 and not code):
        # Expired credentials are a bad request to S3, and an answer to HEAD has no code.
        return Kind.DENIED
    if code in _PASSING_CODES:
        return Kind.PASSING
    if isinstance(error, FileNotFoundError) or status == 404:
        return Kind.MISSING
    if name == "AlreadyExistsError":
        return Kind.EXISTS
    if name in ("PreconditionError", "NotModifiedError") or status == 412:
        return Kind.CHANGED
    if name in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        return Kind.DENIED
    if status == 416:
        return Kind.PAST_END
    if status == 409:
        # Two conditional writes at once: one of them is asked to try again.
        return Kind.PASSING
    if status:
        is_passing = status in _PASSING_STATUSES or (status >= 500 and status not in _NEVER_STATUSES)
        return Kind.PASSING if is_passing else Kind.PERMANENT
    if "partial" in text or "range" in text.lower():
        return Kind.WRONG_RANGE
    if "certificate" in text or name in (
        "NotSupportedError",
        "InvalidPathError",
        "UnknownConfigurationKeyError",
    ):
        return Kind.PERMANENT
    return Kind.PASSING


def _reason_in(text: str) -> str:
    for mark, reason in _REASONS.items():
        if mark in text:
            return reason
    return ""


def remote_error(
    problem: Problem, place: str, doing: str, tried_seconds: float, endpoint: str = ""
) -> Exception:
    """The error that a user sees. `place` is the object's address; `doing` is "read", "written" ...; `endpoint` is the
    server that was asked, if it is known."""
    cannot = f"{place}: cannot be {doing}: "
    kind = problem.kind
    if kind is Kind.MISSING:
        return FileNotFoundError(f"{place}: no such object; check the spelling, also of upper and lower case")
    if kind is Kind.NO_BUCKET:
        return StorageError(
            f"{cannot}there is no such bucket; check its spelling, the endpoint and the region"
        )
    if kind is Kind.NO_CREDENTIALS:
        return StorageError(
            f"{cannot}no credentials were found, nor given by this machine; {about_missing_credentials(place)}"
        )
    if problem.code == "RequestTimeTooSkewed":
        return StorageError(
            f"{cannot}the clock of this machine differs too much from the server's (RequestTimeTooSkewed); set it"
        )
    if is_s3(place) and _is_of_another_region(problem):
        region = f" {problem.region}" if problem.region else ""
        return StorageError(
            f"{cannot}the bucket is in another region{region} ({problem}); set AWS_REGION to the bucket's region"
        )
    if kind is Kind.DENIED:
        return StorageError(f"{cannot}{problem}: {_about_denial(problem, place)}")
    if kind is Kind.WRONG_RANGE:
        return StorageError(
            f"{cannot}the server, or a proxy before it, sent other bytes than it was asked for "
            f"({problem.reason or kind.value}); use an endpoint that follows Range requests"
        )
    if kind is Kind.PASSING:
        return StorageError(
            f"{cannot}{problem}, for {tried_seconds:.0f} s; check the network and {_named(endpoint)}. Longer "
            "interruptions are bridged with HEADRACE_RETRY_SECONDS"
        )
    if problem.reason == NO_TLS:
        return StorageError(
            f"{cannot}{NO_TLS}; write http:// instead of https:// in {endpoint or 'the address'}"
        )
    return StorageError(f"{cannot}{problem}; check {_named(endpoint)} and what it supports")


def _is_of_another_region(problem: Problem) -> bool:
    is_redirect = problem.status in (301, 307)
    return bool(problem.region) or is_redirect or problem.code == "AuthorizationHeaderMalformed"


def _named(endpoint: str) -> str:
    return f"the endpoint {endpoint}" if endpoint else "the endpoint"


def _about_denial(problem: Problem, place: str) -> str:
    if problem.code in _EXPIRED_CODES:
        return "the credentials have expired, and asking for new ones gave none; sign in again"
    if problem.code == "SignatureDoesNotMatch":
        return "the secret key does not belong to the access key; check AWS_SECRET_ACCESS_KEY"
    if problem.code == "InvalidAccessKeyId":
        return "the access key is not known there; check AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
    return about_denial(place)
