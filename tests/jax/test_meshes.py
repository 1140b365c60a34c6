"""Global arrays over meshes of four devices, in one process and in two."""

import functools
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

import headrace

pytest.importorskip("jax", reason="needs jax")

from tests.jax.contents import FIXED_SHAPE

JOB = Path(__file__).with_name("multi_process_job.py")
JOB_SECONDS = 100
LAYOUTS = (
    "data",
    "data and model",
    "model over processes",
    "interleaved",
    "both axes",
    "sequence",
    "replicated",
)


def run_job(dataset: str, processes: int, environment: dict[str, str]) -> list[dict[str, Any]]:
    with socket.socket() as reserved:
        # Open until the job is over: JAX can share the port with it, and nobody else gets it meanwhile.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
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


@pytest.fixture(scope="module")
def reports_of(dataset: str, child_environment: dict[str, str]) -> Callable[[int], list[dict[str, Any]]]:
    """One job for each number of processes, whatever the order of the tests."""
    return functools.cache(lambda processes: run_job(dataset, processes, child_environment))


@pytest.fixture(params=[1, 2], ids=["one process", "two processes"])
def reports(
    request: pytest.FixtureRequest, reports_of: Callable[[int], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    return reports_of(request.param)


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
    host = headrace.Loader(
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
    loader = headrace.Loader(dataset, seq_len=16, batch_size=4 * ranks, rank=0, world_size=1)
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
        host = headrace.Loader(dataset, seq_len=16, batch_size=4, rank=rank, world_size=ranks)
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
        "fields with max_seqlen on 2 data ranks: each rank would have a different value"
    )
    assert first["elsewhere"].startswith("sharding: process 0 has none of the mesh's devices")
    assert "processes need the shards of rows (0, 1), (2,)" in first["uneven"]
