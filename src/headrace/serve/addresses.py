"""Where servers are: addresses, names that stand for several of them, and files that list them.

    grpc://cpu-1:9000           Arrow Flight, for networks that are trusted
    grpc+tls://cpu-1:9000       Arrow Flight with TLS
    grpc+tls://10.0.0.7:9000?name=cpu.internal      the same, with the name that the certificate is for
    unix:///run/headrace.sock   a server on this machine
    file:///shared/servers      a file with an address in each line, which is read again when it changes
    ray:NAME                    the servers that were started under this name on a Ray cluster

A host name may have several addresses, like that of a headless service of Kubernetes: each is a server of its own.
Names are looked up again every few seconds, so servers may come and go.
"""

import ipaddress
import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.errors import SettingsError

_log = logging.getLogger(__name__)

_SCHEMES = ("grpc", "grpc+tls", "unix", "file", "ray")
_NAME = "name="
_EXAMPLES = "give one like grpc+tls://cpu-1:9000, grpc://127.0.0.1:9000 or unix:///run/headrace.sock"


@dataclass(frozen=True)
class Address:
    """One server: where to connect to, and by which name its certificate is checked."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    certified_name: str | None = None
    """The name in the given address, if `host` was found by looking it up."""

    @property
    def location(self) -> str:
        """Where to connect to."""
        if self.scheme == "unix":
            return f"unix://{self.path}"
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def __str__(self) -> str:
        """As people know it, with the number if the name may stand for several servers."""
        if self.certified_name is None:
            return self.location
        return f"{self.scheme}://{self.certified_name}:{self.port} ({self.host})"


def parse_addresses(given: object) -> list[str]:
    """The addresses that a user has given, checked for their form."""
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, Iterable):
        raise SettingsError(f"addresses={given!r}: must be a list of addresses; {_EXAMPLES}")
    addresses = list(listed)
    if not addresses:
        raise SettingsError(f"addresses=[]: no server to ask; {_EXAMPLES}")
    for address in addresses:
        check_address(address)
    return [str(address) for address in addresses]


def check_address(address: object) -> None:
    if not isinstance(address, str):
        raise SettingsError(f"address {address!r}: must be a text; {_EXAMPLES}")
    scheme, colon, rest = address.partition(":")
    if not colon or scheme not in _SCHEMES:
        raise SettingsError(
            f"address {address!r}: must begin with grpc://, grpc+tls://, unix://, file:// or ray:; {_EXAMPLES}"
        )
    if scheme == "ray":
        if not rest or "/" in rest:
            raise SettingsError(f"address {address!r}: give the name of the servers, as in ray:headrace")
        return
    if re.search(r",\s*(grpc|grpc\+tls|unix)://", address):
        raise SettingsError(f"address {address!r}: give several addresses as a list")
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"address {address!r}: {error}; {_EXAMPLES}") from None
    if scheme in ("unix", "file"):
        if parts.netloc or not os.path.isabs(parts.path):
            raise SettingsError(f"address {address!r}: give an absolute path, as in {scheme}:///run/headrace")
    elif (
        not parts.hostname
        or not port
        or parts.username
        or parts.path.strip("/")
        or not _is_name(scheme, parts.query)
    ):
        raise SettingsError(f"address {address!r}: must be {scheme}://host:port; {_EXAMPLES}")


class Discovery:
    """Finds the servers that are there now. What cannot be looked up keeps its last answer."""

    def __init__(self, given: Sequence[str], ray_servers: Callable[[str], list[str]] | None = None) -> None:
        self.given = list(given)
        self._known: dict[str, list[Address]] = {}
        self._ray_servers = ray_servers
        self.problems: dict[str, str] = {}
        """Why some of them could not be looked up, the last time."""

    def use(self, given: Sequence[str], ray_servers: Callable[[str], list[str]] | None) -> None:
        """Look for these from now on."""
        self._ray_servers = self._ray_servers or ray_servers
        self.given = list(given)

    @property
    def may_change(self) -> bool:
        """Whether looking again may give other servers."""
        return not all(_is_fixed(address) for address in self.given)

    def look(self) -> list[Address]:
        """All servers, each once. It may take as long as a name server does."""
        found: dict[Address, None] = {}
        given = self.given
        for address in given:
            try:
                self._known[address] = self._resolve(address)
                self.problems.pop(address, None)
            except (OSError, SettingsError, UnicodeError) as error:
                self._note(address, str(getattr(error, "strerror", None) or error))
            found |= dict.fromkeys(self._known.get(address, []))
        for address in self.problems.keys() - set(given):
            del self.problems[address]
        return list(found)

    def _note(self, address: str, problem: str) -> None:
        if self.problems.get(address) != problem and self._known.get(address):
            _log.warning("%s: %s; the servers that were found there before are still used", address, problem)
        self.problems[address] = problem

    def _resolve(self, address: str) -> list[Address]:
        scheme = address.partition(":")[0]
        if scheme == "ray":
            listed = self._ray_servers(address.partition(":")[2]) if self._ray_servers else []
            return [each for line in listed for each in self._resolve(line)]
        parts = urlsplit(address)
        if scheme == "unix":
            return [Address("unix", path=parts.path)]
        if scheme == "file":
            return self._listed(parts.path)
        return _hosts(scheme, parts.hostname or "", parts.port or 0, parts.query.removeprefix(_NAME))

    def _listed(self, path: str) -> list[Address]:
        return [each for line in listed_in(path) for each in self._resolve(line)]


def listed_in(path: str) -> list[str]:
    """The addresses that a file lists."""
    with open(path, encoding="utf-8") as file:
        lines = [line.partition("#")[0].strip() for line in file]
    found = [line for line in lines if line]
    for line in found:
        try:
            check_address(line)
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}") from None
        if line.startswith(("file:", "ray:")):
            raise SettingsError(f"{path} lists {line}: a list of servers has addresses only")
    return found


def _is_fixed(address: str) -> bool:
    """Whether an address always stands for the same server."""
    parts = urlsplit(address)
    if parts.scheme == "unix":
        return True
    if parts.scheme not in ("grpc", "grpc+tls"):
        return False
    try:
        ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        return parts.hostname == "localhost"
    return True


def _is_name(scheme: str, query: str) -> bool:
    """Whether what follows the port is nothing, or the name in the certificate."""
    return not query or (scheme == "grpc+tls" and re.fullmatch(rf"{_NAME}[\w.-]+", query) is not None)


def _hosts(scheme: str, host: str, port: int, certified_name: str = "") -> list[Address]:
    looked_up = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    numbers = list(dict.fromkeys(str(address[0]) for *_, address in looked_up))
    if host == "localhost" and "127.0.0.1" in numbers:
        # ::1 is the same machine, and servers listen on one of the two.
        numbers = ["127.0.0.1"]
    return [
        Address(scheme, number, port, certified_name=certified_name or (None if number == host else host))
        for number in numbers
    ]
