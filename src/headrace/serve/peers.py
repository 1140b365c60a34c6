"""Servers with their connections, and batches that they were asked for."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace import errors
from headrace.errors import HeadraceError, StageError
from headrace.observe.counting import Counters
from headrace.rows.buffers import BufferPool
from headrace.serve.addresses import Address
from headrace.serve.connection import Bytes, Connection
from headrace.serve.dispatch import Server, Ticket
from headrace.serve.messages import Answer, Rows
from headrace.serve.packed import unpack


@dataclass(eq=False)
class Batch(Ticket):
    """A batch that was asked for."""

    rows: Rows = field(default_factory=Rows)
    fields: tuple[str, ...] | None = None
    stages: bytes | None = None
    pool: BufferPool = field(default_factory=lambda: BufferPool(keep=0))
    counters: Counters | None = None
    ahead: Callable[[Server], tuple[int, ...]] = lambda _: ()
    is_report: bool = False
    """Whether the packing report is asked for, and no rows."""
    came: "queue.SimpleQueue[None]" = field(default_factory=queue.SimpleQueue)
    asked_at: float = 0.0
    body_bytes: int = 0
    outcome: "dict[str, Any] | HeadraceError | None" = None


@dataclass(eq=False)
class Peer(Server):
    """A server with its connection."""

    address: Address | None = None
    connection: Connection | None = None
    generation: int = 0
    """Counts connections, so that news of an old one is not taken for the new one's."""
    asked: dict[int, Batch] = field(default_factory=dict)
    """By the numbers of requests."""
    connecting_since: float | None = None
    again_at: float = 0.0
    failures_in_a_row: int = 0
    problem: str = ""
    """Why it cannot be used."""
    is_refused: bool = False
    bytes: int = 0
    answer_seconds: float = 0.0
    """The sum over all answers, as the client sees them."""


def opened(peer: Peer, answer: Answer, body: Bytes) -> "dict[str, Any] | HeadraceError":
    try:
        return unpack(answer.head, body)
    except HeadraceError as error:
        return StageError(f"the server {peer.name} has sent a batch that cannot be read: {error}")


def count(batch: Batch, answer: Answer, sent_at: float, now: float) -> None:
    """Count what the batch has cost: on the server, and on its way."""
    if batch.counters is None:
        return
    queued = answer.queued_seconds
    on_its_way = now - sent_at - answer.queued_seconds - answer.made_seconds
    stages = [("server queue", 1, round(1e9 * max(0.0, queued)))]
    stages += [(f"server {stage}", count, spent) for stage, count, spent in answer.spent]
    stages.append(("network", 1, round(1e9 * max(0.0, on_its_way))))
    batch.counters.receive((stages, [], (0, 0, 0, 0)), "servers")


def error_of(kind: str, message: str) -> HeadraceError:
    """The server's error, as its own class if it is one of ours."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, HeadraceError):
        return found(message)
    return StageError(message)
