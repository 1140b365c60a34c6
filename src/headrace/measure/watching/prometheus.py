"""What a loader counts, for Prometheus to fetch: `GET /metrics`, in its text format, version 0.0.4.

# HELP headrace_stage_seconds_total Time spent in a stage, summed over all threads and processes.
# TYPE headrace_stage_seconds_total counter
headrace_stage_seconds_total{stage="wait"} 1.25
"""

import http.server
import os
import socket
import socketserver
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from headrace.errors import SettingsError
from headrace.observe.stats import FetchStats, LoaderStats, ServerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLIENT_SECONDS = 5.0
_POLL_SECONDS = 0.2
_JOIN_SECONDS = 5.0


def exposition(stats: LoaderStats) -> str:
    return "".join(f"{line}\n" for line in _lines(stats))


def _lines(stats: LoaderStats) -> Iterator[str]:
    stages, queues = stats.stages, stats.queues
    yield from _metric("batches_total", "counter", "Batches handed out.", stats.batches)
    yield from _metric(
        "rows_total", "counter", "Rows handed out, if the loader knows their number.", stats.rows
    )
    yield from _metric("workers", "gauge", "Threads or processes that make batches.", stats.workers)
    yield from _metric(
        "wait_share", "gauge", "The share of the loop's time spent waiting for batches.", stats.wait_share
    )
    yield from _metric(
        "stage_seconds_total",
        "counter",
        "Time spent in a stage, summed over all threads and processes.",
        {name: stage.seconds for name, stage in stages.items()},
        "stage",
    )
    yield from _metric(
        "stage_runs_total",
        "counter",
        "How often a stage ran.",
        {name: stage.count for name, stage in stages.items()},
        "stage",
    )
    for name, kind, said, values in (
        ("queue_batches", "gauge", "Batches that were waiting when the loop last asked.", "latest"),
        ("queue_capacity", "gauge", "Batches that a queue can hold.", "capacity"),
        ("queue_asked_total", "counter", "How often the loop asked for a batch.", "seen"),
        ("queue_empty_total", "counter", "How often no batch was waiting when the loop asked.", "empty"),
    ):
        found = {queue: getattr(each, values) for queue, each in queues.items()}
        yield from _metric(name, kind, said, found, "queue")
    if stats.fetched != FetchStats():
        yield from _network(stats.fetched)
    if stats.servers:
        yield from _servers(stats.servers)


def _servers(servers: Mapping[str, ServerStats]) -> Iterator[str]:
    up = {name: int(server.state == "up") for name, server in servers.items()}
    yield from _metric("server_up", "gauge", "Whether a server is in use.", up, "server")
    for name, kind, said, values in (
        ("server_answers_total", "counter", "Batches that a server has sent.", "answers"),
        ("server_bytes_total", "counter", "Bytes of these batches.", "bytes"),
        ("server_seconds_total", "counter", "Time from requests to answers, added up.", "seconds"),
        ("server_late_total", "counter", "Late answers: another server was asked as well.", "late"),
        ("server_faults_total", "counter", "How often a server was lost, was silent, or failed.", "faults"),
        ("server_owed_batches", "gauge", "Batches that a server was asked for and has not sent.", "owes"),
        ("server_slots", "gauge", "Batches that a server makes at the same time.", "slots"),
    ):
        found = {server: getattr(each, values) for server, each in servers.items()}
        yield from _metric(name, kind, said, found, "server")


def _network(fetched: FetchStats) -> Iterator[str]:
    yield from _metric("fetch_requests_total", "counter", "Requests to object stores.", fetched.requests)
    yield from _metric("fetched_bytes_total", "counter", "Bytes from object stores.", fetched.bytes)
    yield from _metric("cached_bytes_total", "counter", "Bytes from the disk cache.", fetched.cached_bytes)
    yield from _metric(
        "fetch_repeated_total", "counter", "Requests that brought wrong bytes.", fetched.repeated
    )


def _metric(
    name: str, kind: str, said: str, value: float | Mapping[str, float], label: str = ""
) -> Iterator[str]:
    yield f"# HELP headrace_{name} {said}"
    yield f"# TYPE headrace_{name} {kind}"
    if not isinstance(value, Mapping):
        yield f"headrace_{name} {value}"
        return
    for key, each in value.items():
        yield f'headrace_{name}{{{label}="{_escaped(key)}"}} {each}'


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class MetricsServer:
    """Answers requests in its own thread while the context is open."""

    def __init__(self, read: Callable[[], LoaderStats], *, port: int = 0, host: str = "127.0.0.1") -> None:
        """`port=0` chooses a free port, which is then in the attribute `port`."""
        if type(port) is not int or not 0 <= port < 2**16:
            raise SettingsError(f"metrics_port={port!r}: must be an integer from 0 (any free port) to 65535")
        try:
            self._server = _Server(read, host, port)
        except OSError as error:
            raise SettingsError(
                f"metrics_port={port}, metrics_host={host!r}: cannot listen there: {error.strerror or error}; "
                "choose another port, or metrics_port=0 for any free port"
            ) from error
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="headrace-metrics", daemon=True
        )

    def __enter__(self) -> "MetricsServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # In a fork of the process the thread does not run, and shutdown() would wait forever.
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_SECONDS)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    # Otherwise, closing would wait for clients that keep their connection open.
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, read: Callable[[], LoaderStats], host: str, port: int) -> None:
        self.read = read
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)
        _listening.add(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects is not worth reporting."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _CLIENT_SECONDS
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, explain="the metrics are at /metrics")
            return
        body = exposition(self.server.read()).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not into the training script's output."""


_listening: weakref.WeakSet[_Server] = weakref.WeakSet()


def _hang_up() -> None:
    """In a forked worker, which would otherwise hold the port for as long as it lives."""
    for server in list(_listening):
        server.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hang_up)
