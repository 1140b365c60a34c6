"""A program for tests: some batches over meshes of all devices, told as JSON. Its first lines must come before JAX.

python multi_process_job.py PATH PROCESS PROCESSES PORT
"""

import json
import os
import sys
from itertools import islice
from typing import Any

PATH, PROCESS, PROCESSES, PORT = sys.argv[1], *map(int, sys.argv[2:5])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // PROCESSES}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

import headrace.jax  # noqa: E402
from headrace.errors import SettingsError  # noqa: E402

ROW_FIELDS = ("tokens", "labels", "position_ids", "segment_ids", "loss_mask", "cu_seqlens")

LAYOUTS: dict[str, tuple[Any, tuple[str, ...], PartitionSpec]] = {
    "data": ([0, 1, 2, 3], ("data",), PartitionSpec("data", None)),
    "data and model": ([[0, 1], [2, 3]], ("data", "model"), PartitionSpec("data", None)),
    "model over processes": ([[0, 2], [1, 3]], ("data", "model"), PartitionSpec("data", None)),
    "interleaved": ([0, 2, 1, 3], ("data",), PartitionSpec("data")),
    "both axes": ([[0, 1], [2, 3]], ("replica", "data"), PartitionSpec(("replica", "data"))),
    "sequence": ([[0, 1], [2, 3]], ("data", "sequence"), PartitionSpec("data", "sequence")),
    "replicated": ([0, 1, 2, 3], ("data",), PartitionSpec()),
}


def sharding_of(layout: str) -> NamedSharding:
    order, names, spec = LAYOUTS[layout]
    return NamedSharding(Mesh(np.array(jax.devices())[np.array(order)], names), spec)


def make_loader(sharding: NamedSharding, **options: Any) -> headrace.jax.Loader:
    common: dict[str, Any] = {"seq_len": 16, "batch_size": 4, "cu_seqlens": "row", "max_documents": 16}
    return headrace.jax.Loader(PATH, sharding=sharding, **(common | options))


def shards_of(array: Any) -> list[dict[str, Any]]:
    return [
        {
            "device": shard.device.id,
            "index": [part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)],
            "values": np.asarray(shard.data).tolist(),
        }
        for shard in array.addressable_shards
    ]


@jax.jit
def total(batch: headrace.Batch) -> Any:
    return batch.tokens.sum() + batch["labels"].max()


def describe(layout: str) -> dict[str, Any]:
    """Two batches of three, and the third by a Loader that resumed."""
    loader = make_loader(sharding_of(layout))
    batches = list(islice(loader, 2))
    state = loader.state_dict()
    resumed = make_loader(sharding_of(layout))
    resumed.load_state_dict(state)
    batches.append(next(iter(resumed)))
    return {
        "rank": loader.world.rank,
        "ranks": loader.world.size,
        "shape": batches[0].tokens.shape,
        "fields": list(batches[0]),
        "state": state,
        "totals": [int(total(batch)) for batch in batches],
        "batches": [{name: shards_of(batch[name]) for name in ROW_FIELDS} for batch in batches],
    }


def count_wrong_batches() -> dict[str, int]:
    """All batches of many epochs are kept, or deleted while they are computed with; how many are not what they were?"""
    sharding = sharding_of("data and model")
    common: dict[str, Any] = {"seq_len": 64, "epochs": 60, "fields": ["tokens"], "dtype": "int32"}
    options = common | {"cu_seqlens": "batch", "max_documents": None, "prefetch": 2}
    kept = [batch.tokens for batch in make_loader(sharding, **options)]
    add = jax.jit(lambda tokens: jnp.sort(tokens, axis=1).sum(axis=1) * 2)
    added = []
    for batch in make_loader(sharding, **options):
        added.append(add(batch.tokens))
        batch.tokens.delete()
    rows = kept[0].shape[0]
    host = headrace.Loader(PATH, batch_size=rows, rank=0, world_size=1, **common)
    wanted = [batch.tokens.copy() for batch in host]
    return {
        "batches": len(wanted),
        "kept": sum(not is_same(array, whole) for array, whole in zip(kept, wanted, strict=True)),
        "deleted": sum(not is_same(array, w.sum(1) * 2) for array, w in zip(added, wanted, strict=True)),
    }


def is_same(array: Any, whole: Any) -> bool:
    """Whether this process's shards are those of the whole array."""
    return all(np.array_equal(shard.data, whole[shard.index]) for shard in array.addressable_shards)


def explicit_mesh() -> dict[str, Any]:
    """A mesh whose axes are part of the types of arrays."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    batch = next(iter(make_loader(NamedSharding(mesh, PartitionSpec("data")))))
    with jax.set_mesh(mesh):
        return {"total": int(total(batch)), "type": str(jax.typeof(batch.tokens))}


def refusals() -> dict[str, str]:
    devices = np.array(jax.devices())
    cases: dict[str, tuple[NamedSharding, dict[str, Any]]] = {
        "batch": (sharding_of("data"), {"batch_size": 3}),
        "sequence": (sharding_of("sequence"), {"seq_len": 15}),
        "bounds": (sharding_of("data"), {"cu_seqlens": "batch"}),
        "room": (sharding_of("data"), {"max_documents": None}),
        "longest": (sharding_of("data"), {"fields": ["tokens", "max_seqlen"]}),
        "elsewhere": (NamedSharding(Mesh(devices[-1:], ("data",)), PartitionSpec("data")), {}),
        "uneven": (NamedSharding(Mesh(devices[:3], ("data",)), PartitionSpec("data")), {"batch_size": 6}),
    }
    found = {}
    for name, (sharding, options) in cases.items():
        try:
            make_loader(sharding, **options)
            found[name] = ""
        except SettingsError as error:
            found[name] = str(error)
    return found


def main() -> None:
    if PROCESSES > 1:
        jax.distributed.initialize(f"127.0.0.1:{PORT}", PROCESSES, PROCESS)
    unsharded = headrace.jax.Loader(PATH, seq_len=16, batch_size=4)
    report = {
        "layouts": {layout: describe(layout) for layout in LAYOUTS},
        "hammered": count_wrong_batches(),
        "explicit": explicit_mesh(),
        "refusals": refusals(),
        "unsharded": [unsharded.world.rank, unsharded.world.size, next(iter(unsharded)).tokens.tolist()],
    }
    if PROCESSES > 1:
        jax.distributed.shutdown()
    # Not before: shutting down waits for the others, and whoever reads this may read one process after the other.
    print(json.dumps(report))


if __name__ == "__main__":
    main()
