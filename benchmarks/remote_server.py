"""A real S3 server for benchmarks, and proxies that make it seem far away.

The server is the one of the tests, SeaweedFS on loopback. A proxy is a process of its own, so that what it costs is
counted nowhere. It adds a latency to every request, and shares one bandwidth among all of them:

    with server(folder) as near, proxy(near) as far:
        far.environment      # the variables with which a client reaches the server through the proxy
    far.requests             # by method, when the proxy has ended
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from tests.s3_server import BUCKET, S3Server, shared_server  # noqa: E402

__all__ = ["BUCKET", "BYTES_PER_SECOND", "LATENCY_SECONDS", "Endpoint", "proxy", "server", "within"]

LATENCY_SECONDS = 0.03
"""What a request to a store takes at least, and what a proxy adds by default."""
BYTES_PER_SECOND = 300e6
"""What two cores can serve and read at the same time."""
_END_SECONDS = 30


@dataclass
class Endpoint:
    """Where clients find the server."""

    server: S3Server
    address: str
    environment: Mapping[str, str]
    requests: dict[str, int] = field(default_factory=dict)
    """How many requests there were, by method; known when a proxy has ended."""


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Endpoint]:
    """Start a server that keeps its data in a folder. It is gone, with its data, when this ends."""
    folder.mkdir()
    with shared_server(folder) as started:
        yield Endpoint(started, started.endpoint, _environment(started, started.endpoint, folder))
    # Its keeper ends it and removes its data, in a process of its own.
    deadline = time.monotonic() + _END_SECONDS
    while (folder / "s3-data").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


@contextlib.contextmanager
def proxy(
    before: Endpoint,
    *,
    latency_seconds: float = LATENCY_SECONDS,
    bytes_per_second: float | None = BYTES_PER_SECOND,
) -> Iterator[Endpoint]:
    """Start a proxy; None is no limit."""
    command = [sys.executable, "-m", "tests.fault_proxy", "--port", str(before.server.port)]
    command += ["--latency-seconds", str(latency_seconds)]
    if bytes_per_second is not None:
        command += ["--bytes-per-second", str(bytes_per_second)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise RuntimeError("the proxy has no output to read its port from")
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        found = Endpoint(before.server, address, {**before.environment, "AWS_ENDPOINT_URL": address})
        try:
            yield found
        finally:
            process.send_signal(signal.SIGTERM)
            found.requests = json.loads(process.stdout.readline())


def _environment(server: S3Server, address: str, folder: Path) -> dict[str, str]:
    """Nothing of this machine's own settings, and nothing is cached unless someone asks for it."""
    absent = str(folder / "absent")
    return {
        **server.environment(address),
        "AWS_CONFIG_FILE": absent,
        "AWS_SHARED_CREDENTIALS_FILE": absent,
        "HEADRACE_CACHE": "off",
    }


def within(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process, with these variables and without others that clients of S3 look at."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("AWS_") and not name.lower().endswith("_proxy")
    }
    return {**kept, **environment}
