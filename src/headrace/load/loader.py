"""The Loader: evaluates the stream ahead of the training step and hands over batches.

    loader = headrace.Loader("data", seq_len=2048, batch_size=32)
    for batch in loader:
        step(batch.tokens, batch.labels)

Each iteration is one pass: `epochs` epochs of the stream, the next pass going on where the last one ended. A loop that
is left early (`break`) and started again begins where that one began: at the start of the pass, or at the state
that was loaded.
"""

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, Unpack

from headrace.errors import SettingsError
from headrace.load.batch import Batch, BatchInfo
from headrace.load.delivery import Delivery
from headrace.load.settings import LoaderOptions, LoaderSettings, parse_settings
from headrace.load.sources import Batches, BatchSource, FromProcesses, FromThreads, Order
from headrace.load.state import Place, describe_stream, read_state
from headrace.load.world import find_world
from headrace.observe.advice import LOOK_EVERY, advise_loader, watch_cpu
from headrace.observe.counting import Counted, Watch, now
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
        batch_size: How many rows a batch has, on each rank.
        seq_len: How many tokens a row has. Without it, the records of the data are the rows.
        seed: The seed of the order, of the packing, and of the random numbers that functions of `map` get.
        shuffle: "global", "block", "none", or a `headrace.Shuffle`.
        epochs: How many epochs one iteration has; None goes on for ever.
        drop_last: Whether an incomplete last batch is dropped.
        prefetch: How many batches wait ready. By default this depends on their size; 0 makes each batch when it is
            asked for.
        workers: How many threads make batches. By default the Loader finds out how many help.
        timeout_seconds: How long one batch may take before an error is raised.
        fields: Which fields a batch has. By default all of them, each computed once the loop has used it.
        packing: How documents become rows: "best-fit", "windows" or "pad".
        overlong: What happens to documents that are longer than a row: "split", "truncate" or "drop".
        group_shards: Pack within groups of so many shards, where reads should stay near each other.
        align_documents: Let each window begin with a document, where one starts in it.
        boundaries: False ignores where documents end, with packing="windows".
        token_field: The field that holds the tokens, if it is not called "tokens".
        labels: "shifted" (the next token) or "unshifted" (the token itself, for models that shift).
        dtype: The type of tokens, labels and position ids: "int64" or "int32".
        pad_id: The token that fills the rest of a row.
        ignore_index: The label of places that have none.
        cu_seqlens: Whether boundaries are those of the whole "batch", flattened, or of each "row".
        max_documents: A fixed number of documents that `cu_seqlens` has room for, so that its shape never changes.
        rank, world_size: Which of how many ranks this is. By default torch.distributed or the environment tells.
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
        self.settings: LoaderSettings = parse_settings(dict(options))
        self.world: World = find_world(
            rank=rank,
            world_size=world_size,
            data_rank=data_rank,
            data_world_size=data_world_size,
            mesh=mesh,
            mesh_dim=mesh_dim,
        )
        self._recipe: Recipe = make_recipe(data, self.settings)
        # Now, with the weights it begins with: what an epoch is does not change when they do.
        _ = self._recipe.rows_per_epoch
        self._made_with = self._recipe
        self.source: BatchSource = FromThreads()
        """Where batches come from."""
        self.delivery: Delivery = Delivery()
        """How they reach the consumer; a framework's adapter has its own."""
        self._used = self._recipe.used_fields()
        self._described: dict[str, Any] | None = None
        self._place = Place(0, 0)
        self._begins = 0
        """Where the next iteration begins, unless the one before it comes to its end."""
        self._latest: weakref.ref[_Iteration] | None = None
        self._check_size()

    def _check_size(self) -> None:
        rows, batch = self._rows_per_pass, self.settings.batch_size * self.world.size
        if self.settings.drop_last and rows is not None and rows < batch:
            ranks = f" on {self.world.size} ranks" if self.world.size > 1 else ""
            raise SettingsError(
                f"batch_size={self.settings.batch_size}{ranks} needs {batch} rows, and there are {rows}: nothing would "
                "come; give a smaller batch_size, more epochs, or drop_last=False"
            )

    # What it holds

    @property
    def rows_per_epoch(self) -> int:
        """Rows of one epoch, over all ranks. Of a mixture: until a source would repeat one, or all are through."""
        return self._recipe.rows_per_epoch

    @property
    def rows(self) -> Rows:
        """The function behind this Loader: `loader.rows(positions)` gives the rows at any positions of the stream.

        Positions count rows of the global stream, over all ranks and epochs. Gives NumPy arrays, in the order asked
        for; functions given to `map` apply. It can be pickled and called anywhere, and changes nothing here.
        """
        return Rows(self._recipe, self.settings.batch_size)

    @property
    def epoch(self) -> int:
        """The epoch of the row that comes next, from 0 on; at the end of a pass that is not over, its last one."""
        epoch = self._place.position // self.rows_per_epoch
        if self.settings.epochs is None:
            return epoch
        return min(epoch, (self._place.passes + 1) * self.settings.epochs - 1)

    @property
    def rows_seen(self) -> dict[str, int]:
        """How many rows of each source were handed out, over all ranks and epochs; divide by its rows for epochs."""
        counts = self._recipe.stages.counts(self._place.position).tolist()
        return dict(zip(self._shown_names, counts, strict=True))

    @property
    def epochs_seen(self) -> dict[str, float]:
        """The same, in epochs of each source."""
        sizes = dict(zip(self._shown_names, self._recipe.stream.rows, strict=True))
        return {name: rows / sizes[name] for name, rows in self.rows_seen.items()}

    @property
    def _shown_names(self) -> list[str]:
        return [name or "data" for name in self._recipe.names]

    def report(self) -> PackingReport | dict[str, PackingReport]:
        """Tokens used, padded and cut in one epoch; by source for a mixture."""
        reports = self._recipe.reports()
        return reports[""] if set(reports) == {""} else reports

    def __len__(self) -> int:
        """How many batches the next `iter(loader)` gives on each rank."""
        count = self._steps_from(self._next_start).count
        if count is None:
            raise TypeError("a Loader with epochs=None has no length: it runs on")
        return count

    def __bool__(self) -> bool:
        # Not by its length, which may be 0 or unknown.
        return True

    def __repr__(self) -> str:
        kind = f"rows of {self.settings.seq_len} tokens" if self.settings.seq_len else "records"
        return (
            f"Loader({self.rows_per_epoch:,} {kind} an epoch, batches of {self.settings.batch_size}, "
            f"rank {self.world.rank} of {self.world.size})"
        )

    # Iterating

    @property
    def _rows_per_pass(self) -> int | None:
        return None if self.settings.epochs is None else self.settings.epochs * self.rows_per_epoch

    def _steps_from(self, start: int) -> Steps:
        rows = self._rows_per_pass
        return Steps(
            start=start,
            stop=None if rows is None else (self._place.passes + 1) * rows,
            batch_size=self.settings.batch_size,
            world=self.world,
            drop_last=self.settings.drop_last,
        )

    def __iter__(self) -> Iterator[Batch]:
        advise_loader(self)
        # A place of its own: an older iteration that someone still holds must not move this one's.
        self._place = Place(self._next_start, self._place.passes)
        self._begins = self._place.position
        begun = now()
        iteration = _Iteration(self)
        self.counters.add("start", begun, now())
        self._latest = weakref.ref(iteration)
        return iteration

    @property
    def _next_start(self) -> int:
        """Where `iter()` begins: where it did, or after the pass that has ended."""
        return self._place.position if self._place.ended else self._begins

    def _start(self, steps: Steps) -> Batches:
        """The batches of some steps, from the source to the consumer."""
        order = Order(self._recipe, self.settings, steps, self._used, self.delivery.allocate, self.counters)
        return self.delivery.deliver(self.source.start(order))

    def from_the_beginning(self, settings: LoaderSettings, world: World) -> Self:
        """The same Loader at the beginning of the stream, for another rank, or with settings that change no row."""
        other = copy.copy(self)
        other.settings, other.world = settings, world
        other._place, other._begins, other._latest = Place(0, 0), 0, None
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None, "_counted": None}

    # Transforms and weights

    def map(self, function: Callable[..., Any], *, per: str = "sample", processes: int = 0) -> Self:
        """The same Loader with a function on every sample or batch: a dict of fields in, a dict of fields out.

        A function of two parameters gets a NumPy random generator too, which depends on the seed, the epoch and
        the row alone. Functions run in the Loader's threads, or in so many worker processes.
        """
        try:
            how = Per(per)
        except ValueError:
            raise SettingsError(f"per={per!r}: must be 'sample' or 'batch'") from None
        if type(processes) is not int or processes < 0:
            raise SettingsError(f"processes={processes!r}: must be 0 (threads) or a number of processes")
        other = copy.copy(self)
        other._recipe = self._recipe.changed(transforms=(*self._recipe.transforms, Transform(function, how)))
        processes = max(processes, self.source.processes)
        other.source = FromProcesses(processes) if processes else FromThreads()
        other._place, other._latest = copy.copy(self._place), None
        other._used = other._recipe.used_fields()
        return other

    def reweight(self, weights: Mapping[str, float]) -> None:
        """Other weights of a mixture, from the row that comes next on: no row of any source is lost or repeated.

        An iteration that is under way goes on with them; a new one begins here. Stages that were to begin later are
        dropped. All ranks must do it after the same step.
        """
        if len(self._recipe.names) == 1:
            raise SettingsError("reweight(): the data is no mixture")
        here = self._place.position
        stages = self._recipe.stages.until(here).then(here, listed_weights(self._recipe.names, weights))
        self._recipe, self._described = self._recipe.changed(stages=stages), None
        self._begins = here
        running = self._latest() if self._latest is not None else None
        if running is not None:
            running.go_on_from_here()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the batch handed out last; JSON can hold it."""
        if self._described is None:
            self._described = describe_stream(self._made_with)
            if self._recipe.stages is not self._made_with.stages:
                self._described["reweighted"] = self._recipe.stages.to_json()
        return {**self._described, "position": self._place.position, "pass": self._place.passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the very next row, whatever the world size, batch size or number of workers was."""
        place, stages = read_state(state, self._made_with)
        if not self._recipe.known_by_content:
            _log.warning("data without a `fingerprint`: that it is the same as before is for you to know")
        if len(self._recipe.names) > 1:
            self._recipe = self._recipe.changed(stages=stages)
        self._place, self._latest, self._described = self._fitted(place), None, None
        self._begins = self._place.position

    def _fitted(self, place: Place) -> Place:
        """With another number of epochs, a pass is another stretch of the stream."""
        rows = self._rows_per_pass
        if rows is None:
            return Place(place.position, 0)
        if place.passes * rows <= place.position <= (place.passes + 1) * rows:
            return place
        return Place(place.position, place.position // rows)


class _Iteration:
    """One pass. It moves the Loader's place along; its threads or processes stop with its last reference."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._place = loader, loader._place
        self._step = 0
        self._info = (str(loader.settings.labels), loader.settings.ignore_index)
        self._convert = loader.delivery.convert
        self._watch = Watch(loader.counters)
        self._begin()

    def _begin(self) -> None:
        self._steps = self._loader._steps_from(self._place.position)
        self._batches = self._loader._start(self._steps)
        self._handed = 0

    def __iter__(self) -> "_Iteration":
        return self

    def __next__(self) -> Batch:
        before = self._place.position
        try:
            with self._watch:
                arrays = next(self._batches)
            first, last = self._steps.extent(self._handed)
            info = BatchInfo(self._step, first, last - first, *self._info)
            batch = Batch(arrays, info, self._convert)
            self._handed, self._step = self._handed + 1, self._step + 1
            if not self._step % LOOK_EVERY:
                watch_cpu.look()
            self._watch.counters.rows += last - first
            self._place.position = self._steps.position_after(self._handed)
        except StopIteration:
            self._finish()
            raise
        except BaseException:
            # Ctrl-C may have lost a batch on its way here, and those after it would be taken for it.
            self.close()
            self._place.position = before
            raise
        return batch

    def _finish(self) -> None:
        """The pass is over, with the rows that were too few for a batch: the next one begins after it."""
        stop = self._steps.stop
        if self._handed == self._steps.count and stop is not None and not self._place.ended:
            self._place.position, self._place.passes, self._place.ended = stop, self._place.passes + 1, True

    def go_on_from_here(self) -> None:
        """Make what comes next again, since the stream has changed; if this is the Loader's latest, and not over."""
        if self._place is self._loader._place and not self._place.ended and self._handed != self._steps.count:
            self._batches.close()
            self._begin()

    def close(self) -> None:
        """Stop what makes batches. A closed iteration gives no more."""
        self._batches.close()
