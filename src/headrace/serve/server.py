"""A server process: it listens, serves, and ends when it is told to, after it has answered everything."""

import asyncio
import contextlib
import ipaddress
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, SettingsError
from headrace.serve.description import Description
from headrace.serve.figures import state_of
from headrace.serve.flight_start import missing_flight
from headrace.serve.health import HealthListener
from headrace.serve.service import Service, ServiceSettings
from headrace.serve.unix_server import UnixListener
from headrace.serve.worker import Served

_FLUSH_SECONDS = 5.0
_FLUSH_LOOKS = 100
_DESCRIPTORS = 2**14
_SIGNAL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a server listens, and how it knows its clients."""

    host: str = "127.0.0.1"
    port: int | None = None
    socket_path: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    insecure: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    drain_seconds: float = 30.0

    def check(self, token: str | None) -> None:
        if self.port is None and self.socket_path is None:
            raise SettingsError("give port=9000 or socket_path=/run/headrace.sock, to say where to listen")
        if (self.certificate is None) != (self.key is None):
            raise SettingsError("certificate and key: give both, or none")
        if self.port is not None and not is_loopback(self.host) and not self.insecure:
            wanted = (("a certificate with its key", self.certificate), ("a token", token))
            missing = [name for name, value in wanted if not value]
            if missing:
                raise SettingsError(
                    f"host={self.host!r}: others can reach this address, so the server needs {' and '.join(missing)}; "
                    "if the network itself is trusted, give insecure=True"
                )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


@dataclass(frozen=True)
class Started:
    """A server that is ready, as those who started it see it."""

    description: Description
    addresses: list[str]
    metrics: str | None
    service: Service = field(repr=False)

    def state(self) -> dict[str, Any]:
        return state_of(self.service)


def run_server(
    served: Served,
    settings: ServiceSettings,
    listening: Listening,
    started: Callable[[Started], None] = lambda _: None,
    leaving: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then answer what was asked, and return. A second signal ends it at once."""
    listening.check(settings.token)
    _allow_descriptors()
    asyncio.run(_serve(served, settings, listening, started, leaving))


def _allow_descriptors() -> None:
    """Use as many descriptors as the system permits: clients take one each, and batches that are kept."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _DESCRIPTORS)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _serve(
    served: Served,
    settings: ServiceSettings,
    listening: Listening,
    started: Callable[[Started], None],
    leaving: Callable[[], None],
) -> None:
    stop = _Stop()
    service = Service(served, settings)
    listeners: list[Any] = []
    try:
        health = None
        if listening.metrics_port is not None:
            health = HealthListener(service, listening.metrics_host, listening.metrics_port)
            await health.start()
        try:
            description = await stop.unless(service.start())
        except HeadraceError:
            # A signal to the whole process group ends workers too, and they may be seen to end first.
            await asyncio.sleep(_SIGNAL_SECONDS)
            if not stop.asked.is_set():
                raise
            return
        if description is None:
            return
        addresses = _listen(service, listening, listeners)
        started(Started(description, addresses, None if health is None else health.address, service))
        await stop.asked.wait()
        leaving()
        service.leave()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.again_or(service.until_quiet()), listening.drain_seconds)
        await _until_sent(service)
    finally:
        for listener in listeners:
            listener.close()
        service.close()


def _listen(service: Service, listening: Listening, listeners: list[Any]) -> list[str]:
    addresses = []
    if listening.port is not None:
        try:
            from headrace.serve.flight_server import FlightListener
        except ImportError as error:
            raise missing_flight(error) from None
        _check_certificate(listening)
        flight = FlightListener(
            service,
            listening.host,
            listening.port,
            certificate=read_file(listening.certificate, "certificate"),
            key=read_file(listening.key, "key"),
        )
        listeners.append(flight)
        addresses.append(flight.address)
    if listening.socket_path is not None:
        path = os.path.abspath(listening.socket_path)
        listeners.append(UnixListener(service, path))
        addresses.append(f"unix://{path}")
    return addresses


def _check_certificate(listening: Listening) -> None:
    """gRPC would not say what is wrong with it."""
    certificate, key = listening.certificate, listening.key
    if certificate is None or key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise SettingsError(
            f"certificate={str(certificate)!r}, key={str(key)!r}: must be a certificate and its key, without a "
            f"password, in PEM form ({reason})"
        ) from None
    except OSError:
        return  # what cannot be read is said when it is


async def _until_sent(service: Service) -> None:
    """Let the last answers reach their clients, as long as those take them."""
    for _ in range(_FLUSH_LOOKS):
        if not any(session.unread for session in service.sessions):
            return
        await asyncio.sleep(_FLUSH_SECONDS / _FLUSH_LOOKS)


def read_file(path: Path | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{what}={str(path)!r}: cannot be read: {error.strerror}") from None


class _Stop:
    """SIGTERM and Ctrl-C."""

    def __init__(self) -> None:
        self.asked, self._again = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ask)

    def _ask(self) -> None:
        (self._again if self.asked.is_set() else self.asked).set()

    async def unless(self, waiting: Any) -> Any:
        """What is waited for, or None if a signal comes first."""
        return await self._first(waiting, self.asked)

    async def again_or(self, waiting: Any) -> Any:
        return await self._first(waiting, self._again)

    async def _first(self, waiting: Any, event: asyncio.Event) -> Any:
        task, signalled = asyncio.ensure_future(waiting), asyncio.ensure_future(event.wait())
        await asyncio.wait([task, signalled], return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if task.done():
            return task.result()
        task.cancel()
        return None
