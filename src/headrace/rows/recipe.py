"""Everything needed to make any batch of a Loader. It has no threads or position, so it can be sent to a worker."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.dataset import Dataset
from headrace.dataset.open import open_dataset
from headrace.dataset.units import UnitSource
from headrace.errors import HeadraceError, SettingsError, StageError
from headrace.format.checksum import checksum
from headrace.format.fields import FieldKind
from headrace.order.mixture import Stages
from headrace.order.shuffle import ShuffleKind
from headrace.order.steps import ByLane, Steps
from headrace.order.stream import RowStream
from headrace.pack.packing import Packing
from headrace.pack.room import segments_of_a_batch
from headrace.rows.buffers import BufferPool
from headrace.rows.choices import chosen, with_units
from headrace.rows.fields import UsedFields
from headrace.rows.kernel import permute
from headrace.rows.mix import Mixture, Stop, check_same_tokenizer
from headrace.rows.parts import PartTable
from headrace.rows.sample_batches import fetch_samples, gather_columns, without_rows
from headrace.rows.sample_rows import ObjectRows, RecordRows, object_fingerprint, own_fingerprint
from headrace.rows.settings import CuSeqlens, PackWithin, RowSettings
from headrace.rows.token_batches import Planner, RowFiller, TokenBatches, stretches_at
from headrace.rows.token_rows import DocumentRows, PackingReport, Stretches, TokenRows, WindowRows
from headrace.rows.transform import Per, Transform, apply_transforms, run_without_rows
from headrace.rows.unit_counts import count_unit_rows
from headrace.rows.unit_rows import UnitDocumentRows, UnitWindowRows

_log = logging.getLogger(__name__)

Make = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """The sources by name, and everything that determines the row at a position of the stream."""

    names: tuple[str, ...]
    data: tuple[Any, ...]
    stages: Stages
    stop: Stop
    settings: RowSettings
    transforms: tuple[Transform, ...] = ()

    @cached_property
    def sources(self) -> list[Any]:
        """The rows of each source."""
        rows = [
            _named(name, partial(make_rows, data, self.settings))
            for name, data in zip(self.names, self.data, strict=True)
        ]
        for name, each in zip(self.names, rows, strict=True):
            if not each.rows:
                raise SettingsError(f"{name or 'the data'} has no rows; give data that is not empty")
        if any(type(each) is not type(rows[0]) for each in rows) or len({_fields(each) for each in rows}) > 1:
            named = zip(self.names, rows, strict=True)
            listed = "; ".join(f"{name}: {', '.join(_fields(each))}" for name, each in named)
            raise SettingsError(f"the sources of a mixture must have the same fields, but they have {listed}")
        return rows

    @cached_property
    def stream(self) -> RowStream:
        rows = tuple(source.rows for source in self.sources)
        return RowStream(
            rows=rows,
            units=tuple(getattr(source, "unit_rows", None) for source in self.sources),
            stages=self.stages,
            shuffle=self.settings.shuffle,
            seed=self.settings.seed,
            permute=permute,
        )

    @property
    def by_lane(self) -> ByLane | None:
        """Puts positions of the stream in the order of their lanes, if rows are dealt out to ranks by them."""
        # A method of the recipe and not of the stream, which must not be sent to a worker.
        return self._by_lane if self.settings.shuffle.kind is ShuffleKind.UNITS else None

    def _by_lane(self, begins: NDArray[np.int64], rows: int, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.stream.by_lane(begins, rows, wanted)

    @cached_property
    def rows_per_epoch(self) -> int:
        rows = self.stream.rows
        if len(rows) == 1:
            return rows[0]
        if self.stop is Stop.FIRST:
            return self.stages.rows_before_repeat(rows)
        try:
            return self.stages.rows_to_cover(rows)
        except SettingsError as error:
            raise SettingsError(f"mixture of {', '.join(map(repr, self.names))}: {error}") from None

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(object_fingerprint(data) for data in self.data)

    @property
    def known_by_content(self) -> bool:
        """Whether all data has a fingerprint of its content, so that changed data is noticed."""
        return all(own_fingerprint(data) is not None for data in self.data)

    @cached_property
    def data_digest(self) -> str:
        """One short checksum of the contents of all sources."""
        return checksum("\n".join(self.fingerprints).encode())

    @property
    def token_field(self) -> str | None:
        """The field that holds the tokens in every source; None if they call it differently, or have none."""
        if self.settings.seq_len is None:
            return None
        names = {self.settings.token_field or data.token_field for data in self.data}
        return names.pop() if len(names) == 1 else None

    @property
    def stage(self) -> str:
        """The name of this stage in error messages."""
        return " -> ".join(transform.name for transform in self.transforms) or "load"

    @cached_property
    def row_bytes(self) -> int | None:
        """The approximate size of a row; None if only the user's own code knows it."""
        settings, rows = self.settings, self.sources[0]
        if isinstance(rows, ObjectRows):
            return None
        if isinstance(rows, RecordRows):
            held = sum(table.elements * table.item_bytes for table in rows.tables.values())
            return max(1, held // max(1, rows.rows))
        wide = np.dtype(settings.dtype).itemsize
        sizes = {"tokens": wide, "labels": wide, "position_ids": wide, "segment_ids": 4, "loss_mask": 1}
        place = sum(size for name, size in sizes.items() if name in settings.token_fields)
        return (settings.seq_len or 1) * max(1, place)

    def changed(self, **changes: Any) -> "Recipe":
        """A copy with other transforms or later weights. The rows per epoch stay the same."""
        other = replace(self, **changes)
        for name in ("sources", "rows_per_epoch", "fingerprints", "data_digest"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def check_room_for_documents(self, batch_size: int) -> None:
        """Refuse a `max_documents` that would turn out too small on the way. Windows are not known that well."""
        room = self.settings.max_documents
        sources = [source.segments for source in self.sources if isinstance(source, DocumentRows)]
        if room is None or not sources:
            return
        if self.settings.cu_seqlens is CuSeqlens.ROW:
            what, needed = "a row", max(source.most for source in sources)
        else:
            is_shuffled = self.settings.shuffle.kind is ShuffleKind.GLOBAL
            needed = segments_of_a_batch(sources, batch_size, is_shuffled)
            what = f"a batch of {batch_size} rows"
        if needed > room:
            raise SettingsError(
                f"max_documents={room}: {what} may have {needed} segments (documents and padding); give at least "
                f"{needed}"
            )

    def reports(self) -> dict[str, PackingReport]:
        if self.settings.seq_len is None:
            raise SettingsError("report(): without seq_len nothing is packed, so there is nothing to report")
        return {name: source.report() for name, source in zip(self.names, self.sources, strict=True)}

    @property
    def runs_user_code(self) -> bool:
        """Whether making a batch calls the user's own code, which may take any amount of time."""
        return bool(self.transforms) or isinstance(self.sources[0], ObjectRows)

    def used_fields(self) -> UsedFields:
        """The fields that a new Loader makes ahead: all that are asked for or go through functions, or else tokens."""
        settings = self.settings
        if settings.fields is not None or self.transforms:
            return UsedFields(settings.token_fields, ahead=settings.token_fields)
        bounds = () if settings.max_documents is None else ("cu_seqlens",)
        return UsedFields(settings.token_fields, ahead=("tokens", *bounds))

    @property
    def has_batch_functions(self) -> bool:
        """Whether a row may depend on the other rows of its batch."""
        return any(transform.per is Per.BATCH for transform in self.transforms)

    # The function itself

    def evaluate(self, positions: NDArray[np.int64], pool: BufferPool) -> dict[str, Any]:
        """The rows at these positions of the stream, in this order, after all of the user's functions."""
        if not len(positions):
            return self._without_rows(pool)
        if self.settings.seq_len is not None:
            return self._transformed(self._token_columns(positions, pool), positions, pool)
        if isinstance(self.sources[0], RecordRows) and not self._begins_with_samples:
            # Columns are gathered straight from memory, unless a function takes one sample at a time.
            columns = gather_columns(self.sources, self.stream.at(positions), pool)
            return self._transformed(columns, positions, pool)
        return self._transformed(self.samples(positions), positions, pool)

    def _without_rows(self, pool: BufferPool) -> dict[str, Any]:
        """The usual fields, types and shapes, with no rows: what a rank gets if none are left for it in the last step.

        Which fields there are can only be seen on a row. Functions of batches also get a batch of no rows, so that they
        decide about values that belong to the batch as a whole, such as a sum.
        """
        per_sample = [turn for turn, transform in enumerate(self.transforms) if transform.per is Per.SAMPLE]
        turn = per_sample[-1] + 1 if per_sample else 0
        columns = without_rows(self._one_row(turn, pool), {})
        for transform in self.transforms[turn:]:
            turn += 1
            columns = run_without_rows(transform, columns, self._one_row(turn, pool))
        return columns

    def _one_row(self, functions: int, pool: BufferPool) -> dict[str, Any]:
        """The first row of the stream, after so many of the user's functions."""
        recipe = self.changed(transforms=self.transforms[:functions])
        return recipe.evaluate(np.zeros(1, dtype=np.int64), pool)

    def stretches(self, positions: NDArray[np.int64]) -> Stretches:
        """Where the tokens of the rows at these positions lie."""
        return stretches_at(self.stream, self.sources, positions)

    def samples(self, positions: NDArray[np.int64]) -> list[Any]:
        """The records or samples at these positions, before any function is applied."""
        places = self.stream.at(positions)
        try:
            return fetch_samples(self.sources, places)
        except HeadraceError:
            raise
        except Exception as error:
            raise StageError(
                f"the data's __getitem__ failed in the batch that begins at row {positions[0]} of the stream (records "
                f"{places.row.tolist()[:8]}...): {type(error).__name__}: {error}"
            ) from error

    def _token_columns(self, positions: NDArray[np.int64], pool: BufferPool) -> dict[str, Any]:
        return RowFiller(self.settings, pool).rows_of(self.stretches(positions), len(positions))

    def _transformed(
        self, content: dict[str, Any] | list[Any], positions: NDArray[np.int64], pool: BufferPool
    ) -> dict[str, Any]:
        if isinstance(content, dict) and not self.transforms:
            return content
        keys = self.stream.sample_keys(self.stream.at(positions))
        return apply_transforms(self.transforms, content, keys, positions, pool)

    @property
    def _begins_with_samples(self) -> bool:
        return bool(self.transforms) and self.transforms[0].per is Per.SAMPLE

    def maker(self, steps: Steps, pool: BufferPool, used: UsedFields | None = None) -> Make:
        """A function that makes the batch of a step; for token rows, with at least the fields that are used.

        It returns what `evaluate` returns for the positions of the step. Batches of token rows are planned many at a
        time.
        """
        if self.settings.seq_len is None:
            return lambda step: self.evaluate(steps.positions(step), pool)
        plain = TokenBatches(Planner(self.stream, self.sources, steps), self.settings, pool, used)
        if not self.transforms:
            return plain

        def make(step: int) -> dict[str, Any]:
            positions = steps.positions(step)
            if not len(positions):
                return self.evaluate(positions, pool)
            # All fields are made, because the user's functions expect an ordinary dict.
            return self._transformed(dict(plain(step)), positions, pool)

        return make

    def __getstate__(self) -> dict[str, Any]:
        # A worker computes these itself: arrays of addresses mean nothing in another process.
        cached = ("sources", "stream", "fingerprints", "rows_per_epoch", "data_digest", "row_bytes")
        return {name: value for name, value in self.__dict__.items() if name not in cached}


def make_recipe(data: Any, settings: RowSettings) -> Recipe:
    if isinstance(data, Mixture):
        pairs = zip(data.names, data.data, strict=True)
        opened = tuple(_named(name, partial(open_data, each)) for name, each in pairs)
        if not data.allow_different_tokenizers:
            check_same_tokenizer(data.names, opened)
        return _recipe(data.names, opened, data.stages, data.stop, settings)
    return _recipe(("",), (open_data(data),), Stages.of([1.0]), Stop.FIRST, settings)


def _recipe(
    names: tuple[str, ...], opened: tuple[Any, ...], stages: Stages, stop: Stop, settings: RowSettings
) -> Recipe:
    """Decide what the settings leave open, now that the data is known."""
    settings = chosen(settings, opened)
    data = tuple(with_units(each, settings) for each in opened)
    return Recipe(names, data, stages, stop, settings)


def open_data(data: Any) -> Any:
    """Open a path; a Dataset, or any object with a length and numbered items, is used as it is."""
    if isinstance(data, str | Path):
        return open_dataset(data)
    if isinstance(data, Mapping):
        raise SettingsError(
            "data is a dict: use headrace.mix({name: (data, weight), ...}) for several datasets, or "
            "headrace.from_arrays({name: array, ...}) for arrays"
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return data
    raise SettingsError(
        f"data of type {type(data).__name__}: give a dataset or its path, headrace.mix(...), or an object "
        "with __len__ and __getitem__"
    )


def make_rows(data: Any, settings: RowSettings) -> TokenRows | RecordRows | ObjectRows:
    """The rows of one source: rows of tokens if there is a `seq_len`, else its records or samples."""
    if settings.seq_len is not None:
        return _make_token_rows(data, settings, settings.seq_len)
    if isinstance(data, Dataset):
        return RecordRows(data, settings.fields, settings.shuffle.kind is ShuffleKind.GLOBAL)
    if settings.fields is not None:
        raise SettingsError(
            f"fields={settings.fields}: the samples of {type(data).__name__} are used as they are; choose fields in map"
        )
    return ObjectRows(data)


def _make_token_rows(data: Any, settings: RowSettings, seq_len: int) -> TokenRows:
    if not isinstance(data, Dataset):
        raise SettingsError(
            f"seq_len={seq_len}: {type(data).__name__} is not a Headrace dataset, so it cannot be packed; "
            "build one with headrace.build or headrace.from_arrays, or leave seq_len out"
        )
    table = _token_table(data, settings)
    within_units = settings.pack_within is PackWithin.UNITS and isinstance(data.source, UnitSource)
    if settings.packing is Packing.WINDOWS:
        if table.elements < seq_len:
            raise SettingsError(
                f"seq_len={seq_len}: the dataset has only {table.elements:,} tokens, too few for one row; "
                "use a smaller seq_len, or packing='best-fit', which pads the row"
            )
        boundaries = settings.boundaries and settings.fields != ("tokens",)
        kind = UnitWindowRows if within_units else WindowRows
        return kind(table, seq_len, boundaries, settings.align_documents)
    if within_units:
        counts = count_unit_rows(data, table, seq_len, settings.packing, settings.overlong)
        return UnitDocumentRows(table, seq_len, settings.packing, settings.overlong, counts)
    if settings.shuffle.kind is ShuffleKind.BLOCK and settings.group_shards is None:
        _log.warning(
            "shuffle='block' with packing=%r: the documents of a row are spread over the dataset, so reads do not stay "
            "near each other; give group_shards too, or use packing='windows'",
            str(settings.packing),
        )
    return DocumentRows(data, table, seq_len, settings.packing, settings.overlong, settings.group_shards)


def _token_table(data: Dataset, settings: RowSettings) -> PartTable:
    field = settings.token_field or data.token_field
    if field not in data.fields or data.fields[field].kind is not FieldKind.RAGGED:
        found = (
            f"is of type {data.fields[field].notation}" if field in data.fields else "there is no such field"
        )
        listed = ", ".join(f"{name} ({kind.notation})" for name, kind in data.fields.items())
        raise SettingsError(
            f"token_field={field!r}: {found}; tokens are in a field such as uint16[*]. The fields are {listed}: name "
            "one that holds tokens, or build the dataset with a tokenizer"
        )
    table = PartTable(data, field, random_reads=settings.shuffle.kind is ShuffleKind.GLOBAL)
    # Raises if the field cannot hold tokens.
    _ = table.token_type
    return table


def _fields(rows: Any) -> tuple[str, ...]:
    if isinstance(rows, RecordRows):
        return tuple(f"{name} {table.field.notation}" for name, table in rows.tables.items())
    return ()


def _named(name: str, make: Callable[[], Any]) -> Any:
    """Call a function, and name the source of a mixture in its errors."""
    try:
        return make()
    except HeadraceError as error:
        if not name:
            raise
        raise type(error)(f"source {name!r}: {error}") from error
