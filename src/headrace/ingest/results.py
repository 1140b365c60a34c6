"""The result of a build's task, as it is kept for the next build."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import BadRecordsError
from headrace.format.checksum import checksum
from headrace.format.manifest import ShardEntry
from headrace.ingest.plan import Slice
from headrace.readers.bad_records import too_many_bad


@dataclass(frozen=True)
class BadRecord:
    path: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, {self.where}: {self.reason}"


@dataclass(frozen=True)
class TaskResult:
    """`fingerprints` are those of the slices, in the same order."""

    slices: Sequence[Slice]
    fingerprints: Sequence[str]
    shards: Sequence[ShardEntry]
    bad_count: int = 0
    bad: Sequence[BadRecord] = ()
    max_record_bytes: int = 0
    """The bound by which some of the bad records may have been left out."""

    @property
    def key(self) -> str:
        return task_key(self.slices)


def task_key(slices: Sequence[Slice]) -> str:
    """Identifies the input of a task; together with the fingerprints it decides whether a result still holds."""
    described = [f"{piece.path}:{piece.format}:{piece.start}:{piece.stop}" for piece in slices]
    return checksum("|".join(described).encode())


def too_many(count: int, allowed: int, latest: BadRecord) -> BadRecordsError:
    remedy = (
        "Correct the input, or allow more with max_bad_records=N; finished work is kept, so start the same build again "
        "to continue"
    )
    return too_many_bad(count, allowed, str(latest), remedy)
