"""The messages between a build and its worker processes: one codec (msgpack), and a type for every message."""

import msgspec

from headrace import errors
from headrace.errors import BuildError
from headrace.ingest.jobs import (
    Advanced,
    CheckResult,
    GatherShard,
    JobMessage,
    ResultChecked,
    RunTask,
    ShardGathered,
    TaskDone,
)
from headrace.ingest.task import TaskSettings
from headrace.workers.wire import Codec


class Import(JobMessage, frozen=True):
    """The modules that the worker will need and that take long to import."""

    modules: list[str]


class Prepare(JobMessage, frozen=True):
    """The settings of the jobs that follow."""

    settings: TaskSettings


class Failed(JobMessage, frozen=True):
    kind: str
    message: str
    traceback: str

    def error(self) -> Exception:
        """The worker's error, to raise in this process: our own errors as they were, any other with its traceback."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, errors.HeadraceError):
            return kind(self.message)
        return BuildError(f"a worker failed: {self.kind}: {self.message}\n\n{self.traceback}")


ToWorker = Import | Prepare | RunTask | CheckResult | GatherShard
FromWorker = Advanced | TaskDone | ResultChecked | ShardGathered | Failed

_encode = msgspec.msgpack.Encoder().encode
BUILD_SIDE = Codec(_encode, msgspec.msgpack.Decoder(FromWorker).decode)
WORKER_SIDE = Codec(_encode, msgspec.msgpack.Decoder(ToWorker).decode)
"""Both sides encode in the same way; each decodes the messages that the other may send."""
