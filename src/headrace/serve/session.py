"""A client, as a server sees it: what it has asked for, and what it has not taken yet."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.serve.messages import Ask, Key, Reply
from headrace.serve.result import Result
from headrace.serve.worker import Task


@dataclass(eq=False)
class Request:
    """A batch that a client has asked for and not been sent yet."""

    session: "Session"
    number: int
    key: Key
    task: Task
    described: str
    at: float
    """When it was asked for."""


@dataclass
class Coming:
    """What a client is going to ask for."""

    ask: Ask
    steps: deque[int]


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Session:
    name: str
    send: Callable[[Reply, Result | None], None]
    """Sends a reply; a result comes with a hold on it, which the sender lets go when it is sent."""
    drop: Callable[[], None] = _nothing
    """Ends the connection."""
    is_known: bool = False
    """Whether it has said what it wants, and may have it."""
    is_trusted: bool = False
    """Whether its token was checked already."""
    line: dict[int, Request] = field(default_factory=dict)
    """Requests that wait for their turn, the oldest first, by their numbers."""
    awaited: dict[int, Request] = field(default_factory=dict)
    """Requests whose batches are being made."""
    coming: Coming | None = None
    unread: int = 0
    """How many answers it has not taken yet."""
    unread_bytes: int = 0
    """The memory that they take."""
    idle_looks: int = 0
    """How often the server has seen since then that it has taken nothing."""
    waited: float = 0.0
    answered: int = 0
    sent_bytes: int = 0

    @property
    def asked(self) -> int:
        """How many requests have no answer yet."""
        return len(self.line) + len(self.awaited)

    def next_in_line(self) -> tuple[int, Request]:
        return next(iter(self.line.items()))
