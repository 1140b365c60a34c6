"""What a build tells: how far it is, and what came of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.ingest.task import BadRecord


@dataclass(frozen=True, kw_only=True)
class Progress:
    stage: str
    input_bytes: int
    total_bytes: int
    records: int
    tokens: int | None
    """None in a build without a tokenizer."""
    finished_tasks: int
    total_tasks: int


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """The outcome of `penstock.build`. `built` and `reused` count tasks: stretches of input, a shard or more each."""

    path: Path
    records: int
    elements: dict[str, int]
    shards: int
    bytes: int
    inputs: int
    input_bytes: int
    added: int
    changed: int
    removed: int
    built: int
    reused: int
    bad_count: int
    bad: Sequence[BadRecord]
    encoder: str | None
    seconds: float

    @property
    def tokens(self) -> int | None:
        return self.elements.get("tokens")
