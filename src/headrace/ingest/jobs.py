"""What a build asks of an engine, and what the engine answers: typed messages that can be sent anywhere.

A job is independent of all other jobs, and can be done twice without harm. It reports its progress while it runs, and
ends with one outcome.
"""

import time
from collections.abc import Callable

import msgspec

from headrace.format.manifest import ShardEntry
from headrace.format.workplace import new_files_in
from headrace.ingest.gather import forget, gather_shard, near, stage_of
from headrace.ingest.plan import BuildTask
from headrace.ingest.results import TaskResult
from headrace.ingest.task import Workbench, run_task, still_holds

_SECONDS_BETWEEN_REPORTS = 0.1


class JobMessage(msgspec.Struct, frozen=True, tag=True):
    """Each kind of message is tagged with the name of its class when it is sent."""


class RunTask(JobMessage, frozen=True):
    task: BuildTask


class CheckResult(JobMessage, frozen=True):
    """Check whether a task's result from an earlier build still holds."""

    task: BuildTask
    result: TaskResult


class GatherShard(JobMessage, frozen=True):
    """Write the records at positions [start, stop) of the shuffled dataset, from the stage that holds them in input
    order."""

    start: int
    stop: int
    seed: int


class ForgetStage(JobMessage, frozen=True):
    """Remove the copy of the stage that a machine has made to gather from it."""


Job = RunTask | CheckResult | GatherShard | ForgetStage


class TaskDone(JobMessage, frozen=True):
    result: TaskResult


class ResultChecked(JobMessage, frozen=True):
    holds: bool


class ShardGathered(JobMessage, frozen=True):
    entry: ShardEntry


class StageForgotten(JobMessage, frozen=True):
    pass


Outcome = TaskDone | ResultChecked | ShardGathered | StageForgotten


class Advanced(JobMessage, frozen=True):
    """The progress of a job since its previous report."""

    input_bytes: int = 0
    records: int = 0
    elements: int = 0


def run_job(job: Job, bench: Workbench, report: Callable[[Advanced], None]) -> Outcome:
    """Do one job. `report` is called at most ten times a second."""
    if isinstance(job, CheckResult):
        return ResultChecked(still_holds(job.task, job.result, bench))
    if isinstance(job, GatherShard):
        stage = near(stage_of(bench.store, bench.settings.local_stage))
        new = new_files_in(bench.store)
        return ShardGathered(gather_shard(stage, new, job.start, job.stop, job.seed))
    if isinstance(job, ForgetStage):
        forget(stage_of(bench.store, bench.settings.local_stage))
        return StageForgotten()
    reports = _Reports(job.task.input_bytes, report)
    result = run_task(job.task, bench, reports.advance)
    reports.finish()
    return TaskDone(result)


class _Reports:
    """Adds up the progress of a task, and passes it on from time to time."""

    def __init__(self, input_bytes: int, report: Callable[[Advanced], None]) -> None:
        self._left, self._report = input_bytes, report
        self._waiting = Advanced()
        self._last = time.monotonic()

    def advance(self, input_bytes: int, records: int, elements: int) -> None:
        # A compressed input counts with its size on disk, but readers report the bytes that they decompressed.
        input_bytes = min(input_bytes, self._left)
        self._left -= input_bytes
        waiting = self._waiting
        self._waiting = Advanced(
            waiting.input_bytes + input_bytes, waiting.records + records, waiting.elements + elements
        )
        if time.monotonic() - self._last > _SECONDS_BETWEEN_REPORTS:
            self._send()

    def finish(self) -> None:
        self.advance(self._left, 0, 0)
        self._send()

    def _send(self) -> None:
        self._report(self._waiting)
        self._waiting = Advanced()
        self._last = time.monotonic()
