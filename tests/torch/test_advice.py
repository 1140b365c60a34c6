"""Findings about DataLoaders: where they must be, where they must not, and what is left to PyTorch to say."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.observe import advice, host
from headrace.observe.findings import NotLooked

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.utils.data import BatchSampler, RandomSampler, Subset, TensorDataset
from torch.utils.data import DataLoader as Stock

from headrace.observe.rules import copied_data, examine, in_ram
from headrace.torch import DataLoader, Loader, RowDataset
from headrace.torch.advice import facts_of_dataloader, takes_in_random_order

NUMBERS = TensorDataset(torch.arange(64))


def examine_dataloader(loader: Any) -> Any:
    return examine(facts_of_dataloader(loader))


class Own(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """A process that has said nothing yet, on a machine of 4 cores with an accelerator."""
    for name in (advice.VARIABLE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(advice, "_said", advice._Said())
    monkeypatch.setattr(advice, "watch_cpu", advice.WatchCpu())
    monkeypatch.setattr(logging.getLogger("headrace.advice"), "disabled", False)
    monkeypatch.setattr(host, "accelerator_available", lambda: True)
    monkeypatch.setattr(host, "useful_cores", lambda: 4.0)
    monkeypatch.setattr(host, "allowed_cores", lambda: 4)
    monkeypatch.setattr(host, "available_bytes", lambda: 10**12)
    caplog.set_level(logging.WARNING, "headrace.advice")
    return caplog


def found(loader: Any, name: str) -> str | None:
    """The finding's text; None if there is none."""
    outcome = examine_dataloader(loader)[name]
    assert not isinstance(outcome, NotLooked), outcome
    return str(outcome[0]) if outcome else None


def names_said(said: Any) -> list[str]:
    return [record.message.partition('silence("')[2].partition('"')[0] for record in said.records]


@pytest.mark.parametrize("kind", [Stock, DataLoader])
def test_batch_size(kind: Any) -> None:
    assert "Batches of 30" in str(found(kind(NUMBERS, batch_size=30), "batch-size"))
    assert found(kind(NUMBERS, batch_size=32), "batch-size") is None
    batches = BatchSampler(RandomSampler(NUMBERS), 30, drop_last=True)
    outcome = examine_dataloader(kind(NUMBERS, batch_sampler=batches))["batch-size"]
    assert isinstance(outcome, NotLooked)


def test_workers_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Stock(NUMBERS, num_workers=2)
    assert found(loader, "workers") is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "num_workers=1 or fewer" in str(found(loader, "workers"))


def test_pageable_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pin_memory=True" in str(found(Stock(NUMBERS), "pageable-copies"))
    assert found(Stock(NUMBERS, pin_memory=True), "pageable-copies") is None
    on_device = TensorDataset(torch.empty(8, device="meta"))
    assert found(Stock(on_device), "pageable-copies") is None
    monkeypatch.setattr(host, "accelerator_available", lambda: False)
    assert isinstance(examine_dataloader(Stock(NUMBERS))["pageable-copies"], NotLooked)


def test_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(Stock(NUMBERS, pin_memory=True), "pinned-memory") is None
    monkeypatch.setattr(host, "accelerator_available", lambda: False)
    assert found(Stock(NUMBERS), "pinned-memory") is None
    assert "without an accelerator" in str(found(Stock(NUMBERS, pin_memory=True), "pinned-memory"))


def test_a_batched_way_is_known_for_arrays_and_our_own_datasets() -> None:
    records = headrace.from_arrays({"x": np.arange(64)})
    for dataset in (
        NUMBERS,
        Subset(NUMBERS, [1, 2]),
        torch.arange(9),
        np.arange(9),
        records,
        RowDataset(records),
    ):
        assert "taken apart into 4 samples" in str(found(Stock(dataset, batch_size=4), "sample-by-sample"))


def test_where_there_is_none_or_it_is_used_nothing_is_said() -> None:
    batches = BatchSampler(RandomSampler(NUMBERS), 8, drop_last=True)
    for loader in (
        Stock(Own(), batch_size=4),
        Stock(NUMBERS, batch_size=4, collate_fn=list),
        Stock(NUMBERS, batch_size=None, sampler=batches),
    ):
        assert found(loader, "sample-by-sample") is None


@pytest.fixture
def mapped(tmp_path: Path) -> np.ndarray:
    (tmp_path / "bytes.bin").write_bytes(bytes(20_000_000))
    return np.memmap(tmp_path / "bytes.bin", dtype=np.uint8, mode="r")


def test_maps_that_are_pickled(mapped: np.ndarray) -> None:
    dataset = Own(pixels=mapped)
    spawned = {"num_workers": 2, "multiprocessing_context": "spawn"}
    assert "pixels: 20 MB) are read into memory whole, for each of 2" in str(
        found(Stock(dataset, **spawned), "pickled-maps")
    )
    assert "once" in str(found(DataLoader(dataset, **spawned), "pickled-maps"))
    assert found(Stock(dataset, num_workers=2, multiprocessing_context="fork"), "pickled-maps") is None
    assert found(Stock(Own(path="bytes.bin"), **spawned), "pickled-maps") is None
    for loader in (Stock(dataset), DataLoader(dataset, num_workers=2, worker_kind="thread")):
        assert isinstance(examine_dataloader(loader)["pickled-maps"], NotLooked)


def test_data_that_every_worker_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for rule in (copied_data, in_ram):
        monkeypatch.setattr(rule, "LARGE_BYTES", 1_000_000)
    spawned = {"num_workers": 2, "multiprocessing_context": "spawn"}
    forked = {"num_workers": 2, "multiprocessing_context": "fork"}
    table, words = Own(table=np.zeros(10**6)), Own(words=[str(number) for number in range(50_000)])
    assert "table: 8 MB" in str(found(Stock(table, **spawned), "copied-data"))
    assert found(DataLoader(table, **spawned), "copied-data") is None
    assert found(Stock(table, **forked), "copied-data") is None
    assert "words" in str(found(Stock(words, **forked), "copied-data"))
    assert found(Stock(Own(few=[1, 2]), **spawned), "copied-data") is None


def test_data_that_leaves_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for rule in (copied_data, in_ram):
        monkeypatch.setattr(rule, "LARGE_BYTES", 1_000_000)
    loader = Stock(Own(table=np.zeros(10**6)))
    assert found(loader, "in-ram") is None
    monkeypatch.setattr(host, "memory_bytes", lambda: 12_000_000)
    assert "8.0 MB, of 12.0 MB" in str(found(loader, "in-ram"))


def test_streams_that_would_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 100)
    loader = Stock(headrace.stream(str(tmp_path / "a.jsonl")), batch_size=4)
    assert "headrace build" in str(found(loader, "streamed"))
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    assert found(loader, "streamed") is None
    assert found(Stock(NUMBERS), "streamed") is None


def test_which_orders_are_random() -> None:
    assert takes_in_random_order(Stock(NUMBERS, shuffle=True))
    assert not takes_in_random_order(Stock(NUMBERS))
    assert not takes_in_random_order(Stock(NUMBERS, sampler=range(4)))
    shards = torch.utils.data.distributed.DistributedSampler(NUMBERS, 1, 0, shuffle=False)
    assert not takes_in_random_order(Stock(NUMBERS, sampler=shards))


# While training


def test_an_iteration_says_it_once(said: Any) -> None:
    loader = DataLoader(NUMBERS, batch_size=30)
    for _ in range(2):
        assert len(list(loader)) == 3
    list(DataLoader(NUMBERS, batch_size=30))
    assert names_said(said) == ["batch-size", "pageable-copies"]


def test_a_loader_that_is_well_says_nothing(said: Any) -> None:
    advice.advise_all(examine_dataloader(DataLoader(NUMBERS, batch_size=32, pin_memory=True)))
    assert names_said(said) == []


def test_nothing_about_accelerators_without_one(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "accelerator_available", lambda: False)
    list(DataLoader(NUMBERS, batch_size=30))
    assert names_said(said) == []


def test_what_pytorch_warns_of_is_left_to_it(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 4)
    with pytest.warns(UserWarning, match="5 worker processes"):
        loader = DataLoader(NUMBERS, batch_size=32, num_workers=5, pin_memory=True)
    advice.advise_on(loader, headrace.torch.advice._unsaid)
    assert names_said(said) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    advice.advise_on(
        DataLoader(NUMBERS, batch_size=32, num_workers=4, pin_memory=True), headrace.torch.advice._unsaid
    )
    assert names_said(said) == ["workers"]


def test_a_loader_of_tensors_on_the_cpu_beside_an_accelerator(said: Any) -> None:
    data = headrace.from_arrays({"x": np.arange(64)})
    next(iter(Loader(data, batch_size=8)))
    assert names_said(said) == ["pageable-copies"]


def test_the_processor_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(
        "headrace.torch.iterators.watch_cpu", type("", (), {"look": lambda self: looked.append(1)})()
    )
    list(DataLoader(TensorDataset(torch.arange(3 * advice.LOOK_EVERY - 1))))
    assert len(looked) == 2
