"""The connection of a client of Arrow Flight, which neither Arrow nor gRPC lets a server end.

The sockets are this process's own, so the one whose other end is the client can be found and shut down. gRPC then ends
all exchanges of that connection, as if the client had gone.
"""

import contextlib
import ipaddress
import os
import socket
import stat
from urllib.parse import unquote

_Place = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def end_connection(peer: str) -> None:
    """`peer` is what gRPC calls the client: ipv4:10.0.0.7:50418, or ipv6:%5B::1%5D:50418."""
    wanted = _place_of(peer)
    if wanted is None:
        return
    for number in map(int, os.listdir("/proc/self/fd")):
        # It may have been closed meanwhile, or be no connection.
        with contextlib.suppress(OSError), _socket_of(number) as found:
            is_internet = found.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and _place(*found.getpeername()[:2]) == wanted:
                found.shutdown(socket.SHUT_RDWR)


def _socket_of(number: int) -> socket.socket:
    """A socket of a descriptor, with a descriptor of its own."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(f"descriptor {number} is no socket")
    return socket.socket(fileno=os.dup(number))


def _place_of(peer: str) -> _Place | None:
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _place(host.strip("[]"), int(port))


def _place(host: str, port: int) -> _Place:
    found = ipaddress.ip_address(host.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found, port
