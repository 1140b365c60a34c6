"""Where settings and credentials come from, and that they go nowhere else."""

import io
import json
import logging
import pickle
import subprocess
import sys
import traceback
from datetime import UTC, datetime, timedelta

import pytest

from headrace.errors import HeadraceError, MissingExtraError, SettingsError, StorageError
from headrace.store.address import open_store, split_place
from headrace.store.client import RemoteOptions, s3_config
from headrace.store.credentials import CredentialProvider, Credentials, S3Settings, read_settings
from headrace.store.remote import RemoteStore
from headrace.store.remote_address import parse_address, redacted
from headrace.store.store import write_file
from tests.fault_proxy import Answer
from tests.s3_server import ACCESS_KEY, SECRET_KEY


@pytest.fixture
def aws_files(s3_environment, monkeypatch, tmp_path):
    """Settings in files only; `write(config, credentials)` writes them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    config, credentials = tmp_path / "config", tmp_path / "credentials"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))

    def write(config_text, credentials_text=""):
        config.write_text(config_text)
        credentials.write_text(credentials_text)

    return write


KEYS = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"


def works(place):
    store = RemoteStore(place)
    write_file(store, "x", [b"content"])
    return store.read("x") == b"content"


def test_settings_and_keys_from_files(aws_files, s3_server, s3_place, monkeypatch):
    aws_files(f"[default]\nregion = us-east-1\nendpoint_url = {s3_server.endpoint}\n", f"[default]\n{KEYS}")
    assert works(s3_place)
    aws_files(f"[profile mine]\nendpoint_url = {s3_server.endpoint}\n", f"[mine]\n{KEYS}")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert works(s3_place)
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(SettingsError, match="AWS_PROFILE=other: is in neither of the files"):
        RemoteStore(s3_place)


def test_a_file_that_cannot_be_understood(aws_files, s3_place):
    aws_files("[default\n", f"[default]\n{KEYS}")
    with pytest.raises(SettingsError, match="cannot be read as a file of AWS settings"):
        RemoteStore(s3_place)


def test_the_environment_decides_over_files(s3_environment, monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://special.example")
    settings = read_settings()
    assert (settings.region, settings.endpoint) == ("us-east-1", "https://special.example")
    monkeypatch.delenv("AWS_REGION")
    assert read_settings().region == "eu-west-1"
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SettingsError, match="AWS_SECRET_ACCESS_KEY: is not set, but the other half"):
        read_settings()


def test_hosts_of_buckets(s3_environment, monkeypatch):
    custom = s3_config("b", read_settings())
    assert (custom["endpoint"], custom["virtual_hosted_style_request"]) == (s3_environment.endpoint, False)
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    assert s3_config("b", read_settings())["endpoint"] == f"http://b.127.0.0.1:{s3_environment.port}"
    monkeypatch.delenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert s3_config("b", read_settings())["virtual_hosted_style_request"]
    assert not s3_config("b.with.dots", read_settings())["virtual_hosted_style_request"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(SettingsError, match="AWS_ENDPOINT_URL=localhost:9000: must begin with http"):
        s3_config("b", read_settings())


def test_requests_without_a_signature(s3_place, fault_proxy, monkeypatch):
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with pytest.raises(StorageError, match="403 AccessDenied"):
        RemoteStore(s3_place).read("x")


# Renewing


def test_renewed_keys_are_used_after_a_denial(s3_place, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-yesterday")
    store = RemoteStore(s3_place)
    with pytest.raises(StorageError, match="the secret key does not belong to the access key"):
        store.read("x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    write_file(store, "x", [b"content"])
    assert store.status("x").bytes == 7


def test_keys_of_a_process_are_asked_for_again(aws_files, fault_proxy, s3_place, tmp_path):
    """They last for a short time only, are not asked for with each request, and are renewed once if they are denied."""
    program, count = tmp_path / "keys.py", tmp_path / "count"
    count.write_text("0")
    soon = (datetime.now(UTC) + timedelta(minutes=2)).isoformat()
    answer = {"Version": 1, "AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY, "Expiration": soon}
    program.write_text(
        f"import json, pathlib\ncount = pathlib.Path({str(count)!r})\nnumber = int(count.read_text()) + 1\n"
        f"count.write_text(str(number))\nanswer = {answer!r}\n"
        "if number == 1: answer['SecretAccessKey'] = 'expired'\nprint(json.dumps(answer))"
    )
    aws_files(
        f"[default]\nendpoint_url = {fault_proxy.endpoint}\ncredential_process = {sys.executable} {program}\n"
    )
    store = RemoteStore(s3_place)
    assert count.read_text() == "0"  # nothing is asked before it is needed
    write_file(store, "x", [b"content"])
    assert count.read_text() == "2"
    assert store.read("x") == b"content"
    assert count.read_text() == "2"
    fault_proxy.clear()
    fault_proxy.add(Answer(403, "ExpiredToken"))
    with pytest.raises(StorageError, match="the credentials have expired, and asking for new ones gave none"):
        store.read("x")
    assert fault_proxy.requests == {"GET": 1}
    assert count.read_text() == "3"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{sys.executable} -c 'print(1)'", "did not print the JSON"),
        (f"{sys.executable} -c 'raise SystemExit(3)'", "ended with code 3; run it by hand"),
        ("/absent/program", "cannot be started: No such file"),
    ],
)
def test_a_process_that_gives_no_keys(aws_files, s3_server, s3_place, command, message):
    aws_files(f"[default]\nendpoint_url = {s3_server.endpoint}\ncredential_process = {command}\n")
    with pytest.raises(SettingsError, match=f"credential_process of the profile 'default': {message}"):
        RemoteStore(s3_place).read("x")


def test_a_profile_that_signs_in_needs_boto3(aws_files, s3_server, s3_place, monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    aws_files(f"[default]\nendpoint_url = {s3_server.endpoint}\nsso_session = company\n")
    with pytest.raises(MissingExtraError, match="the profile 'default' signs in .* pip install boto3"):
        RemoteStore(s3_place).read("x")


@pytest.mark.parametrize("status", [403, 404, 500])
def test_no_credentials_at_all(s3_place, fault_proxy, monkeypatch, status):
    """The last place to ask is the machine, by a service that only machines of a cloud have."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", fault_proxy.endpoint)
    fault_proxy.add(Answer(status, body=b""), path="/latest/")
    with pytest.raises(StorageError, match=f"{s3_place}/x: cannot be read: no credentials were found"):
        RemoteStore(s3_place).read("x")


def test_credentials_of_a_machine(s3_place, fault_proxy, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", fault_proxy.endpoint)
    role = {
        "AccessKeyId": ACCESS_KEY,
        "SecretAccessKey": SECRET_KEY,
        "Token": "",
        "Expiration": "2100-01-01T00:00:00Z",
    }
    fault_proxy.add(Answer(200, body=b"token"), path="/latest/api/token")
    fault_proxy.add(Answer(200, body=b"role"), path="/security-credentials/$")
    expired = {**role, "SecretAccessKey": "expired"}
    fault_proxy.add(
        Answer(200, body=json.dumps(expired).encode()), path="/security-credentials/role", count=1
    )
    fault_proxy.add(Answer(200, body=json.dumps(role).encode()), path="/security-credentials/role")
    fault_proxy.add(Answer(403, "ExpiredToken"), path="/tests/", count=1)
    assert works(s3_place)


# Secrets


def everything_said(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


def test_secrets_are_nowhere(s3_place, fault_proxy, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "tests-session-token-77")
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)
    try:
        store = RemoteStore(s3_place, RemoteOptions(retry_seconds=0.2))
        said = [repr(store), str(store), store.name, store.locate("x"), repr(store.client.settings)]
        said += [repr(vars(store)), pickle.dumps(store).decode("latin-1"), repr(store.client.provider)]
        for answer in (
            Answer(403, "AccessDenied"),
            Answer(503),
            Answer(404, "NoSuchKey"),
            Answer(400, "Bad"),
        ):
            fault_proxy.clear()
            fault_proxy.add(answer)
            for use in (lambda: store.read("x"), lambda: write_file(store, "x", [b""]), store.files):
                try:
                    use()
                except (HeadraceError, FileNotFoundError) as error:
                    said.append(everything_said(error))
    finally:
        logging.getLogger().removeHandler(handler)
    text = "\n".join([*said, log.getvalue()])
    assert len(said) > 12
    for secret in (SECRET_KEY, "tests-session-token-77", "X-Amz-Signature", "Signature="):
        assert secret not in text


def test_a_store_is_pickled_as_its_address(s3_place):
    store = RemoteStore(s3_place, RemoteOptions(retry_seconds=5))
    copy = pickle.loads(pickle.dumps(store))
    assert (copy, copy.name, copy.options) == (store, s3_place, store.options)
    assert hash(copy) == hash(store)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:hush@host/data", "https://[hidden]@host/data"),
        ("https://host/data?X-Amz-Signature=hush", "https://host/data?[hidden]"),
        ("s3://key:hush@bucket/data", "s3://[hidden]@bucket/data"),
    ],
)
def test_secrets_in_addresses_are_refused_and_not_repeated(address, shown):
    assert redacted(address) == shown
    with pytest.raises(SettingsError) as caught:
        open_store(address)
    assert str(caught.value).startswith(f"{shown}: an address must not hold")
    assert "hush" not in everything_said(caught.value)
    with pytest.raises(SettingsError) as caught:
        split_place(f"{address}/file.bin" if "?" not in address else address)
    assert "hush" not in everything_said(caught.value)


# Addresses


def test_addresses():
    assert str(parse_address("S3://bucket//a/b/")) == "s3://bucket/a/b"
    assert parse_address("s3a://bucket").key("x") == "x"
    assert parse_address("gs://bucket/a").inside("b").key("x") == "a/b/x"
    assert str(parse_address("abfss://data@account.dfs.core.windows.net/a")).startswith(
        "abfss://data@account"
    )
    for wrong in ("s3://", "s3:///a", "s3://bucket/a/../b", "s3://bucket/a//b"):
        with pytest.raises(SettingsError):
            parse_address(wrong)


def test_files_over_http(s3_server, fault_proxy):
    fault_proxy.add(Answer(200, body=b"content"), path="/folder/whole")
    fault_proxy.add(Answer(206, body=b"nt", headers={"Content-Range": "bytes 2-3/7"}), path="/folder/part")
    store = open_store(f"{fault_proxy.endpoint}/folder")
    assert store.is_remote
    assert store.fetch("part", 2, 4) == b"nt"
    assert store.status("whole").bytes == 7
    assert store.locate("part") == f"{fault_proxy.endpoint}/folder/part"


def test_an_account_that_is_not_known(monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SettingsError, match="az://container: .*AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/a").read("x")


# The library is optional


def test_importing_does_not_import_the_library():
    program = "import sys, headrace, headrace.store.address\nprint('obstore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        MissingExtraError, match=r"s3://bucket/a: object stores need obstore: pip install 'headrace\[s3\]'"
    ):
        open_store("s3://bucket/a")


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"])
@pytest.mark.parametrize("secret", ["abc123\n", "abc 123", "abc\r\nX-Evil: 1", "äbc123"])
def test_keys_with_characters_that_do_not_belong_there(s3_environment, monkeypatch, name, secret):
    monkeypatch.setenv(name, secret)
    with pytest.raises(SettingsError, match="has a space, a line break or another character") as caught:
        read_settings()
    assert "123" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    ["http://127.0.0.1:90000", "http://127.0.0.1:9000x", "http://[::1", "127.0.0.1:9000", "ftp://host"],
)
def test_endpoints_that_are_none(s3_environment, monkeypatch, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(SettingsError, match=r"AWS_ENDPOINT_URL=.*: must begin with http:// or https://"):
        RemoteStore("s3://bucket/x").fetch("y", 0, 1)


def test_a_password_in_an_endpoint_without_a_scheme_is_not_shown(s3_environment, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "bob:hunter2@host:9000")
    with pytest.raises(SettingsError) as caught:
        RemoteStore("s3://bucket/x").fetch("y", 0, 1)
    assert "hunter2" not in str(caught.value)


def test_credentials_are_used_until_they_expire_if_new_ones_cannot_be_had(monkeypatch, caplog):
    """A service that gives credentials may be away for a minute."""
    soon = datetime.now(UTC) + timedelta(minutes=4)
    answers = iter(
        [Credentials("old", "secret", None, soon), SettingsError("away"), Credentials("new", "secret")]
    )

    def read(settings):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("headrace.store.credentials.read_credentials", read)
    provider = CredentialProvider(S3Settings(source="profile"))
    assert provider.current.access_key_id == "old"
    provider._read_at -= 31
    assert provider.current.access_key_id == "old"
    assert "the old ones are used: away" in caplog.text
    assert provider.current.access_key_id == "old"
    provider._read_at -= 31
    assert provider.current.access_key_id == "new"
