"""Headrace's servers as a system: what they serve, and how they are started, read from and killed."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from machine import processes_below
from serve_rows import BATCH_SIZE, BLOCK, burn, wait
from serve_system import AT_ONCE, WORKERS, Settings, kill_first

ROWS = 10_000_000


class Rows:
    """Records of a number and an array, which exists once."""

    fingerprint = "numbered-blocks"

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"row": number, "x": BLOCK}


def burning() -> Any:
    import headrace

    return headrace.Loader(Rows(), batch_size=BATCH_SIZE, shuffle=False, epochs=None).map(burn, per="batch")


def waiting() -> Any:
    import headrace

    return headrace.Loader(Rows(), batch_size=BATCH_SIZE, shuffle=False, epochs=None).map(wait, per="batch")


class Headrace:
    def __init__(self, addresses: list[str], servers: list["subprocess.Popen[str]"]) -> None:
        self._addresses, self._servers = addresses, servers
        self.facts: dict[str, Any] = {}

    def batches(self, first: int, count: int) -> Iterator[Any]:
        import headrace

        loader = headrace.RemoteLoader(self._addresses)
        # Servers keep what they have made, so that a batch which was read before would cost nothing.
        loader.load_state_dict({**loader.state_dict(), "position": first * BATCH_SIZE})
        try:
            yield from itertools.islice(loader, count)
        finally:
            loader.close()

    def kill_worker(self) -> bool:
        """A worker process of the only server, which starts another; or one server of several, for good."""
        if len(self._servers) > 1:
            self._servers[0].kill()
            return True
        return kill_first(processes_below("headrace.serve.worker"))


@contextlib.contextmanager
def start(settings: Settings, scheme: str, servers: int = 1) -> Iterator[Headrace]:
    """Servers with two workers altogether."""
    started: list[subprocess.Popen[str]] = []
    try:
        for _ in range(servers):
            started.append(_serve(settings, WORKERS // servers))
        listening = [_addresses(server)[scheme] for server in started]
        yield Headrace(listening, started)
    finally:
        for server in started:
            server.kill()
            server.wait()


def _serve(settings: Settings, workers: int) -> "subprocess.Popen[str]":
    path = settings.scratch / f"s{os.urandom(3).hex()}"
    threads = 1 if settings.transform == "burning" else AT_ONCE // WORKERS
    command = [sys.executable, "-m", "headrace", "serve", f"serve_headrace:{settings.transform}"]
    command += ["--socket", str(path), "--port", "0", "--json"]
    command += ["--workers", str(workers), "--threads", str(threads)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _addresses(server: "subprocess.Popen[str]") -> dict[str, str]:
    """Where it listens, by scheme."""
    assert server.stdout is not None
    listening: dict[str, Any] = json.loads(server.stdout.readline())
    return {address.partition(":")[0]: address for address in listening["addresses"]}
