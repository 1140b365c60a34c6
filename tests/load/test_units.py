"""Loaders in the order by units: the same stream on any number of ranks, each of which stays with its lanes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import StateError
from headrace.load.batch import Batch
from headrace.load.loader import Loader
from headrace.load.settings import LoaderSettings
from headrace.measure.proving.proof import prove_resume
from headrace.rows.sample_rows import ObjectRows
from tests.load import streams
from tests.properties import examples

UNIT = 7
UNITS = headrace.Shuffle(kind="units", lanes=8)


@pytest.fixture(autouse=True)
def _units_of_seven_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own data counts as data in units, as remote datasets are."""

    def unit_rows(self: ObjectRows) -> Any:
        return np.array([min(UNIT, self.rows - first) for first in range(0, self.rows, UNIT)])

    monkeypatch.setattr(ObjectRows, "unit_rows", property(unit_rows), raising=False)


def loaders_of(world_size: int, batch_size: int, rows: int = 400, **options: Any) -> list[Loader]:
    chosen = {"shuffle": UNITS, "drop_last": False, **options}
    return [
        Loader(streams.Numbers(rows), rank=rank, world_size=world_size, batch_size=batch_size, **chosen)
        for rank in range(world_size)
    ]


def numbers_by_position(batches: list[Batch]) -> dict[int, int]:
    found = {}
    for batch in batches:
        assert batch.info.rows == len(batch.info.positions) == len(batch["number"])
        for position, number in zip(batch.info.positions.tolist(), batch["number"].tolist(), strict=True):
            assert position not in found
            found[position] = number
    return found


@examples(10)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 300))
def test_every_number_of_ranks_gives_the_same_stream_in_equally_many_steps(
    world_size: int, batch_size: int, rows: int
) -> None:
    (alone,) = loaders_of(1, 16, rows)
    expected = numbers_by_position(list(alone))
    assert sorted(expected.values()) == list(range(rows))
    ranks = [list(loader) for loader in loaders_of(world_size, batch_size, rows)]
    assert len({len(batches) for batches in ranks}) == 1
    assert numbers_by_position([batch for batches in ranks for batch in batches]) == expected


def test_a_rank_reads_the_units_of_its_own_lanes() -> None:
    # Eight lanes of eight units, and two lanes for each of four ranks.
    ranks = [list(loader) for loader in loaders_of(4, 4, rows=64 * UNIT)]
    units = [
        {number // UNIT for batch in batches for number in batch["number"].tolist()} for batches in ranks
    ]
    assert sorted(unit for read in units for unit in read) == list(range(64))
    assert ranks[1][0].info.positions.tolist() != list(range(4, 8))


def test_a_state_goes_on_with_other_ranks_and_batches() -> None:
    expected = numbers_by_position(list(loaders_of(1, 16, epochs=2)[0]))
    found: dict[int, int] = {}
    state: dict[str, Any] | None = None
    for world_size, batch_size, steps in ((2, 5, 7), (3, 8, 11), (1, 13, 20), (4, 3, 1000)):
        loaders = loaders_of(world_size, batch_size, epochs=2)
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(streams.through_json(state))
            found |= numbers_by_position(list(first_of(loader, steps)))
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert found == expected


def first_of(loader: Loader, steps: int) -> Iterator[Batch]:
    for _, batch in zip(range(steps), loader, strict=False):
        yield batch


def test_every_epoch_has_another_order() -> None:
    (loader,) = loaders_of(1, 400)
    epochs = [next(iter(loader))["number"].tolist() for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == list(range(400)) for epoch in epochs)


def test_the_position_of_a_batch_is_its_first() -> None:
    for loader in loaders_of(3, 4):
        for batch in loader:
            assert batch.info.position == batch.info.positions[0]
            assert batch.info == type(batch.info)(*batch.info)


@pytest.mark.parametrize("options", [{"workers": 2}, {"prefetch": 0}])
def test_rows_do_not_depend_on_who_makes_them(options: dict[str, Any]) -> None:
    plain = [numbers_by_position(list(loader)) for loader in loaders_of(2, 8)]
    assert [numbers_by_position(list(loader)) for loader in loaders_of(2, 8, **options)] == plain


def test_worker_processes_give_ranks_the_same_rows() -> None:
    # Other processes do not know of units here: a source without units is a single one, dealt out evenly.
    data = headrace.from_arrays({"number": np.arange(100)})

    def batches(processes: int) -> list[dict[int, int]]:
        loaders = [Loader(data, rank=rank, world_size=2, batch_size=8, shuffle=UNITS) for rank in (0, 1)]
        mapped = [loader.map(dict, processes=processes, per="batch") for loader in loaders]
        return [numbers_by_position(list(loader)) for loader in (mapped if processes else loaders)]

    assert batches(1) == batches(0)


def test_token_rows_are_dealt_out_too() -> None:
    data = streams.token_dataset([n % 11 + 1 for n in range(200)])
    options: dict[str, Any] = {"seq_len": 16, "shuffle": UNITS, "drop_last": False}
    whole = {
        position: tokens.tolist()
        for batch in Loader(data, batch_size=8, **options)
        for position, tokens in zip(batch.info.positions.tolist(), batch["tokens"], strict=True)
    }
    for rank in range(3):
        for batch in Loader(data, batch_size=4, rank=rank, world_size=3, **options):
            for position, tokens in zip(batch.info.positions.tolist(), batch["tokens"], strict=True):
                assert whole.pop(position) == tokens.tolist()
    assert whole == {}


def test_a_state_has_the_lanes_and_the_number_of_units() -> None:
    (loader,) = loaders_of(1, 4)
    state = loader.state_dict()
    assert (state["shuffle"], state["lanes"], state["units"]) == ("units", 8, 58)
    other = loaders_of(1, 4, shuffle="units")[0]
    with pytest.raises(StateError, match="lanes is 128 here and 8 in the state"):
        other.load_state_dict(state)
    with pytest.raises(StateError, match="the rows are in 58 units here and in 59 in the state"):
        loader.load_state_dict({**state, "units": 59})


def test_resuming_is_proved() -> None:
    settings = LoaderSettings(batch_size=4, shuffle=UNITS)
    proof = prove_resume(streams.Numbers(150), settings, trials=2)
    assert proof.problems == ()
    assert len(proof.world_sizes) > 2


def test_a_rank_that_takes_the_rows_of_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Loader.__iter__

    def as_rank_0(self: Loader) -> Any:
        self.world = type(self.world)(0, self.world.size)
        return honest(self)

    monkeypatch.setattr(Loader, "__iter__", as_rank_0)
    proof = prove_resume(streams.Numbers(150), LoaderSettings(batch_size=4, shuffle=UNITS), trials=2)
    assert "handed out" in proof.problems[0].what


def test_what_follows_from_how_far_documents_are_packed_is_not_a_difference_of_its_own(
    tmp_path: Path,
) -> None:
    with headrace.Writer(tmp_path / "data", {"tokens": "uint16[*]"}) as writer:
        writer.write([{"tokens": np.arange(40)} for _ in range(100)])
    within, over = (
        Loader(tmp_path / "data", seq_len=64, batch_size=2, shuffle=UNITS, pack_within=place)
        for place in ("units", "dataset")
    )
    with pytest.raises(StateError) as caught:
        over.load_state_dict({**within.state_dict(), "units": 28})
    assert "pack_within is not set here and 'units' in the state" in str(caught.value)
    assert "28" not in str(caught.value)
