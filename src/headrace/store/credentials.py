"""Where the settings and credentials for S3 come from: environment variables, the shared files of AWS, and processes.

What is not found here is left to the client library: web identities, containers (ECS, EKS) and machines (EC2).
"""

import configparser
import json
import logging
import os
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from headrace.errors import HeadraceError, MissingExtraError, SettingsError
from headrace.fork_lock import fork_lock
from headrace.store.remote_address import redacted

_log = logging.getLogger(__name__)
_PROCESS_SECONDS = 60
_READ_AGAIN_SECONDS = 30.0
_ASK_BOTO3_AFTER = timedelta(minutes=15)
_NEEDS_BOTO3 = (
    "sso_session",
    "sso_start_url",
    "sso_account_id",
    "role_arn",
    "source_profile",
    "login_session",
)


@dataclass(frozen=True)
class Credentials:
    access_key_id: str
    secret_access_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    expires_at: datetime | None = None

    def __post_init__(self) -> None:
        for name, text in (("access key", self.access_key_id), ("secret key", self.secret_access_key)):
            _check_plain(name, text)
        _check_plain("session token", self.token or "")


def _check_plain(name: str, text: str) -> None:
    """Keys go into the headers of requests, where a line break would begin another header."""
    if not isinstance(text, str) or not text.isascii() or any(each.isspace() for each in text):
        raise SettingsError(
            f"the {name} for S3 has a space, a line break or another character that does not belong into it; set it "
            "again"
        )


@dataclass(frozen=True)
class S3Settings:
    """Where a bucket is, and whose credentials sign the requests. Equal settings may share connections."""

    endpoint: str = field(default="", repr=False)
    endpoint_variable: str = ""
    """Where the endpoint was found: the name of a variable, or of a setting of the profile."""
    region: str = ""
    skip_signature: bool = False
    virtual_hosted: bool | None = None
    """None chooses what fits the endpoint."""
    source: Literal["environment", "profile", "library", "none"] = "library"
    """Where credentials come from: the client library knows more places than are known here."""
    profile: str = ""
    given: Credentials | None = field(default=None, repr=False)
    """Those of the environment."""

    @property
    def endpoint_shown(self) -> str:
        """The endpoint as messages name it, without secrets, and where it was found."""
        if self.endpoint:
            return f"{redacted(self.endpoint)} ({self.endpoint_variable})"
        return f"{self.endpoint_of_amazon} (AWS_ENDPOINT_URL is not set)"

    @property
    def endpoint_of_amazon(self) -> str:
        return f"https://s3.{self.region or 'us-east-1'}.amazonaws.com"

    def is_virtual_hosted(self, bucket: str) -> bool:
        """Whether requests go to `bucket.host`, as AWS wants it, and not to `host/bucket`, as most others do."""
        if self.virtual_hosted is not None:
            return self.virtual_hosted
        # A name with a dot does not fit the certificate of AWS.
        return not self.endpoint and "." not in bucket


def read_settings() -> S3Settings:
    """What the environment says now. Nothing is asked of a process or server yet."""
    profile = os.environ.get("AWS_PROFILE") or "default"
    section = _read_profile(profile)
    skip_signature = _is_true(os.environ.get("AWS_SKIP_SIGNATURE", ""))
    virtual_hosted = os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "")
    variable = _first_set("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    region = os.environ.get(_first_set("AWS_REGION", "AWS_DEFAULT_REGION"), "")
    given = None if skip_signature else _from_environment()
    return S3Settings(
        endpoint=os.environ.get(variable) or section.get("endpoint_url", ""),
        endpoint_variable=variable or f"endpoint_url of the profile {profile!r}",
        region=region or section.get("region", ""),
        skip_signature=skip_signature,
        virtual_hosted=_is_true(virtual_hosted) if virtual_hosted else None,
        source="none" if skip_signature else "environment" if given else _source_in(section),
        profile=profile,
        given=given,
    )


def _source_in(section: Mapping[str, str]) -> Literal["profile", "library"]:
    if os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") and not os.environ.get("AWS_PROFILE"):
        return "library"
    known = ("aws_access_key_id", "credential_process", *_NEEDS_BOTO3)
    return "profile" if any(name in section for name in known) else "library"


def read_credentials(settings: S3Settings) -> Credentials:
    """Look for credentials now, in the place that the settings name."""
    if settings.source == "environment":
        return _from_environment() or settings.given or _from_profile(settings.profile)
    return _from_profile(settings.profile)


def _from_environment() -> Credentials | None:
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not key and not secret:
        return None
    if not key or not secret:
        missing = "AWS_SECRET_ACCESS_KEY" if key else "AWS_ACCESS_KEY_ID"
        raise SettingsError(
            f"{missing}: is not set, but the other half of the credentials is; set both or neither"
        )
    return Credentials(key, secret, os.environ.get("AWS_SESSION_TOKEN") or None)


def _from_profile(profile: str) -> Credentials:
    section = _read_profile(profile)
    if section.get("aws_access_key_id") and section.get("aws_secret_access_key"):
        token = section.get("aws_session_token") or section.get("aws_security_token")
        return Credentials(section["aws_access_key_id"], section["aws_secret_access_key"], token)
    if command := section.get("credential_process"):
        return _from_process(command, profile)
    if any(name in section for name in _NEEDS_BOTO3):
        return _from_boto3(profile)
    raise SettingsError(
        f"the profile {profile!r} holds no credentials; add them, or name another with AWS_PROFILE"
    )


def _from_process(command: str, profile: str) -> Credentials:
    """Run the command of a profile. What it prints is secret: no message repeats it."""
    where = f"credential_process of the profile {profile!r}"
    try:
        done = subprocess.run(
            shlex.split(command),
            capture_output=True,
            timeout=_PROCESS_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{where}: cannot be started: {getattr(error, 'strerror', None) or 'bad command'}"
        ) from None
    except subprocess.TimeoutExpired:
        raise SettingsError(
            f"{where}: took longer than {_PROCESS_SECONDS} s; run it by hand to see why"
        ) from None
    except subprocess.CalledProcessError as error:
        raise SettingsError(
            f"{where}: ended with code {error.returncode}; run it by hand to see why"
        ) from None
    try:
        answer = json.loads(done.stdout)
        expires = answer.get("Expiration")
        return Credentials(
            answer["AccessKeyId"],
            answer["SecretAccessKey"],
            answer.get("SessionToken"),
            _utc(expires) if expires else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SettingsError(
            f"{where}: did not print the JSON that is expected of it (AccessKeyId, SecretAccessKey ...); run it by hand"
        ) from None


def _utc(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _from_boto3(profile: str) -> Credentials:
    """Profiles that sign in or take a role are left to boto3, which knows all their kinds."""
    try:
        import boto3
    except ImportError:
        raise MissingExtraError(
            f"the profile {profile!r} signs in or takes a role, for which boto3 is needed: pip install boto3"
        ) from None
    try:
        frozen = boto3.Session(profile_name=profile).get_credentials().get_frozen_credentials()
        # When they expire is known to boto3 only, so it is asked again soon.
        expires_at = datetime.now(UTC) + _ASK_BOTO3_AFTER
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token, expires_at)
    except Exception as error:
        # Its own classes of errors are not known without it, and their texts may repeat answers of servers.
        raise SettingsError(
            f"the profile {profile!r} gives no credentials ({type(error).__name__} of boto3); sign in "
            "again, for example with `aws sso login`"
        ) from None


# The shared files


def _read_profile(profile: str) -> Mapping[str, str]:
    """What both files say about a profile; the file of credentials decides where both say something."""
    config = _read_file("AWS_CONFIG_FILE", "config")
    secrets = _read_file("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    in_config = "default" if profile == "default" else f"profile {profile}"
    found: dict[str, str] = {}
    for parsed, section in ((config, in_config), (secrets, profile)):
        if parsed.has_section(section):
            found.update(parsed[section])
    if not found and os.environ.get("AWS_PROFILE"):
        raise SettingsError(
            f"AWS_PROFILE={profile}: is in neither of the files config and credentials of AWS; check its spelling"
        )
    return found


def _read_file(variable: str, name: str) -> configparser.RawConfigParser:
    path = Path(os.environ.get(variable) or Path("~/.aws").expanduser() / name).expanduser()
    parsed = configparser.RawConfigParser(default_section="no default for all sections", strict=False)
    try:
        parsed.read_string(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, configparser.Error) as error:
        raise SettingsError(
            f"{path}: cannot be read as a file of AWS settings ({type(error).__name__}); correct it"
        ) from None
    return parsed


def _first_set(*names: str) -> str:
    """The first of these variables that has a value; empty if none has."""
    return next((name for name in names if os.environ.get(name)), "")


def _is_true(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


class CredentialProvider:
    """What the client library asks for credentials: at first, and again shortly before they expire."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._current: Credentials | None = settings.given
        self._read_at = -_READ_AGAIN_SECONDS
        self._lock = fork_lock()
        self.failure: Exception | None = None
        """Why the library got no credentials: it does not pass errors on."""

    def __call__(self) -> dict[str, Any]:
        try:
            current = self.current
        except Exception as error:
            self.failure = error
            raise
        return {
            "access_key_id": current.access_key_id,
            "secret_access_key": current.secret_access_key,
            "token": current.token,
            "expires_at": current.expires_at,
        }

    @property
    def current(self) -> Credentials:
        current = self._current
        # Some last for less than five minutes: they are not asked for with each request.
        may_read = time.monotonic() - self._read_at > _READ_AGAIN_SECONDS
        if current is not None and not (_expires_soon(current) and may_read):
            return current
        with self._lock:
            if self._current is not None and self._current is not current:
                return self._current  # another thread has asked meanwhile
            return self._read_again(current)

    def _read_again(self, current: Credentials | None) -> Credentials:
        if current is None or current.expires_at is None:
            return self._read()
        if time.monotonic() - self._read_at <= _READ_AGAIN_SECONDS:
            return current  # another thread has asked meanwhile, in vain
        try:
            return self._read()
        except HeadraceError as error:
            if current.expires_at <= datetime.now(UTC):
                raise
            _log.warning("new credentials for S3 cannot be had yet, so the old ones are used: %s", error)
            return current

    def _read(self) -> Credentials:
        self._read_at = time.monotonic()
        self._current = read_credentials(self._settings)
        return self._current

    def renew(self) -> bool:
        """Look again; whether there are other credentials now."""
        before = self._current
        return self._read() != before


def _expires_soon(credentials: Credentials) -> bool:
    return credentials.expires_at is not None and credentials.expires_at - datetime.now(UTC) < timedelta(
        minutes=5
    )
