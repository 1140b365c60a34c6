"""Whether a server lives and is ready, and what it has done, over HTTP on a port of its own.

/healthz    200 while the process answers at all
/readyz     200 while it can make batches, 503 while workers start and when it is ending
/metrics    figures in the text format of Prometheus
"""

import asyncio
from collections.abc import Iterator

from headrace.errors import SettingsError
from headrace.serve.figures import state_of
from headrace.serve.service import Service

_MOST_BYTES = 2**14
_SECONDS = 10.0
_METRICS = (
    ("asked", "requests_total", "counter", "Requests for batches."),
    ("answered", "answers_total", "counter", "Batches that were sent."),
    ("failed", "failures_total", "counter", "Batches that could not be made."),
    ("refused", "refused_total", "counter", "Clients with a wrong token."),
    (
        "stuck",
        "stuck_total",
        "counter",
        "Clients that took nothing for half a minute, and were disconnected.",
    ),
    ("made", "made_total", "counter", "Batches that were made."),
    ("found", "found_total", "counter", "Requests for batches that were there already."),
    ("shared", "shared_total", "counter", "Requests for batches that were being made already."),
    ("ahead", "ahead_total", "counter", "Batches that were made before anybody asked."),
    ("sent_bytes", "sent_bytes_total", "counter", "Bytes of batches that were sent."),
    ("made_seconds", "made_seconds_total", "counter", "Time in which workers made batches."),
    ("queued_seconds", "queued_seconds_total", "counter", "Time in which requests waited for their turn."),
    ("worker_deaths", "worker_deaths_total", "counter", "Worker processes that have died."),
    ("workers_ready", "workers_ready", "gauge", "Worker processes that are ready."),
    ("slots", "slots", "gauge", "Batches that can be made at the same time."),
    ("running", "running", "gauge", "Batches that are being made."),
    ("held_bytes", "held_bytes", "gauge", "Memory of the batches that are kept or being sent."),
    ("memory_bytes", "memory_bytes", "gauge", "The most memory that batches may take."),
)


class HealthListener:
    def __init__(self, service: Service, host: str, port: int) -> None:
        self._service, self._host, self._port = service, host, port
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_server(self._answer, self._host, self._port, limit=_MOST_BYTES)
        except OSError as error:
            reason = (error.strerror or str(error)).rpartition(": ")[2]
            raise SettingsError(
                f"metrics_port={self._port}: cannot listen on {self._host}: {reason}; give another port or host"
            ) from None

    @property
    def address(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _SECONDS)
            status, kind, body = self._reply(asked)
            head = [
                f"HTTP/1.1 {status}",
                f"Content-Type: {kind}",
                f"Content-Length: {len(body)}",
                "Connection: close",
            ]
            writer.write("\r\n".join([*head, "", ""]).encode() + body)
            await asyncio.wait_for(writer.drain(), _SECONDS)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    def _reply(self, asked: bytes) -> tuple[str, str, bytes]:
        method, _, rest = asked.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        plain = "text/plain; charset=utf-8"
        if method not in (b"GET", b"HEAD"):
            return "405 Method Not Allowed", plain, b"only GET\n"
        if path == b"/healthz":
            return "200 OK", plain, b"alive\n"
        if path == b"/readyz":
            if self._service.is_ready:
                return "200 OK", plain, b"ready\n"
            said = b"ending\n" if self._service.is_leaving else b"no worker is ready\n"
            return "503 Service Unavailable", plain, said
        if path == b"/metrics":
            text = "\n".join([*metrics(self._service), ""])
            return "200 OK", "text/plain; version=0.0.4; charset=utf-8", text.encode()
        return "404 Not Found", plain, b"/healthz, /readyz or /metrics\n"


def metrics(service: Service) -> Iterator[str]:
    state = state_of(service)
    for name, metric, kind, text in _METRICS:
        yield f"# HELP headrace_serve_{metric} {text}"
        yield f"# TYPE headrace_serve_{metric} {kind}"
        yield f"headrace_serve_{metric} {state[name]}"
    clients = state["clients"]
    waited = max((client["waited"] for client in clients), default=0.0)
    yield "# HELP headrace_serve_clients Connections of clients."
    yield "# TYPE headrace_serve_clients gauge"
    yield f"headrace_serve_clients {len(clients)}"
    yield "# HELP headrace_serve_waited_share The share of its time in which the client that waits most has waited."
    yield "# TYPE headrace_serve_waited_share gauge"
    yield f"headrace_serve_waited_share {waited}"
