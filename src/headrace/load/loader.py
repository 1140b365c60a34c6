"""The Loader: evaluates the stream ahead of the training step and hands over batches.

    loader = headrace.Loader("data", seq_len=2048, batch_size=32)
    for batch in loader:
        step(batch.tokens, batch.labels)

A Loader has a place in the stream, and `iter(loader)` always goes on from there, to the end of the current pass:
`epochs` epochs of the stream. After the last batch of a pass comes the first one of the next, whether or not the loop
has asked for more. A loop that is left early (`break`) is continued by the next one, exactly as a new process would
continue it from `state_dict()`. Evaluation, which wants the same batches each time, says `restart=True`.
"""

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self, Unpack

from headrace.errors import SettingsError
from headrace.load.agreement import check_that_ranks_agree
from headrace.load.batch import Batch
from headrace.load.delivery import Delivery
from headrace.load.fetched import fetched_from
from headrace.load.iteration import Iteration
from headrace.load.settings import LoaderOptions, LoaderSettings, parse_settings
from headrace.load.sources import Batches, BatchSource, FromProcesses, FromThreads, Order
from headrace.load.state import Place, choices_of, chosen_in, describe_stream, read_state
from headrace.load.world import find_world
from headrace.observe.advice import advise_loader
from headrace.observe.counting import Counted, now
from headrace.observe.stats import LoaderStats
from headrace.order.steps import Steps
from headrace.order.world import World
from headrace.public import public
from headrace.rows.mix import listed_weights
from headrace.rows.recipe import Recipe, make_recipe
from headrace.rows.rows import Rows
from headrace.rows.token_rows import PackingReport
from headrace.rows.transform import Per, Transform

_log = logging.getLogger(__name__)


class Loader(Counted):
    """Evaluates the stream of rows ahead of the training step and hands over batches.

    Args:
        data: A dataset, the path of one, `headrace.mix(...)`, or any object with `__len__` and `__getitem__`.
        batch_size: How many rows a batch has, on each rank. Required.
        seq_len: How many tokens a row has. Without it, the records of the data are the rows.
        seed: The seed of the order, of the packing, and of the random numbers passed to functions given to `map`; 0
            by default.
        shuffle: "global" (or True), "units", "block", "none" (or False), or a `headrace.Shuffle`. By default it is
            "global" for local data and "units" for remote data.
        epochs: How many epochs one iteration has, 1 by default; None never ends.
        restart: Whether every iteration starts at the beginning of the stream, as evaluation wants it. By default, an
            iteration goes on where the last one was left.
        drop_last: Whether an incomplete last batch is dropped, as it is by default.
        prefetch: How many batches are kept ready. By default this depends on their size; 0 creates each batch when
            the loop asks for it.
        workers: How many threads create batches. By default the Loader finds out how many of them help.
        timeout_seconds: How long one batch may take before an error is raised; 600 by default.
        fields: Which fields a batch has. By default all of them; each is computed ahead once the loop has used it.
        packing: How documents become rows: "best-fit" (the default), "windows" or "pad".
        overlong: What happens to documents longer than a row: "split" (the default), "truncate" or "drop".
        group_shards: Pack only within groups of this many shards, so that reads stay near each other.
        pack_within: "units" packs the documents of each unit by themselves, so that a row needs no other unit;
            "dataset" packs all documents together. By default it is "units" for remote data and shuffle="units".
        align_documents: Start each window with the first document that begins in it, if there is one.
        boundaries: With packing="windows", False ignores where documents end.
        token_field: The field that holds the tokens, if it is not called "tokens".
        labels: "shifted" (the next token, by default) or "unshifted" (the token itself, for models that shift).
        dtype: The type of tokens, labels and position ids: "int64" (the default) or "int32".
        pad_id: The token that fills the rest of a row, 0 by default.
        ignore_index: The label of positions that have no target, -100 by default.
        cu_seqlens: Whether the boundaries are those of the whole flattened "batch" (the default) or of each "row".
        max_documents: The number of documents that `cu_seqlens` has room for, so that its shape never changes.
        rank, world_size: The rank of this process, and the number of ranks. By default they are taken from
            torch.distributed or the environment.
        data_rank, data_world_size: The same for ranks that share their data, as in tensor parallelism.
        mesh, mesh_dim: A device mesh, and the dimension along which the data is split.
    """

    @public
    def __init__(
        self,
        data: Any,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        data_rank: int | None = None,
        data_world_size: int | None = None,
        mesh: Any = None,
        mesh_dim: str | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        given = parse_settings(dict(options))
        world = find_world(
            rank=rank,
            world_size=world_size,
            data_rank=data_rank,
            data_world_size=data_world_size,
            mesh=mesh,
            mesh_dim=mesh_dim,
        )
        self._set_up(data, given, world, make_recipe(data, given), FromThreads())

    def _set_up(
        self, data: Any, given: LoaderSettings, world: World, recipe: Recipe, source: BatchSource
    ) -> None:
        self._data, self._given, self.world = data, given, world
        """What the Loader was created with."""
        self._recipe: Recipe = recipe
        self.settings: LoaderSettings = replace(given, **chosen_in(recipe.settings))
        # Computed now, with the initial weights: changing the weights later does not change what an epoch is.
        _ = self._recipe.rows_per_epoch
        self._made_with = self._recipe
        self.source: BatchSource = source
        """Where batches come from."""
        self.delivery: Delivery = Delivery()
        """How batches reach the consumer; the adapter of a framework has its own."""
        self._used = self._recipe.used_fields()
        self._described: dict[str, Any] | None = None
        self._place = Place(0)
        self._latest: weakref.ref[Iteration] | None = None
        """The iteration that has handed out the last batch, or was started since."""
        self._jumps = 0
        """How often the Loader was brought to another place or stream: iterations from before no longer move it."""
        self._has_told = False
        self._has_compared = False
        self._fetched_before = fetched_from(self._recipe.data)
        """What others have fetched of the same data."""
        self._check_size()

    def _check_size(self) -> None:
        self._recipe.check_room_for_documents(self.settings.batch_size)
        rows, batch = self._rows_per_pass, self.settings.batch_size * self.world.size
        if self.settings.drop_last and rows is not None and rows < batch:
            ranks = f" on {self.world.size} ranks" if self.world.size > 1 else ""
            raise SettingsError(
                f"batch_size={self.settings.batch_size}{ranks} needs {batch} rows, but there are {rows}: the Loader "
                "would give no batch; use a smaller batch_size, more epochs, or drop_last=False"
            )

    # What it holds

    @property
    def rows_per_epoch(self) -> int:
        """Rows of one epoch, over all ranks; for a mixture, `stop` of `headrace.mix` decides where it ends."""
        return self._recipe.rows_per_epoch

    @property
    def rows(self) -> Rows:
        """The function behind this Loader: `loader.rows(positions)` gives the rows at any positions of the stream.

        Positions count rows of the global stream, over all ranks and epochs. The rows are NumPy arrays, in the order of
        the positions; functions given to `map` are applied. The function can be pickled and called anywhere, and does
        not affect the Loader.
        """
        return Rows(self._recipe, self.settings.batch_size, self.world.size)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0. After the last batch of an epoch, it is the next epoch."""
        return self._steps_from(self._place.position).start // self.rows_per_epoch

    @property
    def rows_seen(self) -> dict[str, int]:
        """How many rows of each source were handed out, over all ranks and epochs."""
        counts = self._recipe.stages.counts(self._place.position).tolist()
        return dict(zip(self._shown_names, counts, strict=True))

    @property
    def epochs_seen(self) -> dict[str, float]:
        """How many epochs of each source were handed out, over all ranks."""
        sizes = dict(zip(self._shown_names, self._recipe.stream.rows, strict=True))
        return {name: rows / sizes[name] for name, rows in self.rows_seen.items()}

    @property
    def _shown_names(self) -> list[str]:
        return [name or "data" for name in self._recipe.names]

    def report(self) -> PackingReport | dict[str, PackingReport]:
        """How many tokens one epoch uses, pads and cuts; a dict by source for a mixture."""
        reports = self._recipe.reports()
        return reports[""] if set(reports) == {""} else reports

    def stats(self) -> LoaderStats:
        """What each stage has spent so far, how long the loop waited, how full the queues were, what was fetched."""
        counted = super().stats()
        fetched = fetched_from(self._recipe.data).since(self._fetched_before)
        return replace(counted, fetched=counted.fetched.plus(fetched))

    def __len__(self) -> int:
        """How many batches the current iteration has on each rank; if there is none, the next one.

        Someone who counts batches should ask after `iter(loader)`: an iteration counts as current as long as it exists
        and has not ended, and one that was counted to its last batch has not.
        """
        running = self._running
        return _known(running.count if running is not None else self._steps_from(self._next_start).count)

    @property
    def batches_per_pass(self) -> int:
        """How many batches a whole iteration has on each rank, wherever the Loader is."""
        return _known(self._steps_from(0).count)

    def __bool__(self) -> bool:
        # The length does not decide, since it may be 0 or unknown.
        return True

    def __repr__(self) -> str:
        kind = f"rows of {self.settings.seq_len} tokens" if self.settings.seq_len else "records"
        return (
            f"Loader({self.rows_per_epoch:,} {kind} per epoch, batches of {self.settings.batch_size}, "
            f"rank {self.world.rank} of {self.world.size})"
        )

    # Iterating

    @property
    def _rows_per_pass(self) -> int | None:
        return None if self.settings.epochs is None else self.settings.epochs * self.rows_per_epoch

    def _steps_from(self, start: int) -> Steps:
        """The batches from a position to the end of its pass, or those of the next pass if this one has none left."""
        rows = self._rows_per_pass
        if rows is None:
            return self._steps(start, None)
        stop = (start // rows + 1) * rows
        steps = self._steps(start, stop)
        return steps if steps.count else self._steps(stop, stop + rows)

    def _steps(self, start: int, stop: int | None) -> Steps:
        return Steps(
            start=start,
            stop=stop,
            batch_size=self.settings.batch_size,
            world=self.world,
            drop_last=self.settings.drop_last,
            by_lane=self._recipe.by_lane,
        )

    def __iter__(self) -> Iterator[Batch]:
        advise_loader(self)
        self._compare_ranks()
        self._tell_if_continued()
        # A new object, because an older iteration may go on, from its own place.
        self._place = Place(self._next_start)
        begun = now()
        iteration = Iteration(self)
        iteration.check_batch_functions()
        self.counters.add("start", begun, now())
        self._latest = weakref.ref(iteration)
        return iteration

    def _compare_ranks(self) -> None:
        """Make sure, once and after every state, that all ranks load the same rows from the same place."""
        if self._has_compared or self.world.size == 1:
            return
        names = ("batch_size", "epochs", "drop_last", "restart")
        settings = {name: getattr(self.settings, name) for name in names}
        check_that_ranks_agree(self.world, {**self.state_dict(), **settings})
        self._has_compared = True

    def _tell_if_continued(self) -> None:
        """Say it once when a loop does not start with the first batch of a pass, in case someone expects that."""
        position, rows = self._next_start, self._rows_per_pass
        is_between_passes = position == 0 or (rows is not None and position % rows == 0)
        if is_between_passes or self._place.loaded or self._has_told:
            return
        self._has_told = True
        _log.warning(
            "this loop starts with row %d of the stream, because the rows before it were handed out already. If every "
            "loop should see the same batches, as in evaluation, create the Loader with restart=True",
            position,
        )

    @property
    def _next_start(self) -> int:
        """The position that `iter()` starts from."""
        restarts = self.settings.restart and not self._place.loaded
        return 0 if restarts else self._place.position

    @property
    def _running(self) -> Iteration | None:
        """The latest iteration, if someone still has it and it has not ended."""
        latest = self._latest() if self._latest is not None else None
        return latest if latest is not None and latest.is_running else None

    def _start(self, steps: Steps) -> Batches:
        """Start making the batches of some steps, and delivering them to the consumer."""
        order = Order(self._recipe, self.settings, steps, self._used, self.delivery.allocate, self.counters)
        return self.delivery.deliver(self.source.start(order))

    def start_with_pass(self, number: int) -> None:
        """Start with a later pass, unless the Loader has handed out batches, or has loaded a state.

        For trainers that, after whole epochs, do not load a state but only tell how many epochs there were. They may
        have started their iteration by then.
        """
        rows = self._rows_per_pass
        if rows is None or number == 0 or self._place != Place(0):
            return
        self._place.position = number * rows
        if (running := self._running) is not None:
            running.go_on_from_here()

    def from_the_beginning(self, settings: LoaderSettings, world: World) -> Self:
        """A copy at the beginning of the stream, for another rank or with settings that do not affect the rows."""
        other = copy.copy(self)
        other.settings, other.world = settings, world
        other._place, other._latest = Place(0), None
        return other

    def __getstate__(self) -> dict[str, Any]:
        fetched = fetched_from(self._recipe.data)
        return {**self.__dict__, "_latest": None, "_counted": None, "_fetched_before": fetched}

    # Transforms and weights

    @public
    def map(self, function: Callable[..., Any], *, per: str = "sample", processes: int = 0) -> Self:
        """A copy of the Loader that applies a function to every sample or batch: it takes and returns a dict of fields.

        A function with two parameters also gets a NumPy random generator, which depends only on the seed, the epoch
        and the row. Functions run in the Loader's threads, or in as many worker processes as `processes` says.
        """
        try:
            how = Per(per)
        except ValueError:
            raise SettingsError(f"per={per!r}: must be 'sample' or 'batch'") from None
        if type(processes) is not int or processes < 0:
            raise SettingsError(f"processes={processes!r}: must be 0 (use threads) or a number of processes")
        other = copy.copy(self)
        other._recipe = self._recipe.changed(transforms=(*self._recipe.transforms, Transform(function, how)))
        processes = max(processes, self.source.processes)
        other.source = FromProcesses(processes) if processes else FromThreads()
        other._place, other._latest = copy.copy(self._place), None
        other._used = other._recipe.used_fields()
        return other

    @public
    def reweight(self, weights: Mapping[str, float]) -> None:
        """Change the weights of a mixture from the next row on. No row of any source is lost or repeated.

        An iteration that is under way continues with the new weights; a new one starts here. Stages that would begin
        later are dropped. All ranks must call this after the same step.
        """
        if len(self._recipe.names) == 1:
            raise SettingsError("reweight(): the data is not a mixture; make one with headrace.mix")
        here = self._place.position
        stages = self._recipe.stages.until(here).then(here, listed_weights(self._recipe.names, weights))
        self._recipe, self._described = self._recipe.changed(stages=stages), None
        self._jumps += 1
        if (running := self._running) is not None:
            running.go_on_from_here()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream after the last batch that was handed out. It can be stored as JSON."""
        if self._described is None:
            self._described = describe_stream(self._made_with)
            if self._recipe.stages is not self._made_with.stages:
                self._described["reweighted"] = self._recipe.stages.to_json_with_counts()
        position, rows = self._place.position, self._rows_per_pass
        return {**self._described, "position": position, "pass": 0 if rows is None else position // rows}

    @public
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the next row, whatever the world size, batch size or number of workers was."""
        recipe = self._recipe_for(state)
        position, stages = read_state(state, recipe)
        self._adopt(recipe)
        if not self._recipe.known_by_content:
            _log.warning(
                "the data has no `fingerprint`, so it cannot be checked that it is the same as when the state was saved"
            )
        if len(self._recipe.names) > 1:
            self._recipe = self._recipe.changed(stages=stages)
        self._jumps += 1
        self._has_compared = False
        self._place, self._latest, self._described = Place(position, loaded=True), None, None

    def _recipe_for(self, state: Any) -> Recipe:
        """The recipe that this Loader was created with; where its settings leave a choice, with that of the state."""
        choices = choices_of(state, self._given)
        here = chosen_in(self.settings)
        if {**here, **choices} == here:
            return self._made_with
        return make_recipe(self._data, replace(self._given, **choices))

    def _adopt(self, recipe: Recipe) -> None:
        if recipe is self._made_with:
            return
        self._made_with = recipe
        self._recipe = recipe.changed(transforms=self._recipe.transforms)
        self._fetched_before = fetched_from(self._recipe.data)
        self.settings = replace(self.settings, **chosen_in(recipe.settings))
        self._check_size()


def _known(count: int | None) -> int:
    if count is None:
        raise TypeError("a Loader with epochs=None has no length: it never ends")
    return count
