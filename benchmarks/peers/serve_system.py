"""What a running system is that makes batches elsewhere, and a network of its own to run it in."""

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

WORKERS = 2
"""How many processes make batches, in every system."""
AT_ONCE = 20
"""How many batches are waited for at once, where the function waits; in all workers together."""

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 0x1


@dataclass(frozen=True, kw_only=True)
class Settings:
    transform: str
    """'burning' or 'waiting': what is done to a batch."""
    scratch: Path
    """A folder for sockets and the like."""
    is_alone: bool
    """Whether this process has a network of its own."""


class System(Protocol):
    """Two worker processes that make batches for this process, which is the consumer."""

    facts: Mapping[str, Any]
    """What was found out about it, for the results."""

    def batches(self, first: int, count: int) -> Iterator[Mapping[str, Any]]:
        """As a new consumer: so many batches, from that number on. Each has 'row', the numbers, and 'x'."""

    def kill_worker(self) -> bool:
        """End one of its workers, as a machine that fails would. Whether there was one that worked."""


def enter_namespace() -> bool:
    """A network of this process and its children alone, whose loopback is up; False if that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK) and libc.unshare(_NEW_USER | _NEW_NETWORK):
        return False
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    return True


def kill_first(pids: list[int]) -> bool:
    """End the first of these processes without a warning."""
    if not pids:
        return False
    os.kill(pids[0], signal.SIGKILL)
    return True
