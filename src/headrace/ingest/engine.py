"""What an engine must offer: it runs a build's jobs somewhere, and tells what came of each.

Jobs, settings and outcomes are plain typed data, so an engine can run them in this process, in processes of this
machine (`local_engine.py`) or on others. The order of jobs does not matter, and neither does how often one is tried.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from headrace.ingest.jobs import Advanced, Job, Outcome
from headrace.ingest.task import TaskSettings
from headrace.store.store import Store

OnOutcome = Callable[[int, Outcome], None]
"""Called in the caller's thread with the number of a job and its outcome."""
OnAdvance = Callable[[Advanced], None]


class Engine(Protocol):
    """Used in a `with` block; when it ends, for whatever reason, nothing that the engine started is left."""

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
        """Run all jobs. `store` is the one that `settings.out` names. An error of a job, or of a callback, ends the run
        and is raised here. Can be called again, with other settings."""
        ...
