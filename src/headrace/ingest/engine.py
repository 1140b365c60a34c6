"""What an engine must offer: it runs a build's jobs somewhere, and reports the outcome of each.

Jobs, settings and outcomes are plain typed data, so an engine can run them in this process, in other processes of this
machine (`local_engine.py`) or on other machines. Jobs may run in any order, and a job may be run more than once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from headrace.ingest.jobs import Advanced, Job, Outcome
from headrace.ingest.task import TaskSettings
from headrace.store.store import Store


class EngineKind(StrEnum):
    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True)
class EngineChoice:
    """Which engine runs a build, and how much of it is used."""

    kind: EngineKind = EngineKind.LOCAL
    workers: int | None = None
    """How many jobs run at the same time; None leaves it to the engine."""
    address: str | None = None
    """Of a cluster; None for the one that the environment names, or a local one."""


OnOutcome = Callable[[int, Outcome], None]
"""Called in the caller's thread with the number of a job and its outcome."""
OnAdvance = Callable[[Advanced], None]


class Engine(Protocol):
    """Used in a `with` block; when the block ends, for whatever reason, nothing that the engine started is left."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def run(
        self,
        jobs: Sequence[Job],
        settings: TaskSettings,
        store: Store,
        *,
        outcome: OnOutcome,
        advance: OnAdvance,
    ) -> None:
        """Run all jobs. `store` is the one that `settings.out` names. An error in a job or in a callback ends the run
        and is raised here. This method can be called again, with other settings."""
        ...

    def run_on_each_machine(self, job: Job, settings: TaskSettings, store: Store) -> None:
        """Run a job once on every machine, as far as that is possible."""
        ...
