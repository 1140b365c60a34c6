"""The engine for this machine: worker processes, or the caller's own process if there is only one worker.

The processes start at once, and import what they will need while the build is still planning. The caller's thread hands
out jobs and listens to all processes, so all decisions are made in one place. Whatever ends the engine (the last job,
an error, Ctrl-C), every process is gone when its `with` block ends.
"""

import os
import selectors
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from headrace.errors import BuildError, SettingsError
from headrace.ingest.conversation import BUILD_SIDE, Failed, Import, Prepare
from headrace.ingest.engine import OnAdvance, OnOutcome
from headrace.ingest.jobs import Advanced, CheckResult, Job, RunTask, run_job
from headrace.ingest.task import TaskSettings, Workbench
from headrace.store.memory import MemoryStore
from headrace.store.store import Store
from headrace.workers import process
from headrace.workers.process import WorkerProcess, ctrl_c_waits, end_workers

SILENT_SECONDS = 300.0
"""How long a worker may neither send anything nor compute."""
COMPUTING_SECONDS = 3600.0
"""How long it may compute without sending anything: a single call of an encoder may take minutes."""
_COMPUTING_SHARE = 0.02
"""The least share of the processor that counts as computing. A worker that only waits looks after its parent, too."""
_LOOK_SECONDS = 1.0
_KEPT = "finished work is kept; start the same build again to continue"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""One thread in each process, because the processes already keep all cores busy."""


class LocalEngine:
    """`workers` processes, or the caller's own if `workers` is 1. The processes import `modules` while they wait."""

    def __init__(self, workers: int, modules: Sequence[str] = ()) -> None:
        self._count, self._modules = workers, list(modules)
        self._workers: list[_BuildWorker] = []
        self._selector = selectors.DefaultSelector()
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        try:
            with ctrl_c_waits():
                for _ in range(self._count if self._count > 1 else 0):
                    self._workers.append(_BuildWorker(self._modules))
            for worker in self._workers:
                self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._selector.close()
        if os.getpid() == self._owner:
            for worker in self._workers:
                worker.show_output()
        end_workers([worker.process for worker in self._workers], self._owner)

    def run(
        self,
        jobs: Sequence[Job],
        settings: TaskSettings,
        store: Store,
        *,
        outcome: OnOutcome,
        advance: OnAdvance,
    ) -> None:
        if not jobs:
            return
        if not self._workers:
            bench = Workbench.prepare(settings, store)
            for number, job in enumerate(jobs):
                outcome(number, run_job(job, bench, advance))
            return
        if isinstance(store, MemoryStore):
            raise SettingsError(f"{store.name}: is in the memory of this process; build with workers=1")
        for worker in self._workers:
            worker.prepare(settings)
        self._hand_out(iter(enumerate(jobs)), outcome, advance)

    def run_on_each_machine(self, job: Job, settings: TaskSettings, store: Store) -> None:
        run_job(job, Workbench(settings, store, None), lambda _: None)

    def _hand_out(self, waiting: Iterator[tuple[int, Job]], outcome: OnOutcome, advance: OnAdvance) -> None:
        for worker in self._workers:
            worker.give(next(waiting, None))
        while any(worker.job for worker in self._workers):
            self._watch_unsent()
            for key, events in self._selector.select(_LOOK_SECONDS):
                if events & selectors.EVENT_WRITE:
                    key.data.process.flush()
                self._hear(key.data, waiting, outcome, advance)
            for worker in self._workers:
                worker.look()

    def _hear(
        self,
        worker: "_BuildWorker",
        waiting: Iterator[tuple[int, Job]],
        outcome: OnOutcome,
        advance: OnAdvance,
    ) -> None:
        for message in worker.receive():
            if isinstance(message, Advanced):
                advance(message)
            elif isinstance(message, Failed):
                raise message.error()
            else:
                outcome(worker.number_of_job(), message)
                worker.give(next(waiting, None))

    def _watch_unsent(self) -> None:
        """Wait for writability where a message is still unsent: settings may be megabytes, sent as the worker reads."""
        for worker in self._workers:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.process.has_unsent else 0)
            if self._selector.get_key(worker.connection).events != wanted:
                self._selector.modify(worker.connection, wanted, worker)


class _BuildWorker:
    """The build's view of one worker process."""

    def __init__(self, modules: list[str]) -> None:
        self.process = WorkerProcess(
            "headrace.ingest.worker", BUILD_SIDE, environment=_ENVIRONMENT, keep_output=True
        )
        self.connection = self.process.connection
        self.job: tuple[int, Job] | None = None
        self._given_at = self._looked_at = process.clock()
        self._cpu_seconds = 0.0
        """What it had used of the processor at `_looked_at`."""
        self.process.send(Import(modules))

    def prepare(self, settings: TaskSettings) -> None:
        self.process.send(Prepare(settings))

    def give(self, job: tuple[int, Job] | None) -> None:
        self.job = job
        if job is not None:
            self._given_at = self._looked_at = process.clock()
            self._cpu_seconds = self._seconds_used()
            self.process.send(job[1])

    def number_of_job(self) -> int:
        if self.job is None:
            raise BuildError(f"worker process {self.process.pid} sent a result although it had no job")
        return self.job[0]

    def receive(self) -> Iterator[Any]:
        try:
            for message in self.process.receive():
                yield message.head
        except (EOFError, ConnectionError):
            raise BuildError(self._died()) from None

    def _died(self) -> str:
        doing = f" while it was {described(self.job[1])}" if self.job else ""
        ended = f"a worker (process {self.process.pid}) {self.process.death()}{doing}"
        remedy = f"if memory is short, try a smaller workers= or shard_bytes=; {_KEPT}"
        words = self.process.last_words()
        return f"{ended}; {remedy}\n{words}" if words else f"{ended}; {remedy}"

    def look(self) -> None:
        """Raise an error if the worker hangs, or has died without its connection being closed."""
        if self.job is None:
            return
        if not self.process.is_running():
            # Its connection is still held open by a process that it started.
            raise BuildError(self._died())
        now, silent_since = process.clock(), max(self._given_at, self.process.heard_at)
        if now - max(silent_since, self._looked_at) < SILENT_SECONDS:
            return
        if self._has_computed(now) and now - silent_since < COMPUTING_SECONDS:
            return
        raise BuildError(
            f"a worker (process {self.process.pid}) has sent nothing for {now - silent_since:,.0f} seconds while it "
            f"was {described(self.job[1])}; a disk or a server may not be responding. The worker was killed; {_KEPT}. "
            f"Its stack was:\n\n{self.process.stack()}"
        )

    def _has_computed(self, now: float) -> bool:
        """Whether it has used the processor since the last look, for more than it takes to wait."""
        seconds, before = now - self._looked_at, self._cpu_seconds
        self._looked_at, self._cpu_seconds = now, self._seconds_used()
        return self._cpu_seconds - before >= _COMPUTING_SHARE * seconds

    def _seconds_used(self) -> float:
        """The processor time that it has used; 0 if it is gone."""
        import psutil  # only now: a build without processes needs none of it

        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def show_output(self) -> None:
        """What it has printed is kept until its end, when it may explain a death; nobody should miss a warning."""
        sys.stderr.write(self.process.output())


def described(job: Job) -> str:
    if isinstance(job, RunTask):
        first = job.task.slices[0]
        more = f" and {len(job.task.slices) - 1} more" if len(job.task.slices) > 1 else ""
        return f"building from {first.path} ({first.start} to {first.stop}){more}"
    return "checking earlier results" if isinstance(job, CheckResult) else "shuffling"
