"""One iteration of a DataLoader: what all iterators share, and the one that makes batches in the loop's own thread.

PyTorch's base class starts the sampler, draws the seed of the workers, warns about wrong lengths, and reports itself to
the profiler.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from typing import Any, NoReturn

from torch.autograd import _profiler_enabled
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.graph_settings import apply_sharding

from headrace.observe.advice import LOOK_EVERY, watch_cpu
from headrace.observe.counting import Watch, counted_as
from headrace.torch.progress import EpochEnd, HandedOut, IterationProgress
from headrace.torch.random_states import Randomness, RandomStates
from headrace.torch.sampling import (
    Draws,
    epoch_of,
    go_back_to_epoch,
    load_sampler,
    set_epoch,
    state_of_sampler,
)
from headrace.torch.state_check import keeps_worker_state, settings_of
from headrace.torch.workers.job import (
    Job,
    Resumed,
    alone_with_pipes,
    begin_fetching,
    epoch_of_dataset,
    is_iterable,
    is_pipe,
    is_stateful,
    shard_pipe,
    snapshot,
    stage_of,
)
from headrace.torch.workers.pinning import pin


class WorkerKind(StrEnum):
    PROCESS = "process"
    THREAD = "thread"


class LoaderIterator(_BaseDataLoaderIter):  # type: ignore[misc]
    """What both kinds of iterators share: they start from a state, and keep one."""

    progress: IterationProgress
    _base_seed: Any
    _draws: Draws
    _first_drawn: tuple[RandomStates, RandomStates]
    """Random states before and after a sampler was resumed."""

    def _begin(self, loader: Any, state: dict[str, Any] | None, every: int) -> dict[int, Any]:
        """Called in place of a constructor. Returns the indices of the batches that must be made again, by number."""
        self._every = every
        self._watch = Watch(loader.counters)
        self._randomness = Randomness(loader.generator, loader._index_sampler, loader._private_random)
        if state is None:
            self._begin_afresh(loader)
            indices: dict[int, Any] = {}
        else:
            indices = self._begin_from(loader, state)
        self.progress.settings = settings_of(loader)
        return indices

    def _begin_afresh(self, loader: Any) -> None:
        states = self._randomness.now()
        sampler = state_of_sampler(loader._index_sampler)
        with self._randomness.private():
            with alone_with_pipes(loader.dataset):
                super().__init__(loader)
            if self._num_workers:
                self._begin_again(loader)
            self._start_epoch(states, self._base_seed, sampler)
            self._draw_privately()
        self.progress.begun_twice = self._num_workers > 0

    def _draw_privately(self) -> None:
        """With random states of the loader's own, a sampler draws from them before the process gets its own back."""
        if self._randomness.is_private and not is_iterable(self._dataset_kind):
            self._draws.is_at_end()

    def _begin_from(self, loader: Any, state: dict[str, Any]) -> dict[int, Any]:
        if state["finished"]:
            # Only what must be made again belongs to the epoch of the state. The next one may have been set already.
            next_epoch = epoch_of(loader._index_sampler)
            set_epoch(loader._index_sampler, state["epoch"])
            indices = self._go_on_from(loader, state)
            set_epoch(loader._index_sampler, next_epoch)
            return indices
        go_back_to_epoch(loader._index_sampler, state["epoch"])
        if state["sampler"]["state"] is None:
            load_sampler(loader._index_sampler, state["sampler_at_begin"])
        return self._go_on_from(loader, state)

    def _go_on_from(self, loader: Any, state: dict[str, Any]) -> dict[int, Any]:
        if state["dataset_epoch"] is not None and epoch_of_dataset(loader.dataset) is not None:
            loader.dataset.set_epoch(state["dataset_epoch"])
        states = RandomStates.from_json(state["random"])
        with self._randomness.as_then(states):
            with alone_with_pipes(loader.dataset):
                super().__init__(loader)
            if not state["seeded_first"]:
                # In that run the sampler began without a seed being drawn.
                self._randomness.set_generators(states)
                states.set_global()
                self._sampler_iter = iter(self._index_sampler)
            elif state["begun_twice"]:
                self._begin_again(loader)
            self._base_seed, self._shared_seed = state["base_seed"], state["shared_seed"]
            self._start_epoch(states, self._base_seed, state["sampler_at_begin"])
            before = self._randomness.of_process()
            indices = self._indices_again(state)
            self._first_drawn = (before, self._randomness.of_process())
        self.progress.go_on_from(state)
        self._num_yielded, self._IterableDataset_len_called = state["yielded"], state["len_called"]
        return indices

    def _indices_again(self, state: dict[str, Any]) -> dict[int, Any]:
        """Bring the sampler to its place. Returns the indices that it gave before and that are needed again."""
        numbers = [each["since"] for each in state["workers"] if isinstance(each["since"], list)]
        wanted = set(state["missing"]).union(*numbers)
        if is_iterable(self._dataset_kind) or (state["finished"] and not wanted):
            return {}
        return self._draws.resume(state["sampler"], state["upto"], wanted)

    def _begin_again(self, loader: Any) -> None:
        """Start the sampler twice, as PyTorch does when workers start, because a sampler may draw or count each time.

        The shared seed is also drawn again, although the workers start with the first one.
        """
        seed = self._shared_seed
        LoaderIterator._reset(self, loader, first_iter=True)
        self._shared_seed = seed

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        with alone_with_pipes(loader.dataset):
            super()._reset(loader, first_iter)

    def _start_epoch(self, states: RandomStates, base_seed: int, sampler: Any) -> None:
        """`sampler` is the state that the sampler began with, if it keeps one."""
        self._draws = Draws(self._index_sampler, self._sampler_iter, self._every)
        self._sampler_iter = self._draws
        self.progress = IterationProgress(self._index_sampler, self._draws, states, base_seed)
        self.progress.sampler_at_begin = sampler
        self.progress.num_workers, self.progress.shared_seed = self._num_workers, self._shared_seed
        self.progress.dataset_epoch = epoch_of_dataset(self._dataset)
        self.progress.len_called = self._IterableDataset_len_called
        self.progress.iterable = is_iterable(self._dataset_kind)

    def __next__(self) -> Any:
        with self._watch:
            return self._next()

    def _next(self) -> Any:
        progress = self.progress
        before = progress.place
        try:
            if self._IterableDataset_len_called is not None or _profiler_enabled():
                # PyTorch warns if there are more batches than announced, and names itself in the profile.
                return super().__next__()
            data = self._next_data()
            self._num_yielded += 1
            if not self._num_yielded % LOOK_EVERY:
                watch_cpu.look()
            return data
        except Exception:
            raise
        except BaseException:
            # Ctrl-C may have lost a batch on its way to the loop, or half of a worker's message.
            progress.place = before
            self._interrupt()
            raise

    def _interrupt(self) -> None:
        """Called if Ctrl-C came while a batch was being made or handed out."""

    def end_epoch(self) -> None:
        """Called when all batches are handed out."""
        self._finish()

    def _finish(self, dataset: Any = None) -> None:
        if self.progress.end is None:
            random = self._randomness.now().as_json
            self.progress.end = EpochEnd(random, state_of_sampler(self._index_sampler), dataset)


class AtOnce(LoaderIterator):
    """`num_workers=0`: each batch is made when it is asked for."""

    def __init__(self, loader: Any, state: dict[str, Any] | None) -> None:
        if loader.timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        indices = self._begin(loader, state, every=0)
        self._again = [
            (number, indices[number]) for number in sorted(self.progress.place.missing, reverse=True)
        ]
        """Batches that were not handed out according to the state, the first one last."""
        if is_pipe(self._dataset):
            with alone_with_pipes(self._dataset):
                apply_sharding(self._dataset, self._world_size, self._rank)
        worker = _own_worker(state)
        job = make_job(self, loader)
        fetcher = begin_fetching(job, self._dataset, worker["state"])
        loader.counters.workers = 0
        self._stage, self._fetch_plain = stage_of(self._dataset), fetcher.fetch
        if state is not None and not state["upto"]:
            # A dataset may have reset the process's random state to what it was before the sampler's first draw.
            self._randomness.follow(*self._first_drawn)
        self._own: _OwnState | None = None
        self._held: Callable[[], Any] | None = None
        """Gives a batch that was made to see whether there is one, or raises the error that came instead."""
        for turn in self._turns_again(worker["since"], indices):
            try:
                self._fetch_plain(turn)
            except StopIteration:
                break  # after the end, there is nothing to make again
            except Exception:
                continue  # what failed the first time fails again, and the loop has already skipped it
        if keeps_worker_state(loader):
            ask = partial(snapshot, job.kind, fetcher, self._dataset)
            self._own = _OwnState(ask, self._dataset, job.snapshot_every, self.progress, self._draws)
            self.progress.ask_worker = self._own.to_json

    def _fetch(self, index: Any) -> Any:
        with counted_as(self._stage):
            return self._fetch_plain(index)

    def _turns_again(self, since: int | list[int], indices: dict[int, Any]) -> Iterator[Any]:
        """The indices of the batches that must be made again to bring a dataset from its state to its place."""
        if isinstance(since, list):
            yield from (indices[number] for number in since)
            return
        yield from itertools.islice(self._draws, since)
        if self.progress.iterable:
            # For an iterable, turns count from its state.
            self.progress.place = self.progress.place._replace(upto=self._draws.drawn)

    def _next_data(self) -> Any:
        if self._again:
            return self._make_again(*self._again.pop())
        progress, draws = self.progress, self._draws
        yielded, upto, missing, next_worker, workers = progress.place
        try:
            if self._held is not None:
                held, self._held = self._held, None
                data = held()
            else:
                if upto != draws.drawn:
                    # The loop goes on after an error, so the failed batch counts as skipped.
                    progress.place = HandedOut(yielded, draws.drawn, missing, next_worker, workers)
                data = self._fetch(next(draws))
        except StopIteration:
            self.end_epoch()
            raise
        if self._pin_memory:
            data = pin(data, self._pin_memory_device)
        if self._own is not None:
            self._own.made(draws.drawn)
        progress.place = HandedOut(yielded + 1, draws.drawn)
        return data

    def is_over(self) -> bool:
        """Whether nothing is left to hand out, asked before anything is. The next batch may be made, and kept."""
        if self._again:
            return False
        if not self.progress.iterable:
            return self._draws.is_at_end()
        try:
            data = self._fetch(next(self._draws))
        except StopIteration:
            return True
        except Exception as error:
            self._held = partial(_raise, error)
        else:
            self._held = lambda: data
        return False

    def end_epoch(self) -> None:
        self._finish(None if self._own is None else self._own.end())

    def _make_again(self, number: int, index: Any) -> Any:
        data = self._fetch(index)
        if self._pin_memory:
            data = pin(data, self._pin_memory_device)
        self.progress.hand(number, 0, None)
        return data


def _raise(error: Exception) -> NoReturn:
    raise error


def _own_worker(state: dict[str, Any] | None) -> dict[str, Any]:
    """The dataset's part of a state, and how many batches were handed out since; the beginning if there is none."""
    if state is None or not state["workers"]:
        return {"state": None, "since": 0}
    own: dict[str, Any] = state["workers"][0]
    return own


class _OwnState:
    """The state of a dataset in the loop's own thread, which is never ahead of the loop.

    It can be asked for at any time, except in the middle of a batch that failed or was interrupted. So it is also asked
    for after every `every` batches, like that of a worker.
    """

    def __init__(
        self, ask: Callable[[], Any], dataset: Any, every: int, progress: IterationProgress, draws: Draws
    ) -> None:
        self._ask, self._dataset, self._every = ask, dataset, every
        self._progress, self._draws = progress, draws
        self._iterable = progress.iterable
        self._last = (copy.deepcopy(ask()), draws.drawn)
        """The last state, and how many batches were drawn before it."""

    def made(self, drawn: int) -> None:
        if self._every and drawn % self._every == 0:
            self._last = (copy.deepcopy(self._ask()), drawn)

    def end(self) -> Any:
        """The state that the dataset itself has at the end of an epoch, and begins the next one with."""
        self._last = (copy.deepcopy(self._ask()), self._progress.place.upto)
        return copy.deepcopy(self._dataset.state_dict()) if is_stateful(self._dataset) else None

    def to_json(self) -> dict[str, Any]:
        upto = self._progress.place.upto
        state, at = self._last
        if upto == self._draws.drawn:
            state, at = copy.deepcopy(self._ask()), upto
        if not self._iterable:
            return {"state": state, "since": list(range(at, upto))}
        return {"state": state, "since": upto if state is None else upto - at}


def make_job(iterator: Any, loader: Any, resumed: tuple[Resumed, ...] | None = None) -> Job:
    init_fn: Callable[[int], Any] | None = loader.worker_init_fn
    dataset = iterator._dataset
    if is_pipe(dataset):
        init_fn = partial(shard_pipe, init_fn, iterator._world_size, iterator._rank)
    return Job(
        kind=loader._dataset_kind,
        dataset=dataset,
        auto_collation=loader._auto_collation,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        base_seed=iterator._base_seed,
        shared_seed=iterator._shared_seed,
        init_fn=init_fn,
        num_workers=loader.num_workers,
        snapshot_every=loader.snapshot_every_n_steps or 0 if keeps_worker_state(loader) else 0,
        resumed=resumed,
        tell_begun=loader.num_workers > 0 and loader.worker_init_fn is not None,
    )
