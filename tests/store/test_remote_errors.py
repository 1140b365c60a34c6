"""What errors of object stores say: the server that was asked, and what to do about credentials."""

import pytest

from headrace.errors import SettingsError, StorageError
from headrace.store.client import RemoteOptions
from headrace.store.remote import RemoteStore
from headrace.store.remote_errors import Kind, Problem, remote_error
from tests.web_server import web_server

BRIEFLY = RemoteOptions(retry_seconds=0.2)


def error_of(store: RemoteStore) -> str:
    with pytest.raises(StorageError) as caught:
        store.read("x")
    return str(caught.value)


# The server that was asked


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_a_refused_connection_names_the_endpoint(variable, s3_place, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    said = error_of(RemoteStore(s3_place, BRIEFLY))
    assert f"check the network and the endpoint http://127.0.0.1:9 ({variable}). Longer" in said


def test_the_endpoint_of_a_profile(s3_place, monkeypatch, tmp_path):
    (tmp_path / "config").write_text("[default]\nendpoint_url = http://127.0.0.1:9\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    said = error_of(RemoteStore(s3_place, BRIEFLY))
    assert "the endpoint http://127.0.0.1:9 (endpoint_url of the profile 'default')" in said


def test_an_endpoint_is_named_without_its_password(s3_place, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:geheim@127.0.0.1:9")
    said = error_of(RemoteStore(s3_place, BRIEFLY))
    assert "geheim" not in said
    assert "http://[hidden]@127.0.0.1:9 (AWS_ENDPOINT_URL)" in said


def test_a_web_server_is_named_by_its_address():
    said = error_of(RemoteStore("http://127.0.0.1:9/data", BRIEFLY))
    assert "http://127.0.0.1:9/data/x: cannot be read: the connection was refused" in said
    assert "the endpoint http://127.0.0.1:9. Longer" in said


# TLS where there is none


def test_an_endpoint_that_does_not_speak_tls(s3_place, s3_server, monkeypatch):
    secure = s3_server.endpoint.replace("http:", "https:")
    monkeypatch.setenv("AWS_ENDPOINT_URL", secure)
    said = error_of(RemoteStore(s3_place))
    assert said == (
        f"{s3_place}/x: cannot be read: the server does not speak TLS; write http:// instead of https:// in {secure} "
        "(AWS_ENDPOINT_URL)"
    )
    with pytest.raises(StorageError, match="the server does not speak TLS; write http:// instead"):
        RemoteStore(s3_place).files()


def test_an_address_of_a_web_server_that_does_not_speak_tls(tmp_path):
    with web_server(tmp_path) as address:
        secure = address.replace("http:", "https:")
        said = error_of(RemoteStore(secure))
    assert said == (
        f"{secure}/x: cannot be read: the server does not speak TLS; write http:// instead of https:// in {secure}"
    )


# Credentials


@pytest.mark.parametrize("kind", [Kind.NO_CREDENTIALS, Kind.DENIED])
@pytest.mark.parametrize(
    ("place", "variable"),
    [
        ("s3://bucket/x", "AWS_ACCESS_KEY_ID"),
        ("gs://bucket/x", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://container/x", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("abfss://data@account.dfs.core.windows.net/x", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("https://host/x", "use an address that is public"),
    ],
)
def test_each_store_has_its_own_hint(kind, place, variable):
    said = str(remote_error(Problem(kind, 403), place, "read", 0.0))
    assert variable in said
    assert ("AWS_" in said) == place.startswith("s3://")


def test_only_s3_has_regions():
    redirected = Problem(Kind.PERMANENT, 301)
    assert "AWS_REGION" in str(remote_error(redirected, "s3://bucket/x", "read", 0.0))
    assert "AWS_REGION" not in str(remote_error(redirected, "https://host/x", "read", 0.0))


def test_a_service_principal_that_gets_no_token(monkeypatch, tmp_path):
    """That the service answers 404 says nothing about the object."""
    with web_server(tmp_path) as address:
        for name, value in {
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_ENDPOINT": address,
            "AZURE_AUTHORITY_HOST": address,
            "AZURE_CLIENT_ID": "client",
            "AZURE_CLIENT_SECRET": "geheim",
            "AZURE_TENANT_ID": "tenant",
        }.items():
            monkeypatch.setenv(name, value)
        said = error_of(RemoteStore("az://container/data", BRIEFLY))
    assert "az://container/data/x: cannot be read: no credentials were found" in said
    assert "geheim" not in said


def test_a_file_of_credentials_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "absent.json"))
    with pytest.raises(SettingsError, match="gs://bucket: cannot be used: .*set GOOGLE_SERVICE_ACCOUNT"):
        RemoteStore("gs://bucket/x").read("x")


def test_a_failure_without_a_known_reason_is_a_sentence():
    said = str(remote_error(Problem(Kind.PASSING), "s3://bucket/x", "read", 3.0))
    assert said.startswith("s3://bucket/x: cannot be read: the request failed, for 3 s; check the network")
