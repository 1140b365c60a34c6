"""A real S3 server for tests: SeaweedFS (`weed mini`) on loopback, one for all processes of a test run.

Every user of the server holds a shared lock on a file. A keeper process (this module, run as a script) starts the
server and waits for the exclusive lock, which it gets when the last user has ended, even by SIGKILL. It then kills the
server and deletes its data.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUCKET = "tests"
ACCESS_KEY = "tests-access-key"
SECRET_KEY = "tests-secret-key-5f1c"
REGION = "us-east-1"
READY_SECONDS = 120
_PARTS = ("s3", "master", "filer", "volume", "admin")


@dataclass(frozen=True)
class S3Server:
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """The variables with which a client reaches this server, or a proxy in front of it."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }


@contextlib.contextmanager
def shared_server(folder: Path) -> Iterator[S3Server]:
    """The server of all processes that name this folder; the first of them starts it, the last one ends it."""
    with open(folder / "s3-users.lock", "ab") as users:
        with open(folder / "s3-start.lock", "ab") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_SH)
            port = _running(folder) or _start(folder)
        yield S3Server(port)


def _running(folder: Path) -> int | None:
    try:
        return int((folder / "s3-port").read_text())
    except FileNotFoundError:
        return None


def _start(folder: Path) -> int:
    command = [sys.executable, __file__, str(folder)]
    # In a session of its own: Ctrl-C in the terminal ends the tests first, and then the keeper.
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert keeper.stdout is not None
    line = keeper.stdout.readline()
    keeper.stdout.close()
    # It ends by itself, after this process; the interpreter must not warn of a child that still runs.
    keeper.returncode = 0
    if not line.strip():
        raise RuntimeError(f"weed did not start; its output is in {folder / 's3.log'}")
    return int(line)


def _keep(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    data = folder / "s3-data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    server, ports = _start_server(data, folder / "s3.log")
    try:
        port = ports[0]
        (folder / "s3-port").write_text(str(port))
        print(port, flush=True)
        with open(folder / "s3-users.lock", "ab") as users:
            fcntl.flock(users, fcntl.LOCK_EX)
            (folder / "s3-port").unlink()
    finally:
        # It takes 15 s and more to end by itself.
        server.kill()
        server.wait()
        shutil.rmtree(data, ignore_errors=True)
        for port in ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


def _start_server(data: Path, log: Path) -> "tuple[subprocess.Popen[bytes], list[int]]":
    """Start the server and wait until it is ready; once more if somebody else has taken one of its ports."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        ports = _free_ports(2 * len(_PARTS))
        server = _start_on(ports, data, log)
        while server.poll() is None and time.monotonic() < deadline:
            if b"components are running" in log.read_bytes():
                return server, ports
            time.sleep(0.05)
        server.kill()
        server.wait()
    raise RuntimeError("weed did not become ready")


def _start_on(ports: list[int], data: Path, log: Path) -> "subprocess.Popen[bytes]":
    options = []
    for number, part in enumerate(_PARTS):
        options += [f"-{part}.port={ports[2 * number]}", f"-{part}.port.grpc={ports[2 * number + 1]}"]
    command = [
        *(str(_weed()), f"-logdir={data}", "mini", f"-dir={data}", f"-bucket={BUCKET}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
        *("-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-s3.autoCreateBucket=false", *options),
    ]
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with open(log, "wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=data)


def _weed() -> Path:
    beside = Path(sys.executable).parent / "weed"
    return beside if beside.exists() else Path(shutil.which("weed") or "weed")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
