"""Worker threads: for datasets that release the interpreter's lock, such as memory maps, NumPy, decoders, networks.

Nothing is pickled. Each thread has a shallow copy of the dataset (of a data pipe a whole one): what it holds is there
once, but an attribute that one thread sets, as a `worker_init_fn` or an iterable with a place in it does, is not
another's. There is one set of random generators for the process, though: a thread cannot have its own seed for
`random` or `torch`. It has generators of its own in `get_worker_info().rng`, where PyTorch's version knows of that,
and a seed in `get_worker_info().seed`.
"""

import copy
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.datapipes.datapipe import _DataPipeSerializationWrapper

from headrace.errors import StageError
from headrace.observe.counting import Counters, working_for
from headrace.rows.buffers import BufferPool
from headrace.torch.workers import collating
from headrace.torch.workers.job import (
    Fetching,
    Job,
    NextEpoch,
    Outcome,
    WorkerResult,
    alone_with_pipes,
    end_now,
    is_pipe,
    other_process,
    worker_info,
)

_JOIN_SECONDS = 5.0
_MOST_ITEMS = 1000
"""Longer lists are not looked through for arrays."""
_POOLED_BYTES = 2**15
"""Smaller tensors are made and thrown away: that is quicker than looking for memory to use again."""

_Task = tuple[str, int, int, Any]


class ThreadWorkers:
    def __init__(self, job: Job, ahead: int, counters: Counters | None = None) -> None:
        _let_threads_have_worker_info()
        self._process = os.getpid()
        self._shared = _ThreadState(job.num_workers, counters or Counters())
        pool = BufferPool(keep=2 * job.num_workers * (ahead + 1))
        own = [_of_its_own(job) for _ in range(job.num_workers)]
        threads = [
            threading.Thread(
                target=_run,
                args=(own[worker], worker, self._shared, pool),
                name=f"DataLoader-{worker}",
                daemon=True,
            )
            for worker in range(job.num_workers)
        ]
        self._end = weakref.finalize(self, _end, self._shared, threads, self._process)
        for thread in threads:
            thread.start()

    def send(self, worker: int, epoch: int, number: int, index: Any) -> None:
        self._shared.tasks[worker].put(("task", epoch, number, index))

    def begin_again(self, epoch: int, following: NextEpoch) -> None:
        self._shared.epoch = epoch
        for tasks in self._shared.tasks:
            tasks.put(("again", epoch, 0, following))

    def stop(self, worker: int) -> None:
        self._shared.tasks[worker].put(("stop", 0, 0, None))

    def receive(self, timeout_seconds: float | None) -> list[WorkerResult]:
        if os.getpid() != self._process:
            raise StageError(other_process(self._process))
        results = self._shared.results
        try:
            first = results.get(timeout=timeout_seconds)
        except queue.Empty:
            return []
        # This thread alone takes them, so those that are there stay there.
        return [first, *(results.get() for _ in range(results.qsize()))]

    def waiting(self) -> int:
        return self._shared.results.qsize()

    def close(self) -> None:
        end_now(self._end)

    def pids(self) -> list[int | None]:
        return []

    def __iter__(self) -> Iterator[Any]:
        """Nothing: there are no processes."""
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, worker: int) -> Any:
        raise IndexError(f"worker {worker}: these workers are threads, not processes")


class _ThreadState:
    """What the threads have in common with the loader, without holding it."""

    def __init__(self, workers: int, counters: Counters) -> None:
        self.counters = counters
        self.tasks: list[queue.SimpleQueue[_Task]] = [queue.SimpleQueue() for _ in range(workers)]
        self.results: queue.SimpleQueue[WorkerResult] = queue.SimpleQueue()
        self.epoch = 0
        self.over = False


class _Pooled:
    """Room for what a thread collates: from a pool, whose buffers are free again when the batch is gone."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def memory(self, size: int) -> Any:
        if size < _POOLED_BYTES:
            return None
        return self._pool.arrays([("memory", np.uint8, (size,))])["memory"]


def _run(job: Job, worker: int, shared: _ThreadState, pool: BufferPool) -> None:
    where = f"in DataLoader worker thread {worker}"
    _thread.info = worker_info(job, worker, worker_method="thread", rng=_generators(job.seed_of(worker)))
    fetching: Fetching | None = None
    if job.tell_begun:
        failure: ExceptionWrapper | None
        try:
            fetching = Fetching(job, worker, where)
            failure = fetching.init_failure
        except BaseException:
            failure = ExceptionWrapper(where=where)
        shared.results.put(WorkerResult(worker, 0, 0, failure, begun=True))
    while not shared.over:
        kind, epoch, number, index = shared.tasks[worker].get()
        if kind == "stop":
            return
        outcome: Outcome | None
        try:
            fetching = fetching or Fetching(job, worker, where)
            if kind == "again":
                state = copy.deepcopy(fetching.begin_again(index))
                if index.tell_state:
                    shared.results.put(WorkerResult(worker, epoch, number, state=state, begun=True))
                continue
            with collating.lend(_Pooled(pool)), working_for(shared.counters):
                outcome = fetching.fetch(index)
            if outcome is not None:
                outcome = outcome._replace(state=copy.deepcopy(outcome.state))
        except BaseException:
            # Also what would end a process, such as SystemExit: a thread cannot end for itself alone.
            outcome = Outcome(ExceptionWrapper(where=where))
        if outcome is not None and epoch == shared.epoch:
            # Else the epoch was left early. Its tasks are done all the same: see `process.py`.
            shared.results.put(
                WorkerResult(worker, epoch, number, outcome.data, outcome.state, outcome.ended)
            )
        # Else the thread would hold the batch until it has made the next one.
        del outcome, index


def _end(shared: _ThreadState, threads: list[threading.Thread], process: int) -> None:
    if os.getpid() != process:
        return
    shared.over = True
    for tasks in shared.tasks:
        tasks.put(("stop", 0, 0, None))
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in threads:
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


def _generators(seed: int) -> Any:
    """PyTorch's container of generators for a thread, where it has one."""
    container = getattr(torch_worker, "_RNG", None)
    if container is None:
        return None
    return container(random.Random(seed), torch.Generator().manual_seed(seed), np.random.default_rng(seed))


def _of_its_own(job: Job) -> Job:
    """With a copy of the dataset, and those of its methods (or of its parts, if it is a data pipe) that the loader was
    given."""
    copies: dict[int, Any] = {}
    """What was copied, by its identity: as `copy.deepcopy` keeps it."""
    own = _own_copy(job.dataset, copies)

    def bound(function: Any) -> Any:
        if isinstance(function, partial):
            return partial(function.func, *map(bound, function.args), **function.keywords)
        owner = getattr(function, "__self__", None)
        if owner is None or id(owner) not in copies or not isinstance(function, MethodType):
            return function
        return MethodType(function.__func__, copies[id(owner)])

    return replace(job, dataset=own, init_fn=bound(job.init_fn), collate_fn=bound(job.collate_fn))


def _own_copy(dataset: Any, copies: dict[int, Any]) -> Any:
    """A copy of an object with attributes; arrays and the like have none to speak of."""
    if is_pipe(dataset):
        return _own_pipe(dataset, copies)
    if not hasattr(dataset, "__dict__") or isinstance(dataset, np.ndarray | Tensor):
        return dataset
    try:
        copies[id(dataset)] = copy.copy(dataset)
    except Exception:
        return dataset
    return copies[id(dataset)]


def _own_pipe(pipe: Any, copies: dict[int, Any]) -> Any:
    """A data pipe is made of others, which have places and random states of their own."""
    if isinstance(pipe, _DataPipeSerializationWrapper):
        # PyTorch's DataLoader puts it around every pipe, for processes. It would pickle what a copy only refers to.
        wrapper: Any = pipe
        return type(wrapper)(_own_pipe(wrapper._datapipe, copies))
    try:
        with alone_with_pipes(pipe):
            copies.update((id(array), array) for array in _read_only_arrays(pipe))
            return copy.deepcopy(pipe, copies)
    except Exception as error:
        raise StageError(
            f"{type(pipe).__name__}: each worker thread needs a copy of the data pipe, but this one cannot be copied: "
            f"{error}; use worker_kind='process'"
        ) from error


def _read_only_arrays(thing: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Arrays that threads can share, such as memory maps: each thread's copy of one would take up RAM."""
    waiting, seen = [thing], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if not isinstance(each, np.ndarray):
            waiting += _held_by(each)
        elif not each.flags.writeable:
            yield each


def _held_by(thing: Any) -> Iterable[Any]:
    """The items or attributes of an object, in which arrays may be found."""
    if isinstance(thing, list | tuple) and len(thing) <= _MOST_ITEMS:
        return thing
    if isinstance(thing, dict) and len(thing) <= _MOST_ITEMS:
        return thing.values()
    if hasattr(thing, "__dict__") and not isinstance(thing, type | ModuleType | FunctionType):
        attributes: dict[str, Any] = vars(thing)
        return attributes.values()
    return ()


class _Thread(threading.local):
    info: Any = None


_thread = _Thread()


def _forget_after_fork() -> None:
    """A worker thread that forks is the main thread of the fork, and no worker there."""
    _thread.info = None


os.register_at_fork(after_in_child=_forget_after_fork)


def _let_threads_have_worker_info() -> None:
    """Make PyTorch's `get_worker_info` answer for each thread.

    It returns a global of its module. Users have imported the function by then, so another one in its place would
    not reach them; this one gets other code.
    """
    torch_worker._headrace_thread = _thread

    def get_worker_info() -> Any:
        return _headrace_thread.info or _worker_info  # type: ignore[name-defined]  # noqa: F821

    torch_worker.get_worker_info.__code__ = get_worker_info.__code__
