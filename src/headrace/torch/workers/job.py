"""What a worker does, be it a thread or a process: fetches the batch of each index that it is given.

A dataset that keeps state is asked for it after every `snapshot_every`-th batch. A worker that goes on from a
state loads the last of these and then makes, and drops, what was handed out since:

    batches    0   1   2   3   4          handed out: 0 to 3
    snapshot           ^                   -> load it, drop one batch, go on with 4
"""

import contextlib
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe, MapDataPipe, _DatasetKind
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _sharding_worker_init_fn
from torch.utils.data.graph_settings import apply_random_seed

from headrace.fork_lock import lock_that_forks_wait_for
from headrace.observe.counting import counted_as, now, spent
from headrace.torch.workers.collating import collate_for

BEGUN = -1
"""In place of a task's number: a worker could not begin."""


class Outcome(NamedTuple):
    """What became of one task. `state` is the worker's after it, if it keeps one and that was due, as at the end."""

    data: Any
    state: Any = None
    ended: bool = False
    """Whether the worker's iterable has no more; then there is no data."""


class WorkerResult(NamedTuple):
    """What became of a task, as it reaches the loader. A state may be pickled still."""

    worker: int
    epoch: int
    number: int
    data: Any = None
    state: Any = None
    ended: bool = False
    begun: bool = False
    """No task, but the beginning of an epoch, with the worker's state then, or an error instead."""


class Workers(Protocol):
    """Threads or processes: what the loader asks of them."""

    def send(self, worker: int, epoch: int, number: int, index: Any) -> None: ...

    def begin_again(self, epoch: int, following: "NextEpoch") -> None:
        """Another epoch, for all workers: what becomes of tasks that they have not done yet is dropped."""

    def stop(self, worker: int) -> None: ...

    def receive(self, timeout_seconds: float | None) -> list[WorkerResult]:
        """What has come, waiting for the first; nothing after so many seconds."""

    def waiting(self) -> int:
        """How many results there are at least that were not received."""

    def close(self) -> None: ...

    def pids(self) -> list[int | None]: ...

    def __iter__(self) -> Iterator[Any]:
        """Worker processes, for code that looks for them in `_workers` of PyTorch's iterator."""

    def __len__(self) -> int: ...

    def __getitem__(self, worker: int) -> Any: ...


class NextEpoch(NamedTuple):
    """What workers that stay are told of another epoch."""

    shared_seed: int | None
    dataset_epoch: int | None
    """The epoch of a dataset that counts them, in the loader's own process."""
    tell_state: bool
    """Whether they answer with the state that they begin with: their datasets are as the epoch before has left them."""


@dataclass(frozen=True)
class Resumed:
    """Where one worker goes on: its state, and the indices of what it must make again since then."""

    state: Any = None
    replay: Iterable[Any] = ()


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that workers are told when they start."""

    kind: int
    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    base_seed: int
    shared_seed: int | None
    init_fn: Callable[[int], Any] | None
    num_workers: int
    snapshot_every: int
    resumed: tuple[Resumed, ...] | None
    tell_begun: bool = False
    """Whether each worker says first that it has begun: the user's own function may fail."""

    def seed_of(self, worker: int) -> int:
        return self.base_seed + worker


def other_process(process: int) -> str:
    return (
        f"DataLoader: this iteration was started in process {process}, and its workers belong to that process; "
        "after a fork, start a new one with iter(loader)"
    )


def end_now(finalizer: "weakref.finalize[..., Any]") -> None:
    """What the finalizer would do, now. If Ctrl-C comes in the middle, the finalizer does it again; called directly,
    it would count as done from its first step on, and workers that were not told would stay for ever."""
    waiting = finalizer.peek()
    if waiting is not None:
        _, function, arguments, _ = waiting
        function(*arguments)
        finalizer.detach()


def is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def epoch_of_dataset(dataset: Any) -> int | None:
    """The epoch that a dataset is in, if each loop over it is another one, as with `headrace.stream`."""
    return dataset.epoch if getattr(dataset, "counts_epochs", False) else None


def is_iterable(kind: int) -> bool:
    return bool(kind == _DatasetKind.Iterable)


def is_pipe(dataset: Any) -> bool:
    return isinstance(dataset, IterDataPipe | MapDataPipe)


_pipes = lock_that_forks_wait_for()


def alone_with_pipes(dataset: Any) -> contextlib.AbstractContextManager[Any]:
    """For what looks into a data pipe or copies one: no other thread does, meanwhile.

    PyTorch finds the parts of a pipe by pickling it, with a hook that all pipes of the process share.
    """
    return _pipes if is_pipe(dataset) else contextlib.nullcontext()


def shard_pipe(init_fn: Callable[[int], Any] | None, world_size: int, rank: int, worker: int) -> None:
    """What a worker with a data pipe begins with: its share of it, and then the user's own function."""
    with _pipes:
        _sharding_worker_init_fn(None, world_size, rank, worker)
    if init_fn is not None:
        init_fn(worker)


class Fetching:
    """One worker's fetching. What goes wrong when it begins is the outcome of its first task."""

    def __init__(self, job: Job, worker: int, where: str) -> None:
        self._job, self._worker, self._where = job, worker, where
        self._dataset = job.dataset
        self._failure: ExceptionWrapper | None = None
        self.init_failure: ExceptionWrapper | None = None
        """What went wrong in the user's `worker_init_fn`."""
        self._stage = stage_of(job.dataset)
        self._made = 0
        self._ended = False
        try:
            if job.init_fn is not None:
                job.init_fn(worker)
        except Exception:
            self._failure = self.init_failure = ExceptionWrapper(where=where)
            return
        try:
            self._begin(job.shared_seed, job.resumed[worker] if job.resumed else None)
        except Exception:
            self._failure = ExceptionWrapper(where=where)

    def begin_again(self, following: NextEpoch) -> dict[str, Any] | None:
        """The next epoch, with the dataset as it is now. Gives its state, if it keeps one and that is wanted."""
        self._made, self._ended = 0, False
        try:
            if following.dataset_epoch is not None:
                self._dataset.set_epoch(following.dataset_epoch)
            self._begin(following.shared_seed, None)
            return self._snapshot() if following.tell_state else None
        except Exception:
            self._failure = ExceptionWrapper(where=self._where)
            return None

    def _begin(self, shared_seed: int | None, resumed: Resumed | None) -> None:
        if isinstance(self._dataset, IterDataPipe):
            generator = torch.Generator()
            generator.manual_seed(shared_seed)
            with alone_with_pipes(self._dataset):
                self._dataset = apply_random_seed(self._dataset, generator)
        self._fetcher = begin_fetching(self._job, self._dataset, resumed.state if resumed else None)
        for index in resumed.replay if resumed else ():
            try:
                self._fetcher.fetch(index)
            except StopIteration:
                break  # after the end, there is nothing to make again
            except Exception:
                continue  # what failed then fails again, and was passed by

    def fetch(self, index: Any) -> Outcome | None:
        """None after the end, which is told once."""
        if self._ended:
            return None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            return Outcome(failure)
        try:
            return self._fetch(index)
        except Exception:
            return Outcome(ExceptionWrapper(where=self._where))

    def _fetch(self, index: Any) -> Outcome:
        job = self._job
        try:
            with counted_as(self._stage):
                data = self._fetcher.fetch(index)
        except StopIteration:
            if not is_iterable(job.kind):
                raise
            state = self._snapshot() if job.snapshot_every else None
            self._ended = True
            return Outcome(None, state, ended=True)
        self._made += 1
        due = job.snapshot_every and self._made % job.snapshot_every == 0
        return Outcome(data, self._snapshot() if due else None)

    def _snapshot(self) -> dict[str, Any] | None:
        return snapshot(self._job.kind, self._fetcher, self._dataset)


def begin_fetching(job: Job, dataset: Any, state: Any) -> Any:
    """PyTorch's fetcher, at the place that the state tells."""
    if state is not None and state["dataset"] is not None:
        dataset.load_state_dict(state["dataset"])
    collate = collate_for(job.collate_fn)

    def counted(samples: Any) -> Any:
        begun = now()
        batch = collate(samples)
        spent("collate", begun)
        return batch

    fetcher = _DatasetKind.create_fetcher(job.kind, dataset, job.auto_collation, counted, job.drop_last)
    if state is not None and is_iterable(job.kind):
        if state["iterator"] is not None:
            fetcher.dataset_iter.load_state_dict(state["iterator"])
        fetcher.ended = state["ended"]
    return fetcher


def stage_of(dataset: Any) -> str:
    """What a dataset's own code is counted as: 'transform' if it counts its reading for itself, as streams do."""
    return "transform" if getattr(dataset, "counts_reads", False) else "read"


def snapshot(kind: int, fetcher: Any, dataset: Any) -> dict[str, Any] | None:
    """The state that a dataset and its iterator keep, or None if they keep none."""
    iterator = fetcher.dataset_iter if is_iterable(kind) else None
    own = dataset.state_dict() if dataset is not iterator and is_stateful(dataset) else None
    of_iterator = iterator.state_dict() if iterator is not None and is_stateful(iterator) else None
    if own is None and of_iterator is None:
        return None
    return {"dataset": own, "iterator": of_iterator, "ended": getattr(fetcher, "ended", False)}


def seed_this_process(job: Job, worker: int) -> None:
    """As PyTorch seeds a worker: `random`, NumPy and torch, each worker differently."""
    seed = job.seed_of(worker)
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(job.base_seed, worker))


def worker_info(job: Job, worker: int, **more: Any) -> Any:
    """PyTorch's own; `more` are fields that its newer versions have."""
    known = getattr(torch_worker.WorkerInfo, "__dataclass_fields__", {})
    more = {name: value for name, value in more.items() if name in known}
    return torch_worker.WorkerInfo(
        id=worker, num_workers=job.num_workers, seed=job.seed_of(worker), dataset=job.dataset, **more
    )
