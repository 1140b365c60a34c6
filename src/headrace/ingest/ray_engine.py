"""Runs a build's jobs on a Ray cluster: one that exists, or one that is started on this machine for the purpose.

Ray places the jobs, and runs a job again whose node or process has died. Everything else is as in a local build: jobs
write to the output, which all nodes must see, and return nothing but their outcomes.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from headrace import errors
from headrace.errors import BuildError, HeadraceError, SettingsError
from headrace.ingest.engine import OnAdvance, OnOutcome
from headrace.ingest.jobs import Advanced, Job, Outcome, RunTask, TaskDone
from headrace.ingest.local_engine import described
from headrace.ingest.ray_node import NodeSettings, encode, take_outcome, versions
from headrace.ingest.ray_task import run_on_node
from headrace.ingest.task import TOKENS, TaskSettings
from headrace.store.memory import MemoryStore
from headrace.store.store import Store, write_file
from headrace.workers.ray_cluster import connect, disconnect, import_ray, send_by_content

_LOOK_SECONDS = 0.25
_MOST_WAITING = 256
"""How many jobs wait at Ray beyond those that it can run now: enough to see that a larger cluster would help."""
_RETRIES = 4
"""How often Ray runs a job again whose node or process has died."""
_CANCEL_SECONDS = 30.0


class RayEngine:
    def __init__(self, address: str | None, workers: int | None) -> None:
        self._address, self._workers = address, workers
        self._ray: Any = None
        self._is_ours = False
        """Whether the connection to Ray was made here, and ends here."""
        self._board: Any = None

    def __enter__(self) -> Self:
        ray = self._ray = import_ray("engine='ray'")
        if not ray.is_initialized():
            connect(ray, self._address, self._workers, BuildError)
            self._is_ours = True
        send_by_content(ray, run_on_node)
        self._board = _start_board(ray)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray = self._ray
        with contextlib.suppress(Exception):
            ray.kill(self._board)
        if self._is_ours:
            disconnect(ray)

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
        if isinstance(store, MemoryStore):
            raise SettingsError(f"{store.name}: is in the memory of this process; build with engine='local'")
        with _probe_in(store) as probe:
            common = self._ray.put(encode(NodeSettings(settings, probe)))
            progress = _Progress(advance)
            self._run_all(jobs, common, store, outcome, progress)

    def _run_all(
        self, jobs: Sequence[Job], common: Any, store: Store, outcome: OnOutcome, progress: "_Progress"
    ) -> None:
        waiting = iter(enumerate(jobs))
        going: dict[Any, int] = {}
        try:
            while True:
                while len(going) < self._most_going():
                    number, job = next(waiting, (-1, None))
                    if job is None:
                        break
                    going[self._start(number, job, common)] = number
                if not going:
                    return
                done, _ = self._ray.wait(list(going), num_returns=1, timeout=_LOOK_SECONDS)
                for reference in done:
                    number = going.pop(reference)
                    found = take_outcome(self._result_of(reference, jobs[number]), store)
                    progress.finish(number, jobs[number], found)
                    outcome(number, found)
                progress.look(self._ray, self._board)
        except BaseException:
            self._cancel(list(going))
            raise

    def _most_going(self) -> int:
        if self._workers is not None:
            return self._workers
        # Nodes may come and go.
        return int(self._ray.cluster_resources().get("CPU", 1)) + _MOST_WAITING

    def _start(self, number: int, job: Job, common: Any, **options: Any) -> Any:
        remote = self._ray.remote(run_on_node).options(
            num_cpus=1,
            max_retries=_RETRIES,
            name="headrace build",
            **({"scheduling_strategy": "SPREAD"} | options),
        )
        return remote.remote(versions(), os.getcwd(), common, encode(job), number, self._board)

    def _result_of(self, reference: Any, job: Job) -> bytes:
        exceptions = self._ray.exceptions
        try:
            found = self._ray.get(reference)
        except exceptions.RayTaskError as error:
            raise BuildError(f"Ray could not run a job ({described(job)}): {error}") from None
        except exceptions.RayError as error:
            raise BuildError(
                f"Ray has lost a job ({described(job)}) {_RETRIES + 1} times, because nodes or processes died: "
                f"{type(error).__name__}. They may have run out of memory. Finished work is kept; start the same build "
                "again to continue"
            ) from None
        if isinstance(found, bytes):
            return found
        raise _error_of(*found)

    def _cancel(self, references: list[Any]) -> None:
        """End jobs that nobody waits for any more, and their processes: they would go on writing."""
        for reference in references:
            with contextlib.suppress(Exception):
                self._ray.cancel(reference, force=True)
        with contextlib.suppress(Exception):
            self._ray.wait(references, num_returns=len(references), timeout=_CANCEL_SECONDS)

    def run_on_each_machine(self, job: Job, settings: TaskSettings, store: Store) -> None:
        ray = self._ray
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        with contextlib.suppress(ray.exceptions.RayError):
            common = ray.put(encode(NodeSettings(settings, "")))
            nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
            started = [
                self._start(0, job, common, scheduling_strategy=affinity(node, soft=False)) for node in nodes
            ]
            ray.wait(started, num_returns=len(started), timeout=_CANCEL_SECONDS)


class _Progress:
    """Passes on what jobs have reported: the totals of each, as differences."""

    def __init__(self, advance: OnAdvance) -> None:
        self._advance = advance
        self._known: dict[int, Advanced] = {}
        self._finished: set[int] = set()
        self._asked: Any = None

    def look(self, ray: Any, board: Any) -> None:
        """Ask the board, without waiting for it."""
        if self._asked is None:
            self._asked = board.take.remote()
        ready, _ = ray.wait([self._asked], timeout=0)
        if not ready:
            return
        asked, self._asked = self._asked, None
        # If the board is gone, there is no progress to show in between.
        with contextlib.suppress(ray.exceptions.RayError):
            for number, total in ray.get(asked).items():
                if number not in self._finished:
                    self._note(number, Advanced(*total))

    def finish(self, number: int, job: Job, done: Outcome) -> None:
        """A job is done: what it has not reported is added."""
        self._finished.add(number)
        if isinstance(job, RunTask) and isinstance(done, TaskDone):
            shards = done.result.shards
            records = sum(shard.records for shard in shards)
            elements = sum(shard.elements.get(TOKENS, 0) for shard in shards)
            self._note(number, Advanced(job.task.input_bytes, records, elements))

    def _note(self, number: int, total: Advanced) -> None:
        # A job that is run again begins at zero.
        before = self._known.get(number, Advanced())
        most = Advanced(
            max(before.input_bytes, total.input_bytes),
            max(before.records, total.records),
            max(before.elements, total.elements),
        )
        self._known[number] = most
        self._advance(
            Advanced(
                most.input_bytes - before.input_bytes,
                most.records - before.records,
                most.elements - before.elements,
            )
        )


def _start_board(ray: Any) -> Any:
    """An actor on which jobs note their progress, on the node of this process if possible."""

    class Board:
        def __init__(self) -> None:
            self._notes: dict[int, tuple[int, ...]] = {}

        def note(self, number: int, total: tuple[int, ...]) -> None:
            self._notes[number] = total

        def take(self) -> dict[int, tuple[int, ...]]:
            notes, self._notes = self._notes, {}
            return notes

    here = ray.get_runtime_context().get_node_id()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=True)
    return ray.remote(Board).options(num_cpus=0, scheduling_strategy=affinity).remote()


@contextlib.contextmanager
def _probe_in(store: Store) -> Iterator[str]:
    """A file by which nodes recognise the output."""
    name = f"probe-{secrets.token_hex(8)}"
    store.create()
    write_file(store, name, [b""])
    try:
        yield name
    finally:
        with contextlib.suppress(OSError, HeadraceError):
            store.remove(name)


def _error_of(kind: str, message: str, traceback: str) -> Exception:
    """The error of a job, to raise here: our own errors as they were, any other with its traceback."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, HeadraceError):
        return found(message)
    return BuildError(f"a job failed: {kind} {message}\n\n{traceback}")
