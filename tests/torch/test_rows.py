"""Rows by number, through real DataLoaders: every row once, whoever mixes and whoever works."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import FieldError, SettingsError
from tests.properties import examples

pytest.importorskip("torch", reason="needs torch")

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

from headrace.torch import RowDataset

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

FIELDS = ["tokens", "labels", "position_ids", "segment_ids", "loss_mask"]
SEQ_LEN = 16


def dataset(documents: int = 90, seed: int = 0) -> headrace.Dataset:
    """Every token of it is another number."""
    lengths = np.random.default_rng(seed).integers(1, 30, documents)
    ends = np.cumsum(lengths) + 1
    return headrace.from_arrays(
        {"tokens": [np.arange(end - n, end, dtype=np.uint16) for n, end in zip(lengths, ends, strict=True)]}
    )


def tokens_of(batches: Any) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for batch in batches for row in batch["tokens"]]


def loaded(data: Any, **options: Any) -> list[dict[str, Any]]:
    """The rows that a plain Loader gives."""
    loader = headrace.Loader(data, batch_size=3, drop_last=False, **options)
    fields = [name for name in FIELDS if name in (options.get("fields") or FIELDS)]
    return [
        {name: batch[name][row].copy() for name in fields}
        for batch in loader
        for row in range(batch.info.rows)
    ]


def assert_same(item: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(item) == list(wanted)
    for name, value in wanted.items():
        assert isinstance(item[name], Tensor)
        np.testing.assert_array_equal(item[name].numpy(), value, err_msg=name)


@pytest.mark.parametrize("packing", ["best-fit", "windows", "pad"])
@pytest.mark.parametrize("shuffle", ["none", "global", "block"])
def test_item_p_is_row_p_of_the_loader(packing: str, shuffle: str) -> None:
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "packing": packing, "shuffle": shuffle, "seed": 5}
    wanted = loaded(dataset(), epochs=2, **options)
    rows = RowDataset(dataset(), **options)
    assert 2 * len(rows) == len(wanted)
    for epoch in (0, 1):
        rows.set_epoch(epoch)
        for number in range(len(rows)):
            assert_same(rows[number], wanted[epoch * len(rows) + number])
    assert_same(RowDataset(dataset(), epoch=1, **options)[-1], wanted[-1])


@examples(30)
@given(st.lists(st.integers(-60, 59), max_size=12))
def test_many_rows_at_once_are_the_same_as_one_by_one(numbers: list[int]) -> None:
    rows = RowDataset(dataset(), seq_len=SEQ_LEN, shuffle="global", fields=["tokens", "segment_ids"])
    assert len(rows) >= 60
    for number, item in zip(numbers, rows.__getitems__(numbers), strict=True):
        assert_same(item, {name: value.numpy() for name, value in rows[number].items()})


def test_items_may_be_held_for_any_time() -> None:
    rows = RowDataset(dataset(), seq_len=SEQ_LEN)
    items = [rows[number] for number in range(len(rows))]
    for item, wanted in zip(items, loaded(dataset(), seq_len=SEQ_LEN, shuffle="none"), strict=True):
        assert_same(item, wanted)


def test_mixtures_have_rows_too() -> None:
    mixed = headrace.mix({"web": (dataset(), 0.7), "code": (dataset(40), 0.3)})
    rows = RowDataset(mixed, seq_len=SEQ_LEN, shuffle="global")
    wanted = loaded(mixed, seq_len=SEQ_LEN)
    for item, expected in zip(rows.__getitems__(range(len(rows))), wanted, strict=True):
        assert_same(item, expected)


# Through a DataLoader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stock_dataloader_gives_every_row_once(workers: int, shuffle: bool) -> None:
    rows = RowDataset(dataset(), seq_len=SEQ_LEN)
    stock = DataLoader(rows, batch_size=7, shuffle=shuffle, num_workers=workers)
    batches = list(stock)
    wanted = [tuple(row["tokens"].tolist()) for row in loaded(dataset(), seq_len=SEQ_LEN, shuffle="none")]
    assert list(batches[0]) == FIELDS
    assert batches[0]["tokens"].shape == (7, SEQ_LEN)
    assert (tokens_of(batches) == wanted) is not shuffle
    assert sorted(tokens_of(batches)) == sorted(wanted)


def test_workers_may_be_fresh_interpreters(
    tmp_path: Path, write_dataset: Callable[..., Any], forkserver: Any
) -> None:
    shards = [[{"tokens": list(range(n + 1))} for n in range(part, part + 40)] for part in (0, 40)]
    write_dataset(tmp_path / "data", {"tokens": "uint16[*]"}, shards)
    rows = RowDataset(tmp_path / "data", seq_len=SEQ_LEN, shuffle="global", epoch=3)
    stock = DataLoader(rows, batch_size=50, num_workers=1, multiprocessing_context=forkserver)
    assert tokens_of(stock) == [
        tuple(item["tokens"].tolist()) for item in rows.__getitems__(range(len(rows)))
    ]


def test_workers_that_stay_see_the_next_epoch() -> None:
    rows = RowDataset(dataset(), seq_len=SEQ_LEN, shuffle="global")
    stock = DataLoader(rows, batch_size=7, num_workers=1, persistent_workers=True)
    wanted = [tuple(row["tokens"].tolist()) for row in loaded(dataset(), seq_len=SEQ_LEN, epochs=3)]
    found = []
    for epoch in range(3):
        rows.set_epoch(epoch)
        found += tokens_of(stock)
    assert found == wanted


def test_ranks_of_a_distributed_sampler_share_the_rows() -> None:
    rows = RowDataset(dataset(), seq_len=SEQ_LEN)
    found: list[tuple[int, ...]] = []
    for rank in range(3):
        sampler: Any = DistributedSampler(rows, num_replicas=3, rank=rank, shuffle=True, drop_last=True)
        found += tokens_of(DataLoader(rows, batch_size=4, sampler=sampler))
    assert len(found) == len(rows) // 3 * 3 == len(set(found))
    assert set(found) <= {tuple(item["tokens"].tolist()) for item in rows.__getitems__(range(len(rows)))}


def test_a_part_of_the_rows_is_a_dataset() -> None:
    rows = RowDataset(dataset(), seq_len=SEQ_LEN)
    part = DataLoader(Subset(rows, range(5, 9)), batch_size=2)
    assert tokens_of(part) == [tuple(rows[number]["tokens"].tolist()) for number in range(5, 9)]


# Other contents


def test_cu_seqlens_come_when_they_have_one_size() -> None:
    rows = RowDataset(dataset(), seq_len=SEQ_LEN, packing="pad", max_documents=3)
    batch = next(iter(DataLoader(rows, batch_size=6)))
    assert set(batch) == {*FIELDS, "cu_seqlens"}
    assert batch["cu_seqlens"].shape == (6, 4)
    for bounds, segments in zip(batch["cu_seqlens"], batch["segment_ids"], strict=True):
        lengths = torch.diff(bounds)
        assert int(bounds[-1]) == SEQ_LEN
        assert (
            lengths[lengths > 0].tolist()
            == torch.unique_consecutive(segments, return_counts=True)[1].tolist()
        )


def test_only_the_fields_that_were_asked_for_come() -> None:
    rows = RowDataset(dataset(), seq_len=SEQ_LEN, fields=["labels", "tokens"], dtype=torch.int32)
    assert {name: value.dtype for name, value in rows[3].items()} == dict.fromkeys(FIELDS[:2], torch.int32)


@pytest.mark.parametrize("workers", [0, 2])
def test_without_seq_len_items_are_records(workers: int) -> None:
    data = headrace.from_arrays(
        {
            "image": np.arange(60, dtype=np.uint16).reshape(10, 2, 3),
            "label": np.arange(10, dtype=np.int64),
            "name": [str(number).encode() for number in range(10)],
        }
    )
    batches = list(DataLoader(RowDataset(data), batch_size=5, num_workers=workers))
    assert batches[1]["label"].tolist() == [5, 6, 7, 8, 9]
    assert batches[1]["name"] == [b"5", b"6", b"7", b"8", b"9"]
    assert (batches[0]["image"].dtype, batches[0]["image"].shape) == (torch.int32, (5, 2, 3))
    assert sorted(int(item["label"]) for item in RowDataset(data, shuffle="global", seed=3)) == list(
        range(10)
    )


def test_rows_can_be_pickled() -> None:
    rows = RowDataset(dataset(), seq_len=SEQ_LEN, shuffle="global", epoch=4)
    _ = rows[0]
    other = pickle.loads(pickle.dumps(rows))
    assert (repr(other), other.epoch, len(other)) == (repr(rows), 4, len(rows))
    assert_same(other[7], {name: value.numpy() for name, value in rows[7].items()})


# What cannot work


def test_numbers_out_of_range_are_index_errors() -> None:
    rows: Any = RowDataset(dataset(), seq_len=SEQ_LEN)
    for number in (len(rows), -len(rows) - 1):
        with pytest.raises(
            IndexError, match=f"row {number} is out of range for an epoch of {len(rows)} rows"
        ):
            rows[number]
    assert_same(rows[torch.tensor(2)], {name: value.numpy() for name, value in rows[2].items()})
    with pytest.raises(TypeError):
        rows["2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": ["tokens", "cu_seqlens"]}, "give max_documents"),
        ({"fields": ["max_seqlen"]}, "belongs to a batch"),
        ({"fields": ["nonsense"]}, "must be some of"),
        ({"batch_size": 3}, "batch_size: a RowDataset has no such setting"),
        ({"epochs": 3}, "epochs: a RowDataset has no such setting"),
        ({"epoch": -1}, "epoch=-1: must be a whole number"),
        ({"epoch": True}, "epoch=True: must be"),
        ({"packing": "tight"}, "packing='tight'"),
    ],
)
def test_settings_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        RowDataset(dataset(), **{"seq_len": SEQ_LEN, **options})


def test_a_field_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FieldError, match="the dataset has no 'image'; its fields are 'tokens'"):
        RowDataset(dataset(), fields=["image"])
