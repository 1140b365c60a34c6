"""What an order of remote data costs: against counting everything, against real requests, and for 640 GB."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace
from headrace.cli.remote_view import cost_lines
from headrace.format import units as format_units
from headrace.format.blocks import BLOCK_BYTES, SECTION
from headrace.format.fields import parse_fields
from headrace.format.units import Units
from headrace.measure.doctor.remote_cost import RemoteCost, cost_of, costs_by_default, remote_costs
from headrace.measure.doctor.remote_layout import Layout
from headrace.order.mixture import Stages
from headrace.order.shuffle import Shuffle
from headrace.order.stream import RowStream
from headrace.rows.kernel import permute
from tests.uploads import upload

Numbers = NDArray[np.int64]
SEQ_LEN, DOCUMENT_TOKENS = 2048, 1000


def units_of_tokens(shards: int, shard_bytes: int = 64_000_000) -> Units:
    """Shards of documents of 1,000 tokens in units of 4 MB, described without any data."""
    documents = shard_bytes // 2 // DOCUMENT_TOKENS
    per_unit = format_units.UNIT_BYTES // 2 // DOCUMENT_TOKENS
    firsts = np.arange(0, documents, per_unit)
    first_record = np.append(
        (np.arange(shards)[:, None] * documents + firsts).reshape(-1), shards * documents
    )
    count = shards * len(firsts)
    data, offsets = 1024, 1024 + documents * DOCUMENT_TOKENS * 2
    begins = {"tokens/data": data, "tokens/offsets": offsets, SECTION: offsets + 8 * documents + 64}
    return Units(
        fields=parse_fields({"tokens": "uint16[*]"}),
        first_unit=np.arange(shards + 1) * len(firsts),
        first_record=first_record,
        first_element={"tokens": first_record * DOCUMENT_TOKENS},
        checks={name: np.zeros(count, dtype=np.uint64) for name in ("tokens/data", "tokens/offsets")},
        sections={name: np.full(shards, begin) for name, begin in begins.items()},
        index_blocks=0,
        index_check=0,
    )


def cost(units: Units, shuffle: Shuffle, batch_rows: int = 256, *, spread: bool = False) -> RemoteCost:
    """Of rows that are packed within units, or `spread` over the whole dataset."""
    unit_rows = -(-np.diff(units.first_element["tokens"]) // SEQ_LEN)
    first_row = np.append(0, np.cumsum(unit_rows))
    rows = int(first_row[-1])
    layout = Layout(
        units=units,
        fields=("tokens",),
        rows=rows,
        units_of=None if spread else lambda asked: np.searchsorted(first_row, asked, side="right") - 1,
        unit_rows=None if spread else unit_rows,
        documents_per_row=int(units.first_record[-1]) / rows,
        group_shards=len(units.first_unit) - 1,
    )
    stream = RowStream(
        rows=(rows,), units=(unit_rows,), stages=Stages.of([1]), shuffle=shuffle, seed=3, permute=permute
    )
    return cost_of(layout, stream, 0, batch_rows)


@pytest.fixture(scope="module")
def large() -> Units:
    """640 GB in 10,000 shards."""
    return units_of_tokens(10_000)


def test_640_gb_by_default(large: Units) -> None:
    found = cost(large, Shuffle(kind="units"))
    assert found.variance == pytest.approx(2.0, abs=0.05)
    assert 120 <= found.shards_per_batch <= found.units_per_batch <= 130
    assert 1 <= found.fetched_per_used <= 1.02
    assert found.requests_per_epoch == 2 * found.units == 320_000
    assert found.requests_per_batch == pytest.approx(0.52, abs=0.01)
    assert found.working_set_bytes <= 128 * format_units.UNIT_BYTES
    assert found.beginning_bytes == found.working_set_bytes
    assert not found.stays_in_memory
    assert found.dollars_per_epoch == pytest.approx(0.128)


@pytest.mark.parametrize("spread", [False, True])
def test_a_global_shuffle_mixes_perfectly_and_is_hopeless(large: Units, spread: bool) -> None:
    found = cost(large, Shuffle(kind="global"), spread=spread)
    assert found.variance == pytest.approx(1.0, abs=0.05)
    assert not found.whole_units
    assert found.requests_per_batch > 768
    assert found.fetched_per_used > 10
    assert found.dollars_per_epoch > 100
    assert found.working_set_bytes > 600e9
    assert found.beginning_bytes == 0


def test_without_a_shuffle_a_batch_is_from_one_shard(large: Units) -> None:
    found = cost(large, Shuffle(kind="none"))
    assert found.variance > 250
    assert found.shards_per_batch < 1.1
    assert found.working_set_bytes <= format_units.UNIT_BYTES


def test_blocks_that_begin_within_units_fetch_units_twice(large: Units) -> None:
    found = cost(large, Shuffle(kind="block"))
    assert 3 < found.variance < 6
    assert 1.9 < found.fetched_per_used < 2.1


@pytest.mark.parametrize("kind", ["units", "global", "none"])
def test_few_batches_are_counted_exactly(kind: str) -> None:
    """All 256 batches of one epoch, against the same sums over a table of batches and shards."""
    units = units_of_tokens(16, 16_000_000)
    unit_rows = -(-np.diff(units.first_element["tokens"]) // SEQ_LEN)
    rows = int(unit_rows.sum())
    batch = rows // 256
    found = cost(units, Shuffle(kind=kind, lanes=8), batch)
    stream = RowStream(
        rows=(rows,),
        units=(unit_rows,),
        stages=Stages.of([1]),
        shuffle=Shuffle(kind=kind, lanes=8),
        seed=3,
        permute=permute,
    )
    shards = np.repeat(units.shard_of, unit_rows)[stream.at(np.arange(256 * batch)).row].reshape(256, batch)
    table = np.stack([np.bincount(each, minlength=16) for each in shards]) / batch
    shares = np.bincount(units.shard_of, weights=unit_rows) / rows
    variance = ((table - shares) ** 2).sum(axis=1).mean() / ((1 - (shares**2).sum()) / batch)
    assert found.variance == pytest.approx(variance)
    assert found.shards_per_batch == pytest.approx((table > 0).sum(axis=1).mean())


# Real datasets


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of images and documents, in units of 128 KB."""
    path = tmp_path_factory.mktemp("costs") / "data"
    rng = np.random.default_rng(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_units, "UNIT_BYTES", 2**17)
        fields = {"image": "uint8[64,64]", "tokens": "uint16[*]"}
        with headrace.Writer(path, fields, shard_bytes=2**20) as writer:
            for _ in range(900):
                writer.write(
                    {
                        "image": rng.integers(0, 255, (64, 64)).astype(np.uint8),
                        "tokens": rng.integers(0, 60_000, int(rng.integers(1, 900))),
                    }
                )
    return path


def only(costs: Mapping[str, RemoteCost]) -> RemoteCost:
    (found,) = costs.values()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fields": ("image",)},
        {"seq_len": 512},
        {"shuffle": "global"},
        {"seq_len": 512, "shuffle": "global"},
        {"seq_len": 512, "shuffle": "global", "pack_within": "dataset"},
        {"seq_len": 512, "shuffle": "none"},
    ],
    ids=str,
)
def test_data_that_stays_in_memory_is_fetched_once(
    local: Path, s3_place: str, options: dict[str, Any]
) -> None:
    """How many rows of the second batch are read before the units around them depends on who is faster."""
    place = upload(local, s3_place)
    loader = headrace.Loader(place, batch_size=16, epochs=3, **options)
    expected = only(remote_costs(loader.rows.recipe, 16))
    assert expected.stays_in_memory
    assert loader.stats().fetched.bytes == 0
    batches = sum(1 for _ in loader)
    fetched = loader.stats().fetched
    assert batches == 3 * loader.rows_per_epoch // 16
    assert 0.5 * expected.requests_per_epoch <= fetched.requests <= 4 * expected.requests_per_epoch
    expected_bytes = expected.data_bytes * expected.fetched_per_used
    assert 0.7 * expected_bytes <= fetched.bytes <= 2.5 * expected_bytes
    assert fetched.repeated == fetched.cached_bytes == 0


EVERYTHING: list[dict[str, Any]] = [
    {"shuffle": "block"},
    {"shuffle": "none", "fields": ("tokens",)},
    {"shuffle": "global"},
    {"seq_len": 512, "shuffle": "global", "pack_within": "dataset"},
    {"seq_len": 512, "shuffle": "units", "group_shards": 2},
    {"seq_len": 512, "packing": "windows"},
    {"seq_len": 512, "packing": "windows", "pack_within": "dataset", "shuffle": "block"},
]


def test_figures_of_every_order_and_packing(local: Path, s3_place: str) -> None:
    data = headrace.open(upload(local, s3_place))
    for options in EVERYTHING:
        loader = headrace.Loader(
            headrace.mix({"far": (data, 0.5), "near": (local, 0.5)}), batch_size=16, **options
        )
        found = only(remote_costs(loader.rows.recipe, 16))
        assert found.batch_rows == 8
        assert 0 < found.shards_per_batch <= min(found.shards, found.units_per_batch)
        assert 0.3 < found.variance <= 16
        assert found.fetched_per_used >= 1
        assert found.requests_per_epoch > 0
        assert found.working_set_bytes > 0


def test_by_default_the_usual_rows_and_batches(local: Path, s3_place: str) -> None:
    assert costs_by_default(headrace.open(local)) == {}
    found = only(costs_by_default(headrace.open(upload(local, s3_place))))
    assert (found.order, found.shards) == ("units", len(headrace.open(local).manifest.shards))
    assert RemoteCost.from_json(found.to_json()) == found
    labels = [label for label, _ in cost_lines({"": found})]
    assert labels == ["mixing", "traffic", "memory", "start", "price"]
    assert all(text.startswith("web: ") for _, text in cost_lines({"web": found}))


# What is said


def test_what_is_said_of_640_gb(large: Units) -> None:
    lines = dict(cost_lines({"": cost(large, Shuffle(kind="units"))}))
    assert lines["traffic"].endswith("0.52 requests a batch, 320,000 requests an epoch")
    assert lines["memory"] == "batches are drawn from 514 MB at a time"
    assert "after a resume without a warm cache, about 514 MB must arrive" in lines["start"]
    assert lines["price"].startswith("$0.13 an epoch")
    # Rows that are read one by one are never faster than at the beginning.
    assert "start" not in dict(cost_lines({"": cost(large, Shuffle(kind="global"))}))


@pytest.mark.parametrize("kind", ["units", "global"])
def test_what_is_said_of_data_that_stays_in_memory(kind: str) -> None:
    found = cost(units_of_tokens(6, 16_000_000), Shuffle(kind=kind), 32)
    lines = dict(cost_lines({"": found}))
    once = (
        f"all of it stays in memory after the first epoch: about {found.requests_per_epoch:,} requests once"
    )
    assert lines["traffic"].endswith(once)
    assert lines["memory"].startswith("all 96 MB stay in memory")
    assert "96 MB" in lines["start"]
    assert lines["price"].startswith("less than $0.01 once")


def test_blocks_are_fetched_once_if_they_stay() -> None:
    """A row of a kilobyte brings a block of 16 KB, which holds the rows beside it."""
    units = units_of_tokens(6, 16_000_000)
    found = cost(units, Shuffle(kind="global"), 32)
    blocks = found.data_bytes / BLOCK_BYTES
    assert 0.3 * blocks < found.requests_per_epoch < 1.1 * blocks + 2 * found.units
    assert found.fetched_per_used == pytest.approx(1.0, abs=0.05)
