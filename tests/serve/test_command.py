"""`headrace serve`: what it prints, how it ends, whom it lets in."""

import contextlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from click.testing import CliRunner

import headrace
from headrace.cli.main import cli
from headrace.errors import HeadraceError, SettingsError, StageTimeoutError
from tests.cli.commands import run_here
from tests.serve import served
from tests.serve.servers import CommandServer, assert_equal_batches

RECORDS = "tests.serve.served:records"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CommandServer, Path]]:
    """A server with a certificate for `localhost`, a token, and a socket for its health."""
    folder = tmp_path_factory.mktemp("secured")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "roots.pem")
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "server.pem")
    issued.private_key_pem.write_to_path(folder / "server.key")
    (folder / "token").write_text("a long token\n")
    options = ["--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")]
    options += ["--token-file", str(folder / "token"), "--port", "0", "--metrics-port", "0", "--workers", "1"]
    with CommandServer(RECORDS, *options) as server:
        server.address("grpc+tls")
        yield server, folder


def get(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_tls_and_token(secured: tuple[CommandServer, Path]) -> None:
    server, folder = secured
    # The certificate is for this name, and the client looks up the number.
    address = server.address("grpc+tls").replace("127.0.0.1", "localhost")
    remote = headrace.RemoteLoader(address, token="a long token", tls_roots=folder / "roots.pem")
    for here, there in zip(remote, served.records(), strict=True):
        assert_equal_batches(here, there)


def test_whom_tls_and_token_keep_out(secured: tuple[CommandServer, Path]) -> None:
    server, folder = secured
    address = server.address("grpc+tls").replace("127.0.0.1", "localhost")
    roots = folder / "roots.pem"
    for token, said in (
        ("another token", "the token is not the right one"),
        (None, "none was given; give token="),
    ):
        with pytest.raises(SettingsError, match=said):
            headrace.RemoteLoader(address, token=token, tls_roots=roots)
    # Waiting does not help with these.
    with pytest.raises(SettingsError, match="of an authority that is not known here: give tls_roots="):
        headrace.RemoteLoader(address, token="a long token")
    with pytest.raises(SettingsError, match="its certificate is for another name"):
        headrace.RemoteLoader(server.address("grpc+tls"), token="a long token", tls_roots=roots)
    with pytest.raises(SettingsError, match="holds no certificate"):
        headrace.RemoteLoader(address, tls_roots=folder / "server.key")
    with pytest.raises(StageTimeoutError):
        headrace.RemoteLoader(address.replace("grpc+tls", "grpc"), token="a long token", timeout_seconds=0.5)
    with pytest.raises(SettingsError, match="tls_roots='nowhere': cannot be read"):
        headrace.RemoteLoader(address, tls_roots="nowhere")


def test_health_and_metrics(secured: tuple[CommandServer, Path]) -> None:
    server, _ = secured
    place = server.wait_for(r"health and metrics on (http://\S+)")
    assert get(f"{place}/healthz") == (200, "alive\n")
    assert get(f"{place}/readyz") == (200, "ready\n")
    assert get(f"{place}/other")[0] == 404
    status, metrics = get(f"{place}/metrics")
    assert status == 200
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values["headrace_serve_workers_ready"]) == 1
    assert float(values["headrace_serve_answers_total"]) >= 0


@pytest.mark.parametrize("scheme", ["unix", "grpc"])
def test_it_ends_after_it_has_answered(scheme: str, tmp_path: Path) -> None:
    """SIGTERM while a request is being made: that one is answered, later ones are not, and the process ends well."""
    environment = {"SERVED_SECONDS": "0.5"}
    options = ["--socket", str(tmp_path / "s"), "--port", "0", "--workers", "1", "--metrics-port", "0"]
    with CommandServer("tests.serve.served:slow", *options, environment=environment) as server:
        remote = headrace.RemoteLoader(server.address(scheme), prefetch=0)
        iterator = iter(remote)
        first = next(iterator)
        place = server.wait_for(r"health and metrics on (http://\S+)")
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(next(iterator)))
        waiting.start()
        while "headrace_serve_running 1" not in get(f"{place}/metrics")[1]:
            pass
        server.process.send_signal(signal.SIGTERM)
        waiting.join()
        assert got[0].info.position == first.info.position + 4
        assert server.process.wait(60) == 0
        assert "ending: answering what was asked" in server.output()
        assert not (tmp_path / "s").exists()


def take_one(remote: headrace.RemoteLoader) -> None:
    with contextlib.suppress(HeadraceError):
        next(iter(remote))


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    environment = {"SERVED_SECONDS": "600"}
    options = ["--socket", str(tmp_path / "s"), "--workers", "1", "--drain-seconds", "600"]
    with CommandServer("tests.serve.served:slow", *options, environment=environment) as server:
        remote = headrace.RemoteLoader(server.address("unix"))
        waiting = threading.Thread(target=take_one, args=(remote,), daemon=True)
        waiting.start()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("(ending)")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        remote.close()


def test_code_that_fails_is_shown(tmp_path: Path) -> None:
    ran = run_here("serve", "tests.serve.served:broken", "--socket", tmp_path / "s", "--workers", "1")
    assert ran.returncode == 1
    assert "headrace: tests.serve.served:broken failed: RuntimeError: no such data" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([RECORDS], "give --port=9000 or --socket=/run/headrace.sock"),
        ([RECORDS, "--port", "0", "--host", "0.0.0.0"], "needs a certificate with its key and a token"),
        ([RECORDS, "--port", "0", "--tls-cert", "x.pem"], "certificate and key: give both, or none"),
        ([RECORDS, "--port", "0", "--token-file", "nowhere"], "--token-file nowhere: cannot be read"),
        (["nothing-there", "--port", "0"], "nothing-there: no such dataset"),
        (["tests.serve.served:nothing", "--port", "0"], "has no 'nothing'; it has"),
        (
            [RECORDS, "--port", "0", "--seq-len", "3", "--set", "y=3"],
            "--seq-len: .* has no such parameter|y: ",
        ),
    ],
)
def test_what_cannot_be_served(arguments: list[str], said: str) -> None:
    ran = run_here("serve", *arguments, "--workers", "1")
    assert ran.returncode == 1
    assert re.search(said, ran.stderr), ran.stderr


def test_help() -> None:
    result = CliRunner().invoke(cli, ["serve", "--help"])
    assert result.exit_code == 0
    for option in ("--port", "--host", "--socket", "--workers", "--threads", "--insecure", "--metrics-port"):
        assert option in result.output


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = run_here("serve", RECORDS, "--port", port, "--workers", "1")
    assert ran.returncode == 1
    assert f"--port={port}: cannot listen there: Address already in use; give another port" in ran.stderr


def test_a_certificate_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a certificate")
    files = ["--tls-cert", tmp_path / "text", "--tls-key", tmp_path / "text"]
    ran = run_here("serve", RECORDS, "--port", "0", *files, "--workers", "1")
    assert ran.returncode == 1
    assert "must be a certificate and its key, without a password, in PEM form" in ran.stderr


def test_a_module_that_trains_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import headrace\n\ndef make_loader(): ...\n\nheadrace.RemoteLoader('unix:///nowhere')\n"
    (tmp_path / "training_at_once.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    ran = run_here("serve", "training_at_once:make_loader", "--socket", tmp_path / "s", "--workers", "1")
    assert ran.returncode == 1
    assert "move the training loop below `if __name__ == " in ran.stderr


def test_a_path_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    ran = run_here("serve", RECORDS, "--socket", tmp_path / "file", "--workers", "1")
    assert ran.returncode == 1
    assert "there is something else at this path" in ran.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_the_socket_of_a_server_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    """And where it listens can be had as JSON."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left"))
    with CommandServer(RECORDS, "--socket", str(tmp_path / "left"), "--workers", "1", "--json") as server:
        said = json.loads(server.wait_for("(.*)"))
        assert said["addresses"] == [f"unix://{tmp_path}/left"]
        assert said["metrics"] is None


def test_as_many_files_may_be_open_as_the_system_permits(tmp_path: Path) -> None:
    """Batches that are kept take a descriptor each, and shells often allow few."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limited = ["sh", "-c", 'ulimit -Sn 100; exec "$@"', "serve", sys.executable, "-m", "headrace", "serve"]
    target = ["tests.serve.served:records", "--socket", str(tmp_path / "s"), "--workers", "1"]
    with subprocess.Popen([*limited, *target], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert "unix://" in server.stdout.readline()
        limits = Path(f"/proc/{server.pid}/limits").read_text()
        server.terminate()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert int(line.split()[3]) == min(hard, 2**14)
