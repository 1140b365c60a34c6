"""One iteration of a DataLoader whose batches are made ahead by workers.

Tasks have numbers. With two workers and `prefetch_factor=2`, four are under way:

    handed out 0 1 2   due: 3   under way: 3 (worker 1), 4 (worker 0), 5 (worker 1), 6 (worker 0)

Each batch that is handed out sends one more task. Workers may finish in any order; batches that are not due yet wait.
"""

import itertools
import os
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper

from headrace.errors import StageError
from headrace.torch.iterators import LoaderIterator, WorkerKind, make_job
from headrace.torch.progress import resumed_workers
from headrace.torch.sampling import state_of_sampler
from headrace.torch.state_check import keeps_worker_state, settings_of
from headrace.torch.workers.job import (
    Job,
    NextEpoch,
    WorkerResult,
    Workers,
    epoch_of_dataset,
    other_process,
)
from headrace.torch.workers.pinning import Pinned
from headrace.torch.workers.processes import ProcessWorkers
from headrace.torch.workers.threads import ThreadWorkers


@dataclass(eq=False)
class _PendingBatch:
    worker: int
    result: WorkerResult | None = None


class FromWorkers(LoaderIterator):
    """Tasks go to the workers in turn, `prefetch_factor` to each ahead of the loop. Batches are handed out in order, or
    as they arrive with `in_order=False`.
    """

    def __init__(self, loader: Any, state: dict[str, Any] | None) -> None:
        if loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        self._process = os.getpid()
        self._in_order, self._ahead = loader.in_order, loader.prefetch_factor * loader.num_workers
        indices = self._begin(loader, state, loader.snapshot_every_n_steps or 0)
        self._keeps_state = keeps_worker_state(loader)
        self._epoch = 0
        self._failure: Exception | None = None
        resumed = None
        if state is not None and state["num_workers"] == loader.num_workers:
            resumed = resumed_workers(state, indices, self._next_index() if self.progress.iterable else None)
        job = make_job(self, loader, resumed)
        self._workers = _start_workers(job, loader, self._pin_memory, self._pin_memory_device)
        loader.counters.workers = loader.num_workers
        self._close = weakref.finalize(self, self._workers.close)
        if state is None or not state["finished"]:
            # Otherwise another epoch begins at once, and tasks of this one would change the dataset once more.
            self._send_first([(number, indices[number]) for number in sorted(self.progress.place.missing)])
        if job.tell_begun:
            self._wait_until_begun()

    def _wait_until_begun(self) -> None:
        """Raise what the user's `worker_init_fn` has raised, if it has; in the first worker if in several."""
        begun: dict[int, Any] = {}
        while len(begun) < self._num_workers:
            for result in self._receive():
                if result.begun:
                    begun[result.worker] = result.data
                else:
                    self._accept(result)
        for _, failure in sorted(begun.items()):
            if isinstance(failure, ExceptionWrapper):
                self._close()
                _reraise(failure)

    def _shutdown_workers(self) -> None:
        """For code that knows PyTorch's iterator."""
        self._close()

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin another epoch with the same workers, for `persistent_workers`."""
        states = self._randomness.now()
        sampler = state_of_sampler(loader._index_sampler)
        with self._randomness.private():
            super()._reset(loader, first_iter)
            self._start_epoch(states, self._base_seed, sampler)
            self._draw_privately()
        self.progress.seeded_first = False
        self.progress.settings = settings_of(loader)
        self._epoch += 1
        following = NextEpoch(self._shared_seed, self.progress.dataset_epoch, tell_state=self._keeps_state)
        self._workers.begin_again(self._epoch, following)
        if self._keeps_state:
            self.progress.begin_workers(self._states_to_begin_with())
        self._send_first([])

    def _states_to_begin_with(self) -> dict[int, Any]:
        """The states of persistent workers at the beginning of an epoch that is not their first."""
        states: dict[int, Any] = {}
        while len(states) < self._num_workers:
            for result in self._receive():
                if result.epoch != self._epoch:
                    # A batch of an epoch that was left early.
                    continue
                if isinstance(result.data, ExceptionWrapper):
                    _reraise(result.data)
                states[result.worker] = result.state
        return states

    def _send_first(self, again: list[tuple[int, Any]]) -> None:
        """Send as many tasks as may be under way; first those in `again`, which a state says were not handed out."""
        progress, count = self.progress, self._num_workers
        if self._keeps_state:
            progress.begin_workers({})
        self._again = deque(again)
        self._failed: tuple[int, int] | None = None
        """The number and the worker of a batch that was an error."""
        self._sent = progress.place.upto
        self._tasks: dict[int, _PendingBatch] = {}
        self._arrived = 0
        """How many of the tasks have a result."""
        self._due: deque[int] = deque()
        """The tasks that were not handed out, in their order; with `in_order=False`, those that have arrived."""
        self._active = [True] * count
        self._ended: dict[int, Any] = {}
        """The states, if any, of workers whose iterable has ended."""
        self._under_way = [0] * count
        first = progress.place.next_worker if progress.iterable else progress.place.upto
        self._turns = itertools.islice(itertools.cycle(range(count)), first % count, None)
        for _ in range(self._ahead):
            self._send_task()

    def _send_task(self) -> None:
        if self._again:
            number, index = self._again.popleft()
        else:
            try:
                number, index = self._sent, self._next_index()
            except StopIteration:
                return
            self._sent += 1
        worker = self._choose_worker()
        if worker is None:
            return
        self._tasks[number] = _PendingBatch(worker)
        if self._in_order:
            self._due.append(number)
        self._under_way[worker] += 1
        self._workers.send(worker, self._epoch, number, index)

    def _choose_worker(self) -> int | None:
        """The next worker in turn; with `in_order=False`, the next that is not behind."""
        for _ in range(self._num_workers):
            worker = next(self._turns)
            if self._active[worker] and (
                self._in_order or self._under_way[worker] < self._ahead // sum(self._active)
            ):
                return worker
        return None

    def _next_data(self) -> Any:
        self._check_can_go_on()
        if self._failed is not None:
            # The loop goes on after the error, so the failed batch counts as skipped.
            self.progress.pass_by(*self._failed)
            self._failed = None
        if self._tasks:
            # The workers are only asked if no result has been received: asking takes a system call.
            self._watch.counters.see_queue("ready", self._arrived or self._workers.waiting(), self._ahead)
        number = self._wait_for_due()
        if number is None:
            self.end_epoch()
            raise StopIteration
        self._due.popleft()
        return self._hand(number)

    def is_over(self) -> bool:
        """Whether nothing is left to hand out."""
        return self._wait_for_due() is None

    def _wait_for_due(self) -> int | None:
        """The task that is due, when it has a result; None if there are no more."""
        while True:
            number = self._next_due()
            if number is None and not self._outstanding():
                return None
            if number is not None and self._tasks[number].result is not None:
                return number
            for result in self._receive():
                self._accept(result)

    def _check_can_go_on(self) -> None:
        if os.getpid() != self._process:
            # Even if batches have already arrived: they belong to the other process.
            raise StageError(other_process(self._process))
        if self._failure is not None:
            raise self._failure

    def end_epoch(self) -> None:
        self.progress.end_workers(self._ended)
        self._finish()
        self._count_epoch()
        if not self._persistent_workers:
            self._close()

    def _count_epoch(self) -> None:
        """Advance the loader's own dataset to the next epoch, like the copies of the workers."""
        epoch = self.progress.dataset_epoch
        if epoch is not None and epoch == epoch_of_dataset(self._dataset):
            self._dataset.set_epoch(epoch + 1)

    def _next_due(self) -> int | None:
        while self._due:
            task = self._tasks[self._due[0]]
            if task.result is not None or self._active[task.worker]:
                return self._due[0]
            # The iterable of its worker ended before this task.
            del self._tasks[self._due.popleft()]
        return None

    def _outstanding(self) -> bool:
        return any(self._active[task.worker] for task in self._tasks.values())

    def _receive(self) -> list[WorkerResult]:
        try:
            results = self._workers.receive(self._timeout or None)
        except Exception as error:
            # A worker has died, and its batches will not arrive.
            self._failure = error
            self._close()
            raise
        if not results:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        return results

    def _interrupt(self) -> None:
        self._failure = RuntimeError(
            "DataLoader: this iteration was interrupted; start a new one with iter(loader)"
        )
        self._close()

    def _accept(self, result: WorkerResult) -> None:
        if result.epoch != self._epoch or result.begun:
            return
        if result.ended:
            self._active[result.worker] = False
            if result.state is not None:
                self._ended[result.worker] = result.state
            if not self._persistent_workers:
                self._workers.stop(result.worker)
            self._send_task()
            return
        self._tasks[result.number].result = result
        self._arrived += 1
        if not self._in_order:
            self._due.append(result.number)

    def _hand(self, number: int) -> Any:
        result: Any = self._tasks.pop(number).result
        self._arrived -= 1
        data = result.data
        self._under_way[result.worker] -= 1
        self._send_task()
        if isinstance(data, ExceptionWrapper):
            self._failed = (number, result.worker)
            _reraise(data)
        self.progress.hand(number, result.worker, result.state)
        return data


def _reraise(failure: ExceptionWrapper) -> NoReturn:
    """Raise the error without PyTorch's frame, which refers to the error and so forms a cycle: otherwise the iterator
    and its workers would stay alive until garbage is collected.
    """
    try:
        failure.reraise()
    except BaseException as caught:
        error = caught.with_traceback(None)
        if not isinstance(caught, failure.exc_type) and failure.exc_msg not in str(caught):
            # The exception could not be created again, like an ExceptionGroup.
            said = f"Caught {failure.exc_type.__name__} {failure.where}.\nOriginal {failure.exc_msg}"
            error = RuntimeError(said)
    try:
        raise error
    finally:
        del error


def _start_workers(job: Job, loader: Any, pinned: bool, device: str | None) -> Workers:
    workers: Workers
    if loader.worker_kind == WorkerKind.THREAD:
        workers = ThreadWorkers(job, loader.prefetch_factor, loader.counters)
    else:
        workers = ProcessWorkers(job, loader.multiprocessing_context, loader.counters)
    return Pinned(workers, device, loader.counters) if pinned else workers
