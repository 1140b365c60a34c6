"""Loading from a bucket through faults, with a cache and with workers: the rows are right, or the error is clear."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import headrace
import headrace.torch
from headrace.errors import CorruptError, RebuiltError
from headrace.store.address import open_store
from headrace.store.fetching import fetching
from tests.fault_proxy import Answer, FaultProxy, Flip, Hold, Reset, Truncate
from tests.load.remote_data import put, same, write_local

OPTIONS: dict[str, Any] = {"batch_size": 4, "seq_len": 128, "fields": ("tokens",)}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_local(tmp_path_factory.mktemp("remote") / "data")


@pytest.fixture
def remote(local: Path, s3_place: str) -> str:
    return put(local, s3_place)


def tokens(data: Any, **options: Any) -> list[Any]:
    return [batch["tokens"].tolist() for batch in headrace.Loader(data, **{**OPTIONS, **options})]


def test_opening_needs_few_requests_and_no_shard(remote: str, fault_proxy: FaultProxy) -> None:
    dataset = headrace.open(remote)
    # The manifest; then the units, and the number of rows in each of them for the usual lengths of rows.
    assert fault_proxy.requests == {"GET": 3}
    loader = headrace.Loader(dataset, batch_size=4, seq_len=1024)
    assert loader.rows_per_epoch > 0
    assert fault_proxy.requests == {"GET": 3}
    assert not [request for request in fault_proxy.log if re.search("shard-|index-", request.path)]


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_the_first_batch_reads_its_own_rows_first(remote: str, fault_proxy: FaultProxy, share: float) -> None:
    whole = tokens(remote)
    loader = headrace.Loader(remote, **OPTIONS)
    position = int(loader.rows_per_epoch * share) // 4 * 4
    loader.load_state_dict({**loader.state_dict(), "position": position})
    fault_proxy.clear()
    first = next(iter(loader))
    assert first["tokens"].tolist() == whole[position // 4]


def test_flipped_bytes_are_fetched_once_more(local: Path, remote: str, fault_proxy: FaultProxy) -> None:
    expected, repeated = tokens(local, shuffle="units"), 0
    for place, skip in ((0, 0), (8000, 4), (16385, 9), (1, 20)):
        fault_proxy.add(Flip(place), method="GET", path="shard-", count=1, skip=skip)
        dataset = headrace.open(remote)
        assert tokens(dataset) == expected
        repeated += dataset.source.reads.traffic.repeated  # type: ignore[attr-defined]
    # Some wrong bytes lie between pieces that were fetched together, where nobody needs them.
    assert repeated >= 1


def test_bytes_that_stay_wrong_are_an_error_that_names_them(remote: str, fault_proxy: FaultProxy) -> None:
    fault_proxy.add(Flip(100), method="GET", path="shard-", count=10**6)
    with pytest.raises(CorruptError, match=r"s3://.*shard-.*: bytes \d+ to \d+ do not match their checksum"):
        tokens(remote)


def test_rows_are_unchanged_through_faults(local: Path, remote: str, fault_proxy: FaultProxy) -> None:
    fault_proxy.add(Answer(503, "SlowDown"), method="GET", path="shard-", count=5)
    fault_proxy.add(Truncate(1000), method="GET", path="shard-", count=3)
    fault_proxy.add(Reset(), method="GET", path="shard-", count=3)
    fault_proxy.add(Answer(400, "RequestTimeout"), method="GET", path="shard-", count=2)
    assert tokens(remote) == tokens(local, shuffle="units")


def test_a_second_epoch_comes_from_the_cache(
    local: Path, remote: str, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    def shard_requests() -> int:
        return sum("shard-" in request.path for request in fault_proxy.log)

    where = {"cache": tmp_path / "cache", "cache_bytes": 10**8}
    for record in headrace.open(remote, **where):
        assert record["tokens"].dtype == np.uint16
    fetched = shard_requests()
    assert tokens(headrace.open(remote, **where), epochs=2) == tokens(local, shuffle="units", epochs=2)
    assert shard_requests() == fetched


def test_a_cache_that_is_too_small_changes_nothing(local: Path, remote: str, tmp_path: Path) -> None:
    dataset = headrace.open(remote, cache=tmp_path / "cache", cache_bytes=60_000)
    assert tokens(dataset, epochs=2) == tokens(local, shuffle="units", epochs=2)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_workers_load_remote_data(local: Path, remote: str, kind: Literal["thread", "process"]) -> None:
    """Processes are forked from this one, which has read from the object store before."""
    near, far = (
        [
            [record["label"] for record in batch]
            for batch in headrace.torch.DataLoader(
                headrace.open(place), batch_size=4, num_workers=2, worker_kind=kind, collate_fn=list
            )
        ]
        for place in (local, remote)
    )
    assert near == far


def test_forked_processes_do_not_wait_for_what_their_parent_is_fetching(
    local: Path, remote: str, fault_proxy: FaultProxy
) -> None:
    """The threads that fetch ahead in the parent do not exist in a process that is forked from it."""
    dataset = headrace.open(remote, cache="off")
    labels = [record["label"] for record in headrace.open(local)]
    part = dataset.part(0)
    release = threading.Event()
    fault_proxy.add(Hold(release), method="GET", path="shard-", count=2)
    part.fetch_ahead(["label"], fetching().ahead)
    while not [request for request in fault_proxy.log if "shard-" in request.path]:
        time.sleep(0.01)
    child = os.fork()
    if not child:
        signal.alarm(90)  # a hang ends the child
        fine = False
        try:
            fine = part["label"].tolist() == labels[: len(part["label"])]
        finally:
            os._exit(0 if fine else 1)
    # The child's own request may be the second one that is held.
    while len([request for request in fault_proxy.log if "shard-" in request.path]) < 2:
        time.sleep(0.01)
    release.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert part["label"].tolist() == labels[: len(part["label"])]


def test_worker_processes_of_a_loader_load_remote_data(local: Path, remote: str) -> None:
    near, far = (
        [
            batch["tokens"].tolist()
            for batch in headrace.Loader(place, **OPTIONS, shuffle="units").map(same, processes=2)
        ]
        for place in (local, remote)
    )
    assert near == far


def test_ranks_get_all_rows_once(local: Path, remote: str) -> None:
    alone = headrace.Loader(local, batch_size=6, shuffle="units", fields=("label",))
    expected = [sorted(batch["label"].tolist()) for batch in alone]
    ranks = [
        headrace.Loader(remote, batch_size=2, fields=("label",), rank=rank, world_size=3) for rank in range(3)
    ]
    got = [
        sorted(np.concatenate([batch["label"] for batch in step]).tolist())
        for step in zip(*ranks, strict=True)
    ]
    assert got == expected


def test_a_dataset_that_is_replaced_is_noticed(remote: str, tmp_path: Path) -> None:
    dataset = headrace.open(remote)
    store = open_store(remote)
    for name in store.files():
        if name.startswith("shard-"):
            store.remove(name)
    put(write_local(tmp_path / "other", records=3), remote)
    with pytest.raises(RebuiltError, match="was rebuilt since it was opened"):
        dataset[0]


def test_a_loop_that_is_left_early_leaves_no_requests_behind(remote: str) -> None:
    loader = headrace.Loader(remote, **OPTIONS)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    before = {thread.name for thread in threading.enumerate()}
    assert not [name for name in before if name.startswith("headrace-load")]


def test_a_manifest_that_is_changed_on_its_way_is_fetched_once_more(
    local: Path, remote: str, fault_proxy: FaultProxy
) -> None:
    for at in (0, 5, 30, 60, 200):
        fault_proxy.clear()
        fault_proxy.add(Flip(at), path="headrace.json", count=1)
        assert len(headrace.open(remote)) == len(headrace.open(local))
    fault_proxy.clear()
    fault_proxy.add(Flip(100), path="headrace.json")
    with pytest.raises(CorruptError, match="damaged manifest"):
        headrace.open(remote)


def test_a_damaged_file_of_the_cache_is_fetched_again(local: Path, remote: str, tmp_path: Path) -> None:
    """Also one that was written since the machine was started."""
    cache = tmp_path / "cache"
    expected = tokens(headrace.open(remote, cache=cache))
    files = [path for path in sorted((cache / "data").rglob("*")) if path.is_file()]
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    dataset = headrace.open(remote, cache=cache)
    assert tokens(dataset) == expected
    assert dataset.source.reads.traffic.bytes > 0
    again = headrace.open(remote, cache=cache)
    assert tokens(again) == expected
    assert again.source.reads.traffic.requests == 0


def test_after_the_beginning_only_whole_units_are_fetched(remote: str) -> None:
    """Also of units that the first batch has read single rows of."""
    dataset = headrace.open(remote, cache="off")
    batches = iter(headrace.Loader(dataset, **{**OPTIONS, "batch_size": 128, "prefetch": 0}))
    traffic = dataset.source.reads.traffic
    next(batches)
    requests_of_first = traffic.requests
    assert sum(1 for _ in batches) > 1
    # One for the data and one for the offsets of each unit, or both at once.
    assert traffic.requests <= requests_of_first + 2 * dataset.source.units.count
