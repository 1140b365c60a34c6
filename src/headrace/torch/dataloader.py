"""A replacement for `torch.utils.data.DataLoader` that needs only another import.

    from headrace.torch import DataLoader

    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=4)
    for batch in loader: ...
    state = loader.state_dict()          # later, in another process: loader.load_state_dict(state)

Arguments, checks, errors and warnings are PyTorch's own, because this is a subclass. What differs is how batches are
made: see `iterators.py`, and `from_workers.py` with `workers/` for batches that are made by workers.
"""

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data import Dataset, Sampler

from headrace.errors import SettingsError
from headrace.observe.counting import Counted, now
from headrace.public import public
from headrace.store.remote_address import redacted
from headrace.torch.advice import advise_dataloader
from headrace.torch.from_workers import FromWorkers
from headrace.torch.iterators import AtOnce, WorkerKind
from headrace.torch.progress import IterationProgress
from headrace.torch.random_states import PrivateRandom, Randomness, RandomStates
from headrace.torch.sampling import load_sampler
from headrace.torch.state_check import check_state
from headrace.torch.trainers import caller_counts_batches
from headrace.torch.workers.job import alone_with_pipes, epoch_of_dataset, is_stateful

T_co = TypeVar("T_co", covariant=True)


class DataLoader(Counted, torch.utils.data.DataLoader[T_co]):  # type: ignore[misc]
    """PyTorch's DataLoader, with exact states, reused shared memory, and nothing left behind when something dies.

    All arguments are PyTorch's, with the same meaning, except `snapshot_every_n_steps` and `worker_kind`.

    Args:
        dataset: A map-style or an iterable dataset.
        batch_size: How many samples a batch has; None hands out single samples.
        shuffle: Whether each epoch has a new random order.
        sampler: Gives the indices of samples, instead of `shuffle`.
        batch_sampler: Gives lists of indices, instead of `batch_size`, `shuffle`, `sampler` and `drop_last`.
        num_workers: How many workers make batches in the background; 0 makes them in the loop.
        collate_fn: Makes a batch from a list of samples.
        pin_memory: Copy tensors to page-locked memory before handing them out.
        drop_last: Drop the last batch if it is incomplete.
        timeout: How many seconds a batch from a worker may take; 0 means no limit.
        worker_init_fn: Called in each worker with its number when it starts.
        multiprocessing_context: How worker processes start: "fork", "spawn" or "forkserver".
        generator: The random generator of the order.
        prefetch_factor: How many batches each worker makes ahead (2 by default).
        persistent_workers: Keep the workers from one epoch to the next.
        pin_memory_device: The device that memory is pinned for.
        in_order: Whether batches come in the order of their indices.
        snapshot_every_n_steps: How often a dataset that keeps state in the workers is asked for it. A resumed run
            continues from the last of these states, and makes again what was handed out since.
        worker_kind: What the workers are: "process", or "thread" for datasets that release the interpreter's lock.
            `workers` is accepted as another name for it.
    """

    _pending: dict[str, Any] | None = None
    """A state from which the next iteration continues."""
    _ready: Any = None
    """An iterator that was started to get its state, and that no loop has taken yet."""
    _iterator: Any
    _progress: IterationProgress | None = None
    """The progress of the latest iteration."""
    _private_random: PrivateRandom | None = None
    """What the orders of epochs are drawn from, once a state was loaded."""
    _counts_batches = False
    """Whether the consumer stops after the last batch, and never asks for one more."""

    @public
    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        worker_kind: str = "process",
        workers: str | None = None,
    ) -> None:
        if isinstance(dataset, str | os.PathLike):
            place = redacted(os.fspath(dataset))
            raise SettingsError(
                f"dataset={place!r}: must be a dataset, not the place of one; give headrace.open({place!r})"
            )
        self.worker_kind = _kind_of_workers(worker_kind, workers)
        if snapshot_every_n_steps is not None and snapshot_every_n_steps < 0:
            raise SettingsError(f"snapshot_every_n_steps={snapshot_every_n_steps}: must be at least 0")
        if self.worker_kind is WorkerKind.THREAD and multiprocessing_context is not None:
            raise SettingsError(
                "multiprocessing_context: has no effect on threads; leave it out, or use worker_kind='process'"
            )
        self.snapshot_every_n_steps = snapshot_every_n_steps
        with alone_with_pipes(dataset):
            super().__init__(
                dataset,
                batch_size,
                shuffle,
                sampler,
                batch_sampler,
                num_workers,
                collate_fn,
                pin_memory,
                drop_last,
                timeout,
                worker_init_fn,
                multiprocessing_context,
                generator,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                pin_memory_device=pin_memory_device,
                in_order=in_order,
            )

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles start their own iterations, as with PyTorch."""
        kept = {
            name: value
            for name, value in vars(self).items()
            if name not in ("_progress", "_ready", "_counted")
        }
        if self._private_random is not None:
            kept["_private_random"] = copy.copy(self._private_random)
        return kept

    def check_worker_number_rationality(self) -> None:
        # More threads than cores are useful if they wait for a network or a disk.
        if self.worker_kind is WorkerKind.PROCESS:
            super().check_worker_number_rationality()

    def __iter__(self) -> Any:
        advise_dataloader(self)
        if self._ready is not None:
            iterator, self._ready = self._ready, None
            return iterator
        begun = now()
        persistent = self.persistent_workers and self.num_workers > 0
        if persistent and self._iterator is not None and not self._iterator.closed:
            # If this is interrupted, the workers may have received only some of the messages.
            iterator, self._iterator = self._iterator, None
            iterator._reset(self)
        else:
            iterator = self._get_iterator()
        self._iterator = iterator if persistent else None
        self._progress, self._pending = iterator.progress, None
        self.counters.add("start", begun, now())
        return iterator

    def _get_iterator(self) -> Any:
        state = self._pending
        if self.num_workers:
            self.check_worker_number_rationality()
        if state is None:
            return self._new_iterator(None)
        if state["finished"]:
            return self._begin_after(state)
        iterator = self._new_iterator(state)
        if self._counts_batches and (state["yielded"] or state["upto"]) and iterator.is_over():
            # All batches of that epoch were handed out, and nobody will ask for more.
            iterator.end_epoch()
            if not self.persistent_workers:
                return self._new_iterator(None)
            iterator._reset(self)
        return iterator

    def _new_iterator(self, state: dict[str, Any] | None) -> AtOnce | FromWorkers:
        return AtOnce(self, state) if self.num_workers == 0 else FromWorkers(self, state)

    def _begin_after(self, state: dict[str, Any]) -> Any:
        """Begin the epoch after a finished one, as it would have begun without the interruption."""
        if not self.persistent_workers:
            self._go_on_from_end(state)
            return self._new_iterator(None)
        # Reused workers continue with the dataset as the previous epoch has left it.
        iterator = self._new_iterator(state)
        self._go_on_from_end(state)
        iterator._reset(self)
        return iterator

    def _go_on_from_end(self, state: dict[str, Any]) -> None:
        """Bring everything that an epoch depends on to where the epoch before has left it."""
        states = RandomStates.from_json(state["random_at_end"])
        randomness = Randomness(self.generator, self._index_sampler, self._private_random)
        randomness.set_generators(states)
        randomness.keep(states)
        load_sampler(self._index_sampler, state["sampler_at_end"])
        if state["dataset_epoch"] is not None and epoch_of_dataset(self.dataset) is not None:
            self.dataset.set_epoch(state["dataset_epoch"] + 1)
        if state["dataset_at_end"] is not None and is_stateful(self.dataset):
            self.dataset.load_state_dict(copy.deepcopy(state["dataset_at_end"]))

    def state_dict(self) -> dict[str, Any]:
        """The exact place of the latest iteration, after the last batch that was handed out."""
        if self._pending is not None:
            return self._pending
        if self._progress is None:
            self._ready = iter(self)
        progress = self._progress
        return {} if progress is None else progress.state_dict()

    @public
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the very next batch in the next iteration.

        If the state was saved inside the loop after its last batch, that iteration has no batches, and the one after it
        is the next epoch. Raises StateError if this loader cannot continue exactly from that state.
        """
        check_state(self, state_dict)
        self._counts_batches = caller_counts_batches()
        self._ready = self._iterator = self._progress = None
        self._pending, self._private_random = state_dict, PrivateRandom()


def _kind_of_workers(worker_kind: str, workers: str | None) -> WorkerKind:
    """`workers` is another name for `worker_kind`."""
    name, given = ("worker_kind", worker_kind) if workers is None else ("workers", workers)
    if name == "workers" and worker_kind not in (WorkerKind.PROCESS, given):
        raise SettingsError(f"workers={workers!r} and worker_kind={worker_kind!r}: give only worker_kind")
    try:
        return WorkerKind(given)
    except ValueError:
        hint = "; num_workers says how many there are" if isinstance(given, int) else ""
        raise SettingsError(f"{name}={given!r}: must be 'process' or 'thread'{hint}") from None
