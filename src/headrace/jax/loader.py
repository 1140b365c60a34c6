"""The Loader, with JAX arrays in its batches: on one device, or global arrays over a mesh.

    mesh = jax.make_mesh((4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    loader = headrace.jax.Loader("data", sharding=sharding, seq_len=2048, batch_size=32)
    for batch in loader:
        params, loss = step(params, batch)

Which rows a process makes follows from the sharding. The mesh above on two processes of four devices each, and on
four processes of two, if a row of the mesh is one process:

    data shard   0       1       2       3                   0       1       2       3
    devices      0 1     2 3     4 5     6 7                 0 1     2 3     4 5     6 7
    process      0       0       1       1                   0       1       2       3
    data rank    0       0       1       1                   0       1       2       3
    rows         0-15    16-31   32-47   48-63               0-31    32-63   64-95   96-127

Processes that need the same rows (here, if 'model' spanned several processes) have the same data rank and make the same
rows.

No host memory is overwritten too early: JAX keeps the NumPy array until it has been copied to the device, and on the
CPU, where the two often share memory, until the JAX array and all computations with it are gone. The Loader reuses its
buffers once nothing refers to them.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.load.batch import Batch, BatchInfo
from headrace.load.delivery import Delivery
from headrace.load.loader import Loader as HostLoader
from headrace.load.settings import LoaderArguments, LoaderOptions, LoaderSettings, parse_settings
from headrace.load.sources import Batches
from headrace.load.world import WorldOptions
from headrace.observe.counting import now, spent
from headrace.order.world import World
from headrace.public import public
from headrace.rows.settings import TOKEN_FIELDS, CuSeqlens

_BOUNDS = ("cu_seqlens", "max_seqlen")


class Loader(HostLoader):
    """A `headrace.Loader` with JAX arrays. If you call `jax.distributed.initialize()`, do so first.

    Without `sharding`, arrays are on the default device, and each JAX process is its own rank unless the arguments
    say otherwise.

    With a `NamedSharding`, arrays are global: (batch_size * data ranks, seq_len). `batch_size` is still the rows of
    one data rank, which its devices share; one process with many devices is one data rank. Rank and world size
    follow from the sharding and cannot be given. Row k of the global array is row k of the global batch if the rows
    of each process lie together; with a mesh in another order, a batch has the same rows in another order. A field
    with fewer dimensions than the PartitionSpec goes by its first entries. `drop_last=False` is refused: a last,
    smaller batch may not divide over the mesh.

    Other defaults than `headrace.Loader`:

    - `dtype` is int32. int64 is refused unless `jax_enable_x64` is on, since JAX would cut it to int32.
    - `cu_seqlens` and `max_seqlen` are left out unless `fields`, `cu_seqlens` or `max_documents` asks for them:
      without `max_documents`, each batch has a `cu_seqlens` of another shape, and `jit` would compile again. With a
      sharding it must be cu_seqlens='row' with max_documents. `max_seqlen`, a Python int, is there unless the
      sharding has several data ranks, which would disagree on it.

    Functions given to `map` get NumPy arrays, and run before all that. Lists and numbers stay what they are, of
    this process's rows; `batch.info` is about those rows too. Batches are pytrees: `jit` takes them. One that comes
    out of a JAX function has no place in the stream (its `info` says -1).
    """

    @public
    def __init__(
        self, data: Any, *, sharding: NamedSharding | None = None, **arguments: Unpack[LoaderArguments]
    ) -> None:
        options: Any = dict(arguments)
        self.sharding = sharding
        rows, explicit = rank_of(sharding, options)
        options = _with_defaults(options, rows.world.size if rows else 1)
        check_for_jax(parse_settings(dict(options)), rows)
        super().__init__(data, **explicit, **options)
        self.delivery = ToMesh(rows, self.settings.batch_size)


def rank_of(
    sharding: NamedSharding | None, options: dict[str, Any]
) -> "tuple[RowSharding | None, dict[str, Any]]":
    """How rows are sharded, and the arguments that say which rank this is, which are taken out of `options`."""
    explicit = {name: options.pop(name, None) for name in WorldOptions.__annotations__}
    if sharding is not None:
        _refuse_ranks(explicit)
        rows = RowSharding(sharding)
        return rows, {**explicit, "data_rank": rows.world.rank, "data_world_size": rows.world.size}
    if all(value is None for value in explicit.values()) and jax.process_count() > 1:
        explicit |= {"rank": jax.process_index(), "world_size": jax.process_count()}
    return None, explicit


def check_for_jax(settings: LoaderSettings, rows: "RowSharding | None") -> None:
    """Refuse settings whose batches JAX cannot hold, or not shard."""
    if is_truncated(settings):
        raise SettingsError(
            f"dtype={settings.dtype!r}: JAX would truncate it to int32; leave dtype out, or call "
            "jax.config.update('jax_enable_x64', True) first"
        )
    check_sharding(settings, rows)


def is_truncated(settings: LoaderSettings) -> bool:
    """Whether JAX would truncate the tokens."""
    truncated: bool = jax.dtypes.canonicalize_dtype(settings.dtype) != np.dtype(settings.dtype)
    return truncated


def check_sharding(settings: LoaderSettings, rows: "RowSharding | None") -> None:
    if rows is not None:
        _check_sharded(settings, rows, rows.world.size)


def _refuse_ranks(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise SettingsError(
                f"{name}={value!r} with sharding=: the sharding determines the rank; leave {name} out"
            )


def _with_defaults(options: LoaderOptions, ranks: int) -> LoaderOptions:
    options = {"dtype": "int32", **options}
    if options.get("seq_len") is None or options.get("fields") is not None:
        return options
    asked = "cu_seqlens" in options or options.get("max_documents") is not None
    return {**options, "fields": default_fields(asked, ranks)}


def default_fields(asked_for_bounds: bool, ranks: int) -> list[str]:
    """The fields of token rows that `jit` can take without compiling for each batch."""
    out = _BOUNDS if not asked_for_bounds else _BOUNDS[1:] if ranks > 1 else ()
    return [name for name in TOKEN_FIELDS if name not in out]


def _check_sharded(settings: LoaderSettings, rows: "RowSharding", ranks: int) -> None:
    if not settings.drop_last:
        raise SettingsError(
            "drop_last=False with sharding=: the last batch may not divide over the mesh; leave drop_last out"
        )
    if settings.batch_size % rows.shards_per_rank:
        raise SettingsError(
            f"batch_size={settings.batch_size}: the rows of a data rank are divided over {rows.shards_per_rank} shards "
            f"(mesh axes {rows.axes(0)}, {rows.shards} shards, {ranks} data ranks); "
            f"give a multiple of {rows.shards_per_rank}"
        )
    if settings.seq_len is None:
        return
    parts = rows.parts(1)
    if settings.seq_len % parts:
        raise SettingsError(
            f"seq_len={settings.seq_len}: rows are divided into {parts} parts (mesh axes {rows.axes(1)}); "
            f"give a multiple of {parts}"
        )
    _check_sharded_bounds(settings, ranks)


def _check_sharded_bounds(settings: LoaderSettings, ranks: int) -> None:
    fields = settings.fields or ()
    fixed = settings.cu_seqlens is CuSeqlens.ROW and settings.max_documents is not None
    if "cu_seqlens" in fields and not fixed:
        raise SettingsError(
            f"cu_seqlens='{settings.cu_seqlens}', max_documents={settings.max_documents} with sharding=: only "
            "bounds of each row, in a fixed shape, can be sharded; give cu_seqlens='row' and max_documents=..., or "
            "leave cu_seqlens out of the fields"
        )
    if "max_seqlen" in fields and ranks > 1:
        raise SettingsError(
            f"fields with max_seqlen on {ranks} data ranks: each rank would have a different value, and their programs "
            "would differ; leave it out and use seq_len"
        )


class RowSharding:
    """What a sharding means for rows: which processes need which rows, and how these become a global array."""

    def __init__(self, sharding: NamedSharding) -> None:
        if not isinstance(sharding, NamedSharding):
            raise SettingsError(
                f"sharding of type {type(sharding).__name__}: must be a jax.sharding.NamedSharding"
            )
        if not isinstance(sharding.mesh, Mesh):
            raise SettingsError(
                f"sharding over {sharding.mesh}: this mesh has no devices; use a jax.sharding.Mesh"
            )
        self._sharding = sharding
        self._of_shape: dict[tuple[str, tuple[int, ...]], NamedSharding] = {}
        self.shards = self.parts(0)

    def axes(self, dimension: int) -> tuple[str, ...]:
        """The mesh axes that a dimension is divided along."""
        entry = self._sharding.spec[dimension] if dimension < len(self._sharding.spec) else None
        if entry is None:
            return ()
        if entry is PartitionSpec.UNCONSTRAINED:
            raise SettingsError(f"sharding with {self._sharding.spec}: say how each dimension is divided")
        return (entry,) if isinstance(entry, str) else tuple(entry)

    def parts(self, dimension: int) -> int:
        return math.prod(self._sharding.mesh.shape[name] for name in self.axes(dimension))

    def _first(self, count: int) -> NamedSharding:
        """The same sharding, for arrays that have only its first dimensions."""
        spec, kind = PartitionSpec(*self._sharding.spec[:count]), self._sharding.memory_kind
        return NamedSharding(self._sharding.mesh, spec, memory_kind=kind)

    @cached_property
    def _needed(self) -> dict[int, set[int]]:
        """The shards of rows that the devices of each process need."""
        needed: dict[int, set[int]] = defaultdict(set)
        for device, index in self._first(1).devices_indices_map((self.shards,)).items():
            needed[device.process_index].update(range(self.shards)[index[0]])
        return dict(needed)

    @cached_property
    def world(self) -> World:
        return data_world(self._needed, jax.process_index())

    @property
    def shards_per_rank(self) -> int:
        return self.shards // self.world.size

    def put(self, name: str, local: NDArray[Any] | jax.Array, rows: int) -> jax.Array:
        """Begin to make the global array of which `local` is this process's rows."""
        if local.ndim == 0 or len(local) != rows:
            raise SettingsError(
                f"field {name!r} has shape {local.shape}, not one item for each of the {rows} rows, so it cannot be "
                "sharded; leave it out of the fields, or reshape it in map()"
            )
        shape = (rows * self.world.size, *local.shape[1:])
        sharding = self._of_shape.get((name, shape))
        if sharding is None:
            sharding = self._of_shape[name, shape] = self._fitting(name, shape)
        return jax.make_array_from_process_local_data(sharding, np.asarray(local), shape)

    def _fitting(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        # The second dimension of cu_seqlens does not hold tokens.
        dimensions = 1 if name == "cu_seqlens" else len(shape)
        for dimension in range(1, dimensions):
            if shape[dimension] % self.parts(dimension):
                raise SettingsError(
                    f"field {name!r} has shape {shape}: its dimension {dimension} does not divide into "
                    f"{self.parts(dimension)} parts (mesh axes {self.axes(dimension)}); give a PartitionSpec of "
                    "fewer dimensions, or pad it in map()"
                )
        return self._first(dimensions)


def data_world(needed: Mapping[int, set[int]], process: int) -> World:
    """The data rank of a process, and how many there are, from the shards of rows that each process needs.

    Those that need the same have the same rank; ranks go by the first shard. 0: {0, 1}, 1: {0, 1}, 2: {2, 3} makes
    processes 0 and 1 data rank 0 of 2.
    """
    if process not in needed:
        raise SettingsError(
            f"sharding: process {process} has none of the mesh's devices; create a Loader only in processes of the mesh"
        )
    groups = sorted({tuple(sorted(shards)) for shards in needed.values()})
    shards = [shard for group in groups for shard in group]
    if len(set(shards)) != len(shards) or len({len(group) for group in groups}) > 1:
        raise SettingsError(
            f"sharding: processes need the shards of rows {', '.join(map(str, groups))}, but any two must need "
            "the same or none in common, and equally many; order the mesh's devices so that each has whole shards"
        )
    return World(groups.index(tuple(sorted(needed[process]))), len(groups))


class ToMesh(Delivery):
    """JAX arrays on the default device, or global arrays over a mesh."""

    def __init__(self, rows: RowSharding | None, batch_size: int) -> None:
        self._rows, self._batch_size = rows, batch_size

    def deliver(self, batches: Batches) -> Batches:
        return PutAhead(batches, self._rows, self._batch_size)


class PutAhead:
    """Batches on the devices: when one is handed out, the next is already being copied if it is ready on the host.

    If it is not, nothing waits for it. An error in making a batch is raised when that batch is due.
    """

    def __init__(self, batches: Any, rows: RowSharding | None, batch_size: int) -> None:
        self._batches, self._rows, self._batch_size = batches, rows, batch_size
        self._ahead: dict[str, Any] | Exception | None = None

    def __next__(self) -> dict[str, Any]:
        # Another thread may close the iteration in between.
        ahead, self._ahead = self._ahead, None
        due = self._put_next() if ahead is None else ahead
        if isinstance(due, Exception):
            self.close()
            raise due
        if self._batches.is_ready():
            self._ahead = self._put_next()
        return due

    def is_ready(self) -> bool:
        return self._ahead is not None or bool(self._batches.is_ready())

    def _put_next(self) -> dict[str, Any] | Exception:
        try:
            return self._put(next(self._batches))
        except Exception as error:
            # Includes the end of the pass.
            return error
        except BaseException:
            # Ctrl-C: a batch may be lost, and the next ones would be handed out in the wrong place.
            self.close()
            raise

    def _put(self, values: dict[str, Any]) -> dict[str, Any]:
        arrays = {name: _checked(name, value) for name, value in values.items() if _is_numbers(value)}
        begun = now()
        if self._rows is None:
            put = jax.device_put(arrays)
        else:
            put = {name: self._rows.put(name, array, self._batch_size) for name, array in arrays.items()}
        # This counts only the host's part; the copy itself runs in parallel with the step.
        spent("copy", begun)
        return {**values, **put}

    def close(self) -> None:
        self._ahead = None
        self._batches.close()


def _is_numbers(value: Any) -> bool:
    """Whether JAX can hold a value; `isbuiltin` is 2 for types like bfloat16, which are not NumPy's own."""
    if not isinstance(value, np.ndarray):
        return isinstance(value, jax.Array)
    return value.dtype.kind in "biufc" or value.dtype.isbuiltin == 2


def _checked(name: str, array: Any) -> Any:
    """The array in native byte order, once JAX is known to keep its values: without x64, it converts 64 bits to 32."""
    if isinstance(array, jax.Array):
        return array
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if kept == array.dtype or array.dtype.kind not in "iu" or not array.size:
        return array
    limits = np.iinfo(kept)
    if array.min() < limits.min or array.max() > limits.max:
        raise SettingsError(
            f"field {name!r} is {array.dtype} with values from {array.min()} to {array.max()}, and JAX would "
            f"truncate them to {kept}; call jax.config.update('jax_enable_x64', True) first, or leave the field out"
        )
    return array


def _flatten(batch: Batch) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    # The place in the stream is left out: it differs each time, so jit would compile again.
    return tuple(batch.values()), (tuple(batch), batch.info.labels, batch.info.ignore_index)


def _unflatten(kept: tuple[Any, ...], values: tuple[Any, ...]) -> Batch:
    names, labels, ignore_index = kept
    return Batch(dict(zip(names, values, strict=True)), BatchInfo(-1, -1, -1, labels, ignore_index))


jax.tree_util.register_pytree_node(Batch, _flatten, _unflatten)
