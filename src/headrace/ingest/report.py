"""What a build reports: its progress, and its outcome."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.ingest.results import BadRecord


@dataclass(frozen=True, kw_only=True)
class Progress:
    stage: str
    input_bytes: int
    total_bytes: int
    records: int
    tokens: int | None
    """None for a build without a tokenizer."""
    finished_tasks: int
    total_tasks: int


OnProgress = Callable[[Progress], None]


class ProgressTally:
    """Adds up the progress of all tasks and passes it on."""

    def __init__(
        self, stage: str, total_bytes: int, total_tasks: int, progress: OnProgress, *, tokens: bool = False
    ) -> None:
        self._progress = progress
        self._state = Progress(
            stage=stage,
            input_bytes=0,
            total_bytes=total_bytes,
            records=0,
            tokens=0 if tokens else None,
            finished_tasks=0,
            total_tasks=total_tasks,
        )
        progress(self._state)

    def advance(self, input_bytes: int, records: int = 0, elements: int = 0) -> None:
        now = self._state
        self._state = replace(
            now,
            input_bytes=now.input_bytes + input_bytes,
            records=now.records + records,
            tokens=None if now.tokens is None else now.tokens + elements,
        )
        self._progress(self._state)

    def finish_task(self) -> None:
        self._state = replace(self._state, finished_tasks=self._state.finished_tasks + 1)
        self._progress(self._state)


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """The outcome of `headrace.build`. `built` and `reused` count tasks: parts of the input, each of which
    gives one shard or more."""

    path: Path | str
    """Where the dataset is: a local directory, or the address of a store."""
    records: int
    elements: dict[str, int]
    shards: int
    bytes: int
    previous_bytes: int
    """What the files take that are kept only for readers of the version before."""
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
    removed_inputs: Sequence[str] = ()
    """The inputs of the version before that are no longer among the inputs, so that their records are gone."""
    part: str | None = None
    """Which part of a build was built, like "3/16", with its own records, shards and tasks; None for all of it."""
    left_out: Sequence[str] = ()
    """The columns at the start of the inputs that are not in the dataset, because others were chosen."""

    @property
    def tokens(self) -> int | None:
        return self.elements.get("tokens")
