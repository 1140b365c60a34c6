"""JAX batches against those of `penstock.Loader`: on one device, on meshes of four, and in two processes."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import SettingsError, StageError

# Not "jax": this directory would do for that.
pytest.importorskip("jax.numpy")

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import penstock.jax
from penstock.jax.loader import data_world

JOB = Path(__file__).with_name("multi_process_job.py")
JOB_SECONDS = 60
FIXED_SHAPE = ("tokens", "labels", "position_ids", "segment_ids", "loss_mask")
LAYOUTS = (
    "data",
    "data and model",
    "model over processes",
    "interleaved",
    "both axes",
    "sequence",
    "replicated",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """No two tokens are equal, so a row in the wrong place shows."""
    path = tmp_path_factory.mktemp("jax") / "data"
    first = 1
    with penstock.Writer(path, {"tokens": "uint32[*]"}, shard_bytes=500) as writer:
        for length in np.random.default_rng(0).integers(1, 24, 100).tolist():
            writer.write({"tokens": np.arange(first, first + length, dtype=np.uint32)})
            first += length
    return str(path)


def contents(batches: Any) -> list[dict[str, Any]]:
    return [
        {n: np.array(v).tolist() if hasattr(v, "shape") else v for n, v in batch.items()} for batch in batches
    ]


def one_device_sharding() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data"))


# One device


def test_batches_are_those_of_the_host_loader_as_jax_arrays_of_int32(dataset: str) -> None:
    batches = list(penstock.jax.Loader(dataset, seq_len=16, batch_size=4))
    host = list(penstock.Loader(dataset, seq_len=16, batch_size=4, fields=FIXED_SHAPE))
    assert contents(batches) == contents(host)
    assert [batch.info for batch in batches] == [batch.info for batch in host]
    assert all(isinstance(array, jax.Array) for array in batches[0].values())
    assert {name: str(array.dtype) for name, array in batches[0].items()} == {
        "tokens": "int32",
        "labels": "int32",
        "position_ids": "int32",
        "segment_ids": "int32",
        "loss_mask": "bool",
    }


def test_a_jitted_function_takes_batches_and_compiles_once(dataset: str) -> None:
    traces = []

    def step(batch: penstock.Batch) -> tuple[Any, penstock.Batch]:
        traces.append(batch.info)
        return (batch.tokens * batch.loss_mask).sum(), batch

    loader = penstock.jax.Loader(dataset, seq_len=16, batch_size=4, max_documents=40, pad_id=0)
    compiled = jax.jit(step)
    for batch in loader:
        result, same = compiled(batch)
        assert result == (np.asarray(batch.tokens) * np.asarray(batch.loss_mask)).sum()
        assert isinstance(batch.max_seqlen, int)
        assert contents([same])[0] == contents([batch])[0]
        assert (same.info.position, same.info.labels) == (-1, "shifted")
    assert len(traces) == 1


def test_bounds_are_left_out_unless_something_asks_for_them(dataset: str) -> None:
    def fields(**options: Any) -> set[str]:
        return set(next(iter(penstock.jax.Loader(dataset, seq_len=16, batch_size=4, **options))))

    every = {*FIXED_SHAPE, "cu_seqlens", "max_seqlen"}
    assert fields() == set(FIXED_SHAPE)
    assert fields(max_documents=40) == fields(cu_seqlens="batch") == every
    assert fields(fields=["tokens", "cu_seqlens"]) == {"tokens", "cu_seqlens"}
    sharding = one_device_sharding()
    assert fields(sharding=sharding) == set(FIXED_SHAPE)
    assert fields(sharding=sharding, cu_seqlens="row", max_documents=17) == every


def test_the_forms_for_trainers_work_on_jax_arrays(dataset: str) -> None:
    options: dict[str, Any] = {"seq_len": 16, "batch_size": 4, "cu_seqlens": "batch", "dtype": "int32"}
    batch = next(iter(penstock.jax.Loader(dataset, **options)))
    host = next(iter(penstock.Loader(dataset, **options)))
    for form in ("as_huggingface", "as_flash_attention", "as_megatron"):
        assert contents([getattr(batch, form)()]) == contents([getattr(host, form)()])


# Memory that is used again


def test_kept_batches_never_change(dataset: str) -> None:
    options: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "epochs": 40}
    wanted = [batch.tokens.copy() for batch in penstock.Loader(dataset, **options)]
    kept = list(penstock.jax.Loader(dataset, prefetch=2, **options))
    views = [batch.tokens[1:3] for batch in penstock.jax.Loader(dataset, prefetch=2, **options)]
    for host, batch, view in zip(wanted, kept, views, strict=True):
        assert np.array_equal(host, batch.tokens)
        assert np.array_equal(host[1:3], view)


def test_kept_batches_of_worker_processes_never_change(dataset: str) -> None:
    options: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "epochs": 8, "fields": ["tokens"]}
    wanted = contents(penstock.Loader(dataset, **options))
    loader = penstock.jax.Loader(dataset, prefetch=2, **options).map(dict, per="batch", processes=1)
    assert contents(list(loader)) == wanted


@pytest.mark.parametrize("how", ["dropped", "deleted", "donated"])
def test_memory_is_used_again_but_never_under_a_computation(dataset: str, how: str) -> None:
    options: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "epochs": 40, "dtype": "int32"}
    wanted = [(batch.tokens * 2).tolist() for batch in penstock.Loader(dataset, **options)]

    def slow_double(tokens: Any) -> Any:
        return jax.lax.fori_loop(0, 50, lambda _, x: jnp.sort(x, axis=1), tokens) * 0 + tokens * 2

    double = jax.jit(slow_double, donate_argnums=(0,) if how == "donated" else ())
    results, places = [], set()
    for batch in penstock.jax.Loader(dataset, prefetch=2, fields="tokens", **options):
        tokens = batch.tokens
        places.add(tokens.unsafe_buffer_pointer())
        results.append(double(tokens))
        if how == "deleted":
            tokens.delete()
        del tokens, batch
    assert [np.asarray(result).tolist() for result in results] == wanted
    assert len(places) < len(wanted)


# The stream


def test_one_batch_is_made_ahead_and_the_state_is_that_of_the_batch_handed_out(dataset: str) -> None:
    made: list[int] = []

    def note(batch: dict[str, Any]) -> dict[str, Any]:
        made.append(len(made))
        return batch

    loader = penstock.jax.Loader(dataset, seq_len=16, batch_size=4, prefetch=0).map(note, per="batch")
    plain = penstock.Loader(dataset, seq_len=16, batch_size=4)
    iterator, host = iter(loader), iter(plain)
    for handed in range(1, 6):
        next(iterator), next(host)
        assert len(made) == (1 if handed == 1 else handed + 1)
        assert loader.state_dict()["position"] == plain.state_dict()["position"] == 4 * handed


def test_it_resumes_at_every_step(dataset: str) -> None:
    def make() -> penstock.jax.Loader:
        return penstock.jax.Loader(dataset, seq_len=16, batch_size=4, epochs=2)

    everything = contents(make())
    loader = make()
    states = [loader.state_dict()] + [loader.state_dict() for _ in loader]
    for step, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert len(resumed) == len(everything) - step
        assert contents(resumed) == everything[step:]


def test_passes_end_and_begin_as_those_of_the_host_loader(dataset: str) -> None:
    loader = penstock.jax.Loader(dataset, seq_len=16, batch_size=4)
    host = penstock.Loader(dataset, seq_len=16, batch_size=4, fields=FIXED_SHAPE)
    for _ in range(2):
        assert contents(islice(loader, 3)) == contents(islice(host, 3))
        assert contents(loader) == contents(host)
        assert loader.state_dict() == host.state_dict()
    assert (loader.epoch, loader.rows_seen, loader.report()) == (host.epoch, host.rows_seen, host.report())


def test_mixtures_can_be_reweighted(dataset: str) -> None:
    def make(kind: Any) -> Any:
        mixture = penstock.mix({"a": (dataset, 0.5), "b": (dataset, 0.5)})
        return kind(mixture, seq_len=16, batch_size=4, fields=["tokens"])

    both = []
    for kind in (penstock.jax.Loader, penstock.Loader):
        loader = make(kind)
        batches = contents(islice(loader, 3))
        loader.reweight({"a": 1, "b": 9})
        both.append([*batches, *contents(loader)])
    assert both[0] == both[1]


def test_an_error_comes_after_the_batches_before_it(dataset: str) -> None:
    def fail_late(batch: dict[str, Any], rng: Any) -> dict[str, Any]:
        seen.append(1)
        if len(seen) == 4:
            raise ValueError("not this one")
        return batch

    seen: list[int] = []
    loader = penstock.jax.Loader(dataset, seq_len=16, batch_size=4, prefetch=0).map(fail_late, per="batch")
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with pytest.raises(StageError, match="not this one"):
        next(iterator)
    assert loader.state_dict()["position"] == 12
    assert list(iterator) == []


def test_an_interrupted_iteration_gives_no_batch_in_the_wrong_place(dataset: str) -> None:
    def interrupt(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return batch

    seen: list[int] = []
    loader = penstock.jax.Loader(dataset, seq_len=16, batch_size=4, prefetch=0).map(interrupt, per="batch")
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert list(iterator) == []
    assert loader.state_dict()["position"] == 8


# Records


class Samples:
    def __init__(self, **fields: Callable[[int], Any]) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value(index) for name, value in self.fields.items()}


@pytest.mark.parametrize("sharded", [False, True])
def test_samples_become_arrays_and_what_is_no_array_stays(sharded: bool) -> None:
    def convert(batch: dict[str, Any]) -> dict[str, Any]:
        first = batch["image"][:, 0, :2]
        return {
            **batch,
            "half": first.astype(jnp.bfloat16),
            "big_endian": first.astype(">i4"),
            "device": jnp.array(first),
        }

    data = Samples(
        image=lambda i: np.full((2, 3), i, dtype=np.float32), label=lambda i: i, name=lambda i: f"sample {i}"
    )
    sharding = one_device_sharding() if sharded else None
    loader = penstock.jax.Loader(data, batch_size=4, shuffle=False, sharding=sharding)
    batch = list(loader.map(convert, per="batch"))[1]
    assert batch.name == ["sample 4", "sample 5", "sample 6", "sample 7"]
    assert batch.label.tolist() == [4, 5, 6, 7]
    assert {name: (str(batch[name].dtype), batch[name].shape) for name in batch if name != "name"} == {
        "image": ("float32", (4, 2, 3)),
        "label": ("int32", (4,)),
        "half": ("bfloat16", (4, 2)),
        "big_endian": ("int32", (4, 2)),
        "device": ("float32", (4, 2)),
    }
    for name in ("half", "big_endian", "device"):
        assert batch[name][:, 1].tolist() == batch.image[:, 0, 0].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, np.uint64(2**32)])
def test_whole_numbers_that_jax_would_cut_are_refused(value: Any) -> None:
    loader = penstock.jax.Loader(Samples(number=lambda i: value), batch_size=4)
    with pytest.raises(
        SettingsError, match=r"field 'number' is u?int64 with values from .* cut them to u?int32: call"
    ):
        next(iter(loader))


def test_int64_needs_x64(dataset: str) -> None:
    with pytest.raises(
        SettingsError, match="dtype='int64': JAX would cut it to int32; leave dtype out, or call"
    ):
        penstock.jax.Loader(dataset, seq_len=16, batch_size=4, dtype="int64")
    with jax.enable_x64(True):
        batch = next(iter(penstock.jax.Loader(dataset, seq_len=16, batch_size=4, dtype="int64")))
        assert batch.tokens.dtype == jnp.int64


# Settings that cannot work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0, "world_size": 1}, "rank=0 with sharding=: the sharding says which rows; leave rank out"),
        ({"data_world_size": 2}, "data_world_size=2 with sharding="),
        ({"mesh_dim": "data"}, "mesh_dim='data' with sharding="),
        ({"drop_last": False}, "drop_last=False with sharding=: the last batch may not divide"),
        (
            {"fields": ["cu_seqlens"]},
            "cu_seqlens='batch', max_documents=None with sharding=: .* give cu_seqlens='row'",
        ),
        ({"cu_seqlens": "row"}, "cu_seqlens='row', max_documents=None with sharding="),
        ({"max_documents": 40}, "cu_seqlens='batch', max_documents=40 with sharding="),
        ({"sharding": "data"}, "sharding of type str: must be a jax.sharding.NamedSharding"),
        ({"sharding": PartitionSpec("data")}, "must be a jax.sharding.NamedSharding"),
        (
            {"sharding": NamedSharding(AbstractMesh((1,), ("data",)), PartitionSpec("data"))},
            "sharding over AbstractMesh.*: its mesh has no devices",
        ),
    ],
)
def test_settings_that_cannot_be_sharded_are_refused(
    dataset: str, options: dict[str, Any], message: str
) -> None:
    options = {"sharding": one_device_sharding(), "seq_len": 16, "batch_size": 4} | options
    with pytest.raises(SettingsError, match=message):
        penstock.jax.Loader(dataset, **options)


def test_an_open_dimension_is_refused(dataset: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec(PartitionSpec.UNCONSTRAINED))
    with pytest.raises(SettingsError, match="say how each dimension is divided"):
        penstock.jax.Loader(dataset, sharding=sharding, seq_len=16, batch_size=4)


def test_ragged_fields_cannot_be_sharded(dataset: str) -> None:
    loader = penstock.jax.Loader(dataset, sharding=one_device_sharding(), batch_size=4)
    with pytest.raises(
        SettingsError, match=r"field 'tokens' has shape .*, not one item for each of the 4 rows"
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("needed", "ranks"),
    [
        ({0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ({0: {1, 3}, 1: {0, 2}}, [(1, 2), (0, 2)]),
        ({0: {0}, 1: {0}}, [(0, 1), (0, 1)]),
    ],
)
def test_processes_that_need_the_same_rows_share_a_data_rank(
    needed: dict[int, set[int]], ranks: list[tuple[int, int]]
) -> None:
    worlds = [data_world(needed, process) for process in needed]
    assert [(world.rank, world.size) for world in worlds] == ranks


@pytest.mark.parametrize("needed", [{0: {0, 1}, 1: {1, 2}}, {0: {0}, 1: {1, 2}}, {0: {0, 1}, 1: {0}}])
def test_processes_whose_rows_overlap_are_refused(needed: dict[int, set[int]]) -> None:
    with pytest.raises(SettingsError, match="any two must need the same or none in common"):
        data_world(needed, 0)


def test_without_jax_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['jax'] = None\n"
        "from penstock.errors import MissingExtraError\n"
        "try:\n    import penstock.jax\nexcept MissingExtraError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "penstock.jax needs JAX: pip install penstock[jax]\n"


# Four devices in one process, and in two


def run_job(dataset: str, processes: int, environment: dict[str, str]) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, str(JOB), dataset, str(process), str(processes), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "JAX_PLATFORMS": "cpu"},
        )
        for process in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=JOB_SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    for process, (_, errors) in zip(running, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def reports(
    request: pytest.FixtureRequest, dataset: str, child_environment: dict[str, str]
) -> list[dict[str, Any]]:
    return run_job(dataset, request.param, child_environment)


def whole(reports: list[dict[str, Any]], layout: str, step: int, name: str) -> Any:
    """The global array from all its shards; replicas must agree."""
    shards = [shard for report in reports for shard in report["layouts"][layout]["batches"][step][name]]
    assert sorted(shard["device"] for shard in shards) == sorted({shard["device"] for shard in shards})
    assert len(shards) == 4
    (rows, columns) = (max(shard["index"][axis][1] for shard in shards) for axis in (0, 1))
    array = np.full((rows, columns), -1)
    for shard in shards:
        (top, bottom), (left, right) = shard["index"]
        place = array[top:bottom, left:right]
        values = np.array(shard["values"], dtype=np.int64)
        assert ((place == -1) | (place == values)).all()
        array[top:bottom, left:right] = values
    return array


@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_arrays_hold_the_rows_of_the_global_batch(
    reports: list[dict[str, Any]], dataset: str, layout: str
) -> None:
    ranks = reports[0]["layouts"][layout]["ranks"]
    shared = len(reports) == 1 or layout in ("model over processes", "replicated")
    assert ranks == (1 if shared else 2)
    assert [report["layouts"][layout]["rank"] for report in reports] == (
        [0] * len(reports) if shared else [0, 1]
    )
    host = penstock.Loader(
        dataset, seq_len=16, batch_size=4 * ranks, cu_seqlens="row", max_documents=16, rank=0, world_size=1
    )
    for step, batch in enumerate(islice(host, 3)):
        for name in (*FIXED_SHAPE, "cu_seqlens"):
            found, wanted = whole(reports, layout, step, name), batch[name]
            if layout == "interleaved" and ranks > 1:
                found, wanted = found[np.lexsort(found.T)], wanted[np.lexsort(wanted.T)]
            assert np.array_equal(found, wanted), (step, name)
        total = int(batch.tokens.sum() + batch.labels.max())
        assert [report["layouts"][layout]["totals"][step] for report in reports] == [total] * len(reports)


def test_shards_lie_on_the_devices_of_their_rows(reports: list[dict[str, Any]]) -> None:
    def rows(layout: str) -> dict[int, list[int]]:
        found = [s for report in reports for s in report["layouts"][layout]["batches"][0]["tokens"]]
        order = {device: n for n, device in enumerate(sorted(shard["device"] for shard in found))}
        return {order[shard["device"]]: shard["index"][0] for shard in found}

    one, half = (1, 2) if len(reports) == 1 else (2, 4)
    assert rows("data") == {n: [n * one, (n + 1) * one] for n in range(4)}
    assert rows("data and model") == {0: [0, half], 1: [0, half], 2: [half, 2 * half], 3: [half, 2 * half]}
    assert rows("model over processes") == {0: [0, 2], 1: [2, 4], 2: [0, 2], 3: [2, 4]}


def test_every_process_has_the_same_state_and_fields_and_any_loader_goes_on_with_it(
    reports: list[dict[str, Any]], dataset: str
) -> None:
    for layout in LAYOUTS:
        (state, *others) = [report["layouts"][layout]["state"] for report in reports]
        assert all(other == state for other in others)
        ranks = reports[0]["layouts"][layout]["ranks"]
        assert state["position"] == 2 * 4 * ranks
        assert ("max_seqlen" in reports[0]["layouts"][layout]["fields"]) == (ranks == 1)
    loader = penstock.Loader(dataset, seq_len=16, batch_size=4 * ranks, rank=0, world_size=1)
    loader.load_state_dict(state)
    assert np.array_equal(next(iter(loader)).tokens, whole(reports, "replicated", 2, "tokens"))


def test_sharded_batches_never_change_under_their_users(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["hammered"]["batches"] > 100
        assert (report["hammered"]["kept"], report["hammered"]["deleted"]) == (0, 0)


def test_a_mesh_with_explicit_axes_shows_in_the_type(reports: list[dict[str, Any]]) -> None:
    rows = 4 * len(reports)
    assert {report["explicit"]["type"] for report in reports} == {f"int32[{rows}@data,16]"}
    assert len({report["explicit"]["total"] for report in reports}) == 1


def test_without_a_sharding_each_process_is_a_rank(reports: list[dict[str, Any]], dataset: str) -> None:
    for number, report in enumerate(reports):
        rank, ranks, tokens = report["unsharded"]
        assert (rank, ranks) == (number, len(reports))
        host = penstock.Loader(dataset, seq_len=16, batch_size=4, rank=rank, world_size=ranks)
        assert next(iter(host)).tokens.tolist() == tokens


def test_what_does_not_divide_over_the_mesh_is_refused_with_the_numbers(
    reports: list[dict[str, Any]],
) -> None:
    first, last = reports[0]["refusals"], reports[-1]["refusals"]
    each = 4 // len(reports)
    assert first["batch"] == (
        f"batch_size=3: the rows of a data rank are divided over {each} shards (mesh axes ('data',), 4 shards, "
        f"{len(reports)} data ranks); give a multiple of {each}"
    )
    assert first["sequence"] == (
        "seq_len=15: rows are divided into 2 parts (mesh axes ('sequence',)); give a multiple of 2"
    )
    assert "give cu_seqlens='row' and max_documents" in first["bounds"]
    assert "give cu_seqlens='row' and max_documents" in first["room"]
    assert last["elsewhere"] == ""
    if len(reports) == 1:
        assert (first["longest"], first["uneven"]) == ("", "")
        return
    assert first["longest"].startswith(
        "fields with max_seqlen on 2 data ranks: each would have another number"
    )
    assert first["elsewhere"].startswith("sharding: process 0 has none of the mesh's devices")
    assert "processes need the shards of rows (0, 1), (2,)" in first["uneven"]


def test_copies_to_the_devices_are_counted(dataset: str) -> None:
    loader = penstock.jax.Loader(dataset, seq_len=16, batch_size=2)
    count = sum(1 for _ in loader)
    assert loader.stats().batches == count
    assert loader.stats().stages["copy"].count == count
