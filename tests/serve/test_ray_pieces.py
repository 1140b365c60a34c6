"""Servers on a Ray cluster, as far as no Ray is needed: their process, the list of them, and what is refused."""

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import headrace
from headrace.cli.main import cli
from headrace.errors import MissingExtraError, SettingsError, StorageError
from headrace.serve.address_file import AddressFile
from headrace.serve.addresses import Discovery
from headrace.serve.autoscale import Autoscale
from headrace.serve.ray.node_server import FrontSettings, NodeServer, encode_settings
from headrace.serve.ray.run import RaySettings


def front_settings(name: str, folder: Path, **changes: Any) -> bytes:
    settings: dict[str, Any] = {
        "name": name,
        "loader_settings": {"batch_size": 4, "seed": 3},
        "service": {"workers": 1},
        "host": None,
        "insecure": False,
        "drain_seconds": 5.0,
        "certificate": None,
        "key": None,
        "certified_name": None,
        "directory": str(folder),
    }
    return encode_settings(FrontSettings(**{**settings, **changes}))


def wait_for(server: NodeServer, *phases: str) -> dict[str, Any]:
    while (seen := server.look())["phase"] not in phases:
        time.sleep(0.02)
    return seen


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "numbers.csv").write_text("\n".join(["x", *map(str, range(40))]))
    headrace.build(tmp_path / "numbers.csv", tmp_path / "data", columns=["x"])
    return tmp_path


def test_a_server_of_an_actor_serves_and_leaves(data: Path) -> None:
    """It finds a relative path where the command was given, and listens on the node's address."""
    server = NodeServer(headrace.__version__, front_settings("data", data), "127.0.0.1")
    seen = wait_for(server, "ready", "failed")
    assert [re.sub(r"\d+$", "PORT", each) for each in seen["addresses"]] == ["grpc://127.0.0.1:PORT"]
    local = headrace.Loader(data / "data", batch_size=4, seed=3)
    remote = headrace.RemoteLoader(seen["addresses"])
    assert [batch["x"].tolist() for batch in remote] == [batch["x"].tolist() for batch in local]
    while not (server.look()["state"] or {}).get("answered"):
        time.sleep(0.02)
    server.leave()
    assert wait_for(server, "ended")["addresses"] == []
    remote.close()


def test_certificate_key_and_token_reach_a_server_by_their_contents(data: Path) -> None:
    """Nodes have no files of the machine that has started them, and addresses that no certificate knows."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(data / "ca.pem"))
    made = authority.issue_cert("servers.internal")
    settings = front_settings(
        "data",
        data,
        service={"workers": 1, "token": "let me in"},
        certificate=b"".join(blob.bytes() for blob in made.cert_chain_pems),
        key=made.private_key_pem.bytes(),
        certified_name="servers.internal",
    )
    server = NodeServer(headrace.__version__, settings, "127.0.0.1")
    (address,) = wait_for(server, "ready", "failed")["addresses"]
    assert re.fullmatch(r"grpc\+tls://127\.0\.0\.1:\d+\?name=servers\.internal", address)
    remote = headrace.RemoteLoader(address, token="let me in", tls_roots=data / "ca.pem")
    assert len(list(remote)) == 10
    remote.close()
    server.kill()


@pytest.mark.parametrize(
    ("changes", "address", "said"),
    [
        ({"name": "nothing-here"}, "127.0.0.1", "nothing-here: no such dataset"),
        ({"loader_settings": {"batch_size": 0}}, "127.0.0.1", "batch_size=0: must be at least 1"),
        ({}, "192.0.2.1", "others can reach this address, so the server needs a certificate"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    changes: dict[str, Any], address: str, said: str, data: Path
) -> None:
    settings = front_settings(changes.pop("name", "data"), data, **changes)
    server = NodeServer(headrace.__version__, settings, address)
    seen = wait_for(server, "ready", "failed")
    server.kill()
    assert seen["phase"] == "failed"
    assert said in seen["problem"]


def test_a_node_with_another_version() -> None:
    seen = NodeServer("0.0.1", b"", "127.0.0.1").look()
    assert seen["phase"] == "failed"
    assert "install the same version everywhere" in seen["problem"]


def test_the_file_lists_what_clients_look_up(tmp_path: Path) -> None:
    file = AddressFile(tmp_path / "servers")
    discovery = Discovery([f"file://{tmp_path}/servers"])
    for addresses in (["grpc://127.0.0.1:9000", "grpc+tls://127.0.0.2:9001"], ["grpc://[::1]:9000"], []):
        file.write(addresses)
        assert [str(each) for each in discovery.look()] == addresses
        assert not discovery.problems
    before = os.stat(file.path)
    file.write([])
    assert os.stat(file.path).st_ino == before.st_ino, "an equal list is not written again"
    assert os.listdir(tmp_path) == ["servers"]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="give the path of a file in a directory that exists"):
        AddressFile(tmp_path / "no" / "servers")
    with pytest.raises(SettingsError, match="give the path of a file"):
        AddressFile(tmp_path)
    (tmp_path / "gone").mkdir()
    file = AddressFile(tmp_path / "gone" / "servers")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StorageError, match="cannot be written"):
        file.write(["grpc://127.0.0.1:9000"])


def test_how_many_servers_there_are_at_first() -> None:
    limits = Autoscale(least=2, most=5)
    assert RaySettings().first == 1
    assert RaySettings(replicas=3).most == 3
    assert RaySettings(autoscale=limits).first == 2
    assert RaySettings(autoscale=limits, replicas=4).first == 4
    with pytest.raises(SettingsError, match="replicas=6: .* must be between the limits 2 and 5"):
        RaySettings(autoscale=limits, replicas=6)
    with pytest.raises(SettingsError, match="give the name of the servers"):
        RaySettings(name="a/b")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replicas", "2", "--port", "9000"], "--replicas: is for servers on a cluster; add --engine ray"),
        (["--addresses-file", "x", "--port", "0"], "--addresses-file: is for servers on a cluster"),
        (
            ["--engine", "ray", "--port", "9000"],
            "--port: cannot be given with --engine ray: each server takes",
        ),
        (["--engine", "ray", "--socket", "/x"], "--socket: cannot be given with --engine ray"),
        (["--engine", "ray", "--json"], "--json: cannot be given with --engine ray: servers come and go"),
        (["--engine", "ray", "--autoscale", "4"], "--autoscale='4': must be MIN:MAX, such as 1:8"),
        (["--engine", "ray", "--autoscale", "2:4", "--replicas", "1"], "--replicas=1: is how many servers"),
        (["--engine", "ray", "--name", "a/b"], "give the name of the servers, as in ray:headrace"),
        (["--engine", "ray", "--tls-name", "cpu"], "--tls-name='cpu': is the name in a certificate"),
        (["--engine", "ray", "--tls-name", "a b"], "must be grpc+tls://host:port"),
        (["--engine", "ray", "--tls-cert", "x"], "certificate and key: give both"),
        (["--engine", "ray", "--addresses-file", "/no/such/file"], "give the path of a file in a directory"),
        (["--engine", "ray", "--address", "127.0.0.1:1"], "nothing answers there"),
    ],
)
def test_what_does_not_go_together(options: list[str], said: str) -> None:
    if "--address" in options:
        pytest.importorskip("ray")
    found = CliRunner().invoke(cli, ["serve", "data", *options])
    assert found.exit_code == 1
    assert said in found.output


def test_without_ray_the_errors_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    found = CliRunner().invoke(cli, ["serve", "data", "--engine", "ray"])
    assert "needs Ray: pip install 'headrace[ray]'" in found.output
    with pytest.raises(MissingExtraError, match=r"ray:NAME needs Ray: pip install 'headrace\[ray\]'"):
        headrace.RemoteLoader("ray:headrace")
