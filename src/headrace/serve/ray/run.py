"""`headrace serve --engine ray`: starts servers on a Ray cluster, lists them, and ends them.

The servers belong to this process: if it dies, Ray ends them. Two lists say where they are: a registry, which clients
find by its name through Ray (`ray:NAME`), and a file, if one is wanted. Both are kept by this process alone.
"""

import contextlib
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import headrace
from headrace.errors import SettingsError, StageError, StorageError
from headrace.observe.host import useful_cores
from headrace.serve.address_file import AddressFile
from headrace.serve.addresses import check_address
from headrace.serve.autoscale import Autoscale, Autoscaler
from headrace.serve.ray.actors import NAMESPACE, Registry, Replica
from headrace.serve.ray.node_server import FrontSettings, encode_settings
from headrace.serve.ray.replicas import Replicas
from headrace.serve.server import Listening, read_file
from headrace.serve.service import ServiceSettings
from headrace.serve.worker import Served
from headrace.workers.prefetch import wait
from headrace.workers.ray_cluster import connect, disconnect, import_ray, send_by_content

_LOOK_SECONDS = 1.0
"""How often servers are asked how they are doing."""
_START_SECONDS = 60.0
_ANSWER_SECONDS = 0.5
"""How long to wait for their answers, before those that came are used."""


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """Which cluster, how many servers, and how they are found."""

    name: str = "headrace"
    replicas: int | None = None
    autoscale: Autoscale | None = None
    address: str | None = None
    addresses_file: Path | None = None
    host: str | None = None
    """Where servers listen; None is the address of their node."""
    tls_name: str | None = None
    """The name that the certificate is for, where it is not for the addresses of all nodes."""

    def __post_init__(self) -> None:
        check_address(f"ray:{self.name}")
        if self.tls_name is not None:
            check_address(f"grpc+tls://127.0.0.1:1?name={self.tls_name}")
        limits = self.autoscale
        if (
            limits is not None
            and self.replicas is not None
            and not limits.least <= self.replicas <= limits.most
        ):
            raise SettingsError(
                f"replicas={self.replicas}: is how many servers there are at first, and must be between the limits "
                f"{limits.least} and {limits.most}"
            )

    @property
    def first(self) -> int:
        """How many servers there are at first."""
        if self.replicas is not None:
            return self.replicas
        return 1 if self.autoscale is None else self.autoscale.least

    @property
    def most(self) -> int:
        return self.first if self.autoscale is None else self.autoscale.most


def run_on_ray(
    served: Served,
    service: ServiceSettings,
    listening: Listening,
    settings: RaySettings,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then let the servers answer what they were asked, and return. A second signal
    ends them at once."""
    front = _front_settings(served, service, listening, settings)
    file = None if settings.addresses_file is None else AddressFile(settings.addresses_file)
    ray = import_ray("engine='ray'")
    is_ours = not ray.is_initialized()
    if is_ours:
        # In a Ray of our own there is room for all servers.
        connect(ray, settings.address, max(settings.most * service.workers, int(useful_cores())), StageError)
    try:
        _check_security(ray, listening, settings, service.token)
        send_by_content(ray, Replica)
        replicas = Replicas(
            ray,
            headrace.__version__,
            encode_settings(front),
            name=settings.name,
            processors=service.workers,
            drain_seconds=listening.drain_seconds,
            tell=tell,
        )
        with _listed(ray, settings.name, file, tell) as listed, _Stop() as stop:
            tell(
                f"servers are listed as ray:{settings.name}, for clients with RAY_ADDRESS={_address_of(ray)}"
            )
            try:
                _serve(replicas, settings, listed, stop, tell)
                tell("ending: answering what was asked; Ctrl-C again ends at once")
                _drain(replicas, listed, stop)
            finally:
                replicas.kill_all()
    except ray.exceptions.RayError as error:
        raise StageError(f"Ray has failed: {type(error).__name__}: {error}") from error
    finally:
        if is_ours:
            disconnect(ray)


def _serve(
    replicas: Replicas,
    settings: RaySettings,
    listed: Callable[[list[str]], None],
    stop: "_Stop",
    tell: Callable[[str], None],
) -> None:
    scaler = None if settings.autoscale is None else Autoscaler(settings.autoscale, settings.first)
    wanted = settings.first
    while not stop.signals:
        begun = time.monotonic()
        replicas.adjust(wanted, begun)
        replicas.look(begun, _ANSWER_SECONDS)
        listed(replicas.addresses)
        if scaler is not None:
            seen = replicas.seen()
            before, wanted = wanted, scaler.decide(begun, seen)
            if wanted != before:
                tell(f"{wanted} servers instead of {before}: clients wait {seen.waited:.0%} of their time")
        stop.wait(begun + _LOOK_SECONDS - time.monotonic())


def _drain(replicas: Replicas, listed: Callable[[list[str]], None], stop: "_Stop") -> None:
    replicas.adjust(0, time.monotonic())
    while len(replicas) and stop.signals < 2:
        replicas.look(time.monotonic(), _ANSWER_SECONDS)
        listed(replicas.addresses)
        stop.wait(_ANSWER_SECONDS)


def _front_settings(
    served: Served, service: ServiceSettings, listening: Listening, settings: RaySettings
) -> FrontSettings:
    if (listening.certificate is None) != (listening.key is None):
        raise SettingsError("certificate and key: give both, or none")
    if settings.tls_name is not None and listening.certificate is None:
        raise SettingsError(f"tls_name={settings.tls_name!r}: is the name in a certificate; give that too")
    return FrontSettings(
        name=served.name,
        loader_settings=served.settings,
        service=asdict(service),
        host=settings.host,
        insecure=listening.insecure,
        drain_seconds=listening.drain_seconds,
        certificate=read_file(listening.certificate, "certificate"),
        key=read_file(listening.key, "key"),
        certified_name=settings.tls_name,
        directory=os.getcwd(),
    )


def _check_security(ray: Any, listening: Listening, settings: RaySettings, token: str | None) -> None:
    """The same rule as for a server that is started by hand, before any is started."""
    nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    for host in [settings.host] if settings.host is not None else nodes:
        Listening(
            host=host,
            port=0,
            certificate=listening.certificate,
            key=listening.key,
            insecure=listening.insecure,
        ).check(token)


def _address_of(ray: Any) -> str:
    return str(ray.get_runtime_context().gcs_address)


@contextlib.contextmanager
def _listed(
    ray: Any, name: str, file: AddressFile | None, tell: Callable[[str], None]
) -> Iterator[Callable[[list[str]], None]]:
    """A function that makes addresses known to clients. In the end there are none."""
    try:
        # It has no processor of its own, and is started again if its node dies; it then hears the addresses again.
        named = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": -1}
        registry = ray.remote(Registry).options(**named).remote()
        ray.get(registry.addresses.remote(), timeout=_START_SECONDS)
    except ValueError:
        raise SettingsError(
            f"name={name!r}: servers of this name run on this cluster already; end those, or give another name"
        ) from None
    except ray.exceptions.RayError as error:
        raise StageError(
            f"Ray cannot run the list of servers: {type(error).__name__}; check that the cluster can start processes, "
            "and that RAY_AUTH_MODE=token is set if, and only if, it asks for a token"
        ) from None
    if file is not None:
        file.write([])

    def listed(addresses: list[str]) -> None:
        # Without waiting for it: what is lost is said again a second later.
        registry.enter.remote(addresses)
        if file is not None:
            try:
                file.write(addresses)
            except StorageError as error:
                tell(f"clients that read the file see the list of before: {error}")

    try:
        yield listed
    finally:
        with contextlib.suppress(Exception):
            ray.kill(registry)
        with contextlib.suppress(StorageError):
            if file is not None:
                file.write([])


class _Stop:
    """SIGTERM and Ctrl-C."""

    def __init__(self) -> None:
        self.signals = 0
        """How many came."""
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """Wait for a signal."""
        wait(self._came, max(0.0, seconds))

    def _ask(self, *_: object) -> None:
        # A queue of this kind may be used wherever the signal comes; an Event could wait for itself.
        self.signals += 1
        self._came.put(None)
