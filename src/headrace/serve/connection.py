"""A client's connection to one server, as the fleet sees it, whichever way it goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.serve.messages import Answer, Reply, Request

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Credentials:
    token: str | None = None
    roots: bytes | None = None
    """Certificates of authorities, in PEM form."""


Arrived = tuple[Answer, Bytes | None]
"""A batch, in the memory that `Events.place` gave."""


@dataclass(frozen=True)
class Events:
    """What a connection reports, from threads of its own."""

    hello: Callable[[], Request]
    """What to say first."""
    reply: Callable[[Reply], None]
    """Any reply but a batch."""
    place: Callable[[Answer], Bytes | None]
    """Where the bytes of a batch go; None if nobody wants it any more."""
    answers: Callable[[Sequence[Arrived]], None]
    """Batches have arrived."""
    unusable: Callable[[str], None]
    """The server cannot be used, and waiting will not help; why, and what to do."""
    lost: Callable[[str], None]
    """The connection is gone, or was never made, and why. Called once, unless the connection was closed."""


class Connection(Protocol):
    def start(self) -> None:
        """Connect, and say hello."""

    def send(self, requests: Sequence[Request]) -> None:
        """Send requests. It never waits, and a connection that is gone ignores them."""

    def tick(self) -> None:
        """Called every now and then: to send what was held back."""

    def close(self) -> None:
        """Give it up, without waiting."""

    def end(self) -> None:
        """Take leave of the server, without waiting."""

    def join(self, seconds: float) -> bool:
        """Whether its threads end within that time, once it is closed or has ended."""
