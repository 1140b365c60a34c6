"""The Loader whose batches are made on other machines.

    headrace serve train:make_loader --port 9000                         on each of the other machines

    loader = headrace.RemoteLoader(["grpc+tls://cpu-1:9000", "grpc+tls://cpu-2:9000"], token=...)
    for batch in loader:
        step(batch.tokens, batch.labels)

It gives the same batches as the Loader that the servers have: a batch is a function of its position, so it does not
matter which server makes it, or whether two of them do. States can be exchanged with those of a Loader.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from headrace.checks import whole_number
from headrace.errors import SettingsError
from headrace.load.loader import Loader
from headrace.load.settings import LoaderArguments, LoaderSettings, check_names
from headrace.load.world import WorldOptions, find_world
from headrace.observe.host import useful_cores
from headrace.observe.stats import LoaderStats
from headrace.order.shuffle import Shuffle, ShuffleKind
from headrace.public import public
from headrace.serve.addresses import parse_addresses
from headrace.serve.connection import Credentials
from headrace.serve.description import Description, describe, plain_settings
from headrace.serve.fleet import Fleet
from headrace.serve.local import Local
from headrace.serve.ray.ray_servers import RayServers
from headrace.serve.remote_source import FromServers
from headrace.serve.served_recipe import Servers, served_recipe
from headrace.serve.worker import SERVING_VARIABLE, Served

TOKEN_VARIABLE = "HEADRACE_TOKEN"
ROOTS_VARIABLE = "HEADRACE_TLS_ROOTS"
_OWN = ("prefetch", "timeout_seconds")
"""Settings that are the client's own business."""
_DEFAULT_TIMEOUT = 600.0
_PATIENCE_SECONDS = 2.0
"""How long to wait for the other servers when one has answered."""


class RemoteArguments(LoaderArguments, total=False):
    """All keyword arguments of a RemoteLoader, for subclasses."""

    token: str | None
    tls_roots: "str | os.PathLike[str] | None"
    local: Loader | str | None
    local_workers: int
    fallback: str | None


class RemoteLoader(Loader):
    """A `headrace.Loader` whose batches are made by servers (`headrace serve`).

    The settings are those of the servers' Loader. Any other setting of a `headrace.Loader` may be given, and must
    agree with them.

    Args:
        addresses: Where the servers are: "grpc://host:port", "grpc+tls://host:port" or "unix:///path", one or a list.
            A host name may stand for several servers; "file:///path" lists servers, and is read again when it
            changes; "ray:NAME" finds servers on a Ray cluster.
        token: What the servers ask for; by default the environment variable HEADRACE_TOKEN.
        tls_roots: The file with the certificates of the authorities to trust, by default that of HEADRACE_TLS_ROOTS,
            or those of the system.
        local: The same Loader, or `module:function` of a function that returns it, to make batches on this machine.
        local_workers: How many processes of this machine make batches too, as long as the processor stays below 40 %.
        fallback: "local" makes batches on this machine while no server can be reached. By default, the loop waits.
        timeout_seconds: How long one batch may take before an error is raised, 600 by default, whether it is being
            made or no server is there.
        prefetch: How many batches are asked for ahead. By default twice as many as the servers can make at once, and
            at least as many as a Loader makes ahead.
        rank, world_size, data_rank, data_world_size, mesh, mesh_dim: As for a `headrace.Loader`.
    """

    @public
    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        token: str | None = None,
        tls_roots: "str | os.PathLike[str] | None" = None,
        local: Loader | str | None = None,
        local_workers: int = 0,
        fallback: str | None = None,
        **arguments: Unpack[LoaderArguments],
    ) -> None:
        if os.environ.get(SERVING_VARIABLE):
            raise SettingsError(
                "a RemoteLoader was created where a server makes its Loader; if this happens when the module is "
                'imported, move the training loop below `if __name__ == "__main__":`'
            )
        options: dict[str, Any] = dict(arguments)
        world = find_world(**{name: options.pop(name, None) for name in WorldOptions.__annotations__})
        check_names(options)
        timeout_seconds = options.get("timeout_seconds", _DEFAULT_TIMEOUT)
        here = _local_of(local, local_workers, fallback)
        connect = _Connect(
            tuple(parse_addresses(addresses)),
            Credentials(_token(token or os.environ.get(TOKEN_VARIABLE)), _roots(tls_roots)),
            None if here is None else describe(here.served.make()),
            here,
        )
        servers = Servers(connect)
        description = servers.fleet().describe(timeout_seconds, _PATIENCE_SECONDS)
        connect.expected = description
        settings = self._chosen(_agreed(description, options), description)
        recipe = served_recipe(description, servers, settings)
        self.servers = servers
        self._set_up(None, settings, world, recipe, FromServers())

    def _chosen(self, settings: LoaderSettings, description: Description) -> LoaderSettings:
        """The settings of the servers, with what an adapter of a framework chooses itself."""
        return settings

    def stats(self) -> LoaderStats:
        return replace(super().stats(), servers=self.servers.fleet().stats())

    @public
    def map(self, function: Callable[..., Any], *, per: str = "sample", processes: int = 0) -> Self:
        """A copy of the Loader that applies a function of this process to every batch that the servers have made."""
        if per != "batch" or processes:
            raise SettingsError(
                "map: a RemoteLoader can only apply functions of whole batches in this process, with per='batch'; "
                "functions of samples belong to the Loader of the servers"
            )
        other = super().map(function, per=per)
        other.source = FromServers()
        return other

    @public
    def use_servers(self, addresses: str | Sequence[str]) -> None:
        """Use these servers from now on, also in iterations that are running: new ones are met, and others left."""
        self.servers.use(tuple(parse_addresses(addresses)))

    def close(self) -> None:
        """End the connections. The next iteration makes them again."""
        self.servers.close()


@dataclass
class _Connect:
    """Makes the connections of a process. It can be pickled."""

    addresses: tuple[str, ...]
    credentials: Credentials
    expected: Description | None
    local: Local | None

    def __call__(self) -> Fleet:
        local = None if self.local is None else replace(self.local)
        return Fleet(
            self.addresses,
            self.credentials,
            expected=self.expected,
            known_from="this RemoteLoader" if self.local is None else "local=",
            local=local,
            ray_servers=self.ray_servers(),
        )

    def ray_servers(self) -> RayServers | None:
        asks_ray = any(address.startswith("ray:") for address in self.addresses)
        return RayServers() if asks_ray else None


def _token(given: str | None) -> str | None:
    # A file with a token often ends with a new line.
    token = (given or "").strip()
    if not token.isascii() or not token.isprintable():
        raise SettingsError("token=...: must be printable ASCII, such as that of `openssl rand -hex 32`")
    return token or None


def _roots(given: "str | os.PathLike[str] | None") -> bytes | None:
    path = given or os.environ.get(ROOTS_VARIABLE)
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            roots = file.read()
    except OSError as error:
        raise SettingsError(f"tls_roots={os.fspath(path)!r}: cannot be read: {error.strerror}") from None
    if b"-----BEGIN CERTIFICATE-----" not in roots:
        raise SettingsError(f"tls_roots={os.fspath(path)!r}: holds no certificate; give a file in PEM form")
    return roots


def _local_of(local: Loader | str | None, local_workers: int, fallback: str | None) -> Local | None:
    workers = whole_number("local_workers", local_workers, 0)
    if fallback not in (None, "local"):
        raise SettingsError(f"fallback={fallback!r}: must be 'local', or None to wait for servers")
    if local is None:
        if workers or fallback:
            given = f"local_workers={workers}" if workers else "fallback='local'"
            raise SettingsError(f"{given}: needs local=, a Loader or the module:function of one")
        return None
    if not workers and not fallback:
        raise SettingsError("local=: is only used with local_workers= or fallback='local'; give one of them")
    if isinstance(local, str):
        served = Served(name=local)
    elif isinstance(local, Loader) and not isinstance(local, RemoteLoader):
        served = Served(loader=local)
    else:
        raise SettingsError(f"local={local!r}: must be a Loader or the module:function of one")
    return Local(
        served,
        workers or max(1, int(useful_cores())),
        is_fallback=not workers,
        may_help_out=fallback is not None,
    )


def _agreed(description: Description, options: dict[str, Any]) -> LoaderSettings:
    """The settings of the servers, once those that were given are known to agree."""
    theirs = description.loader_settings()
    own = {name: options.pop(name) for name in _OWN if name in options}
    own = {"prefetch": None, "timeout_seconds": _DEFAULT_TIMEOUT, **own}
    if "workers" in options:
        raise SettingsError(
            "workers: batches are made by the servers; see local_workers= to let this machine take part"
        )
    given = {name: value for name, value in options.items() if not _is_left_open(name, value)}
    ours = replace(theirs, **given) if given else theirs
    shown, expected = plain_settings(ours), plain_settings(theirs)
    for name in given:
        if shown[name] != expected[name]:
            raise SettingsError(
                f"{name}={_short(shown[name])}: the Loader of the servers has {_short(expected[name])}; leave it out, "
                "or start the servers with this setting"
            )
    return replace(theirs, workers=None, **own)


def _is_left_open(name: str, value: Any) -> bool:
    return name == "shuffle" and Shuffle.parse(value).kind is ShuffleKind.AUTO


def _short(value: Any) -> str:
    if isinstance(value, dict) and "kind" in value:
        value = value["kind"]
    return repr(value)
