"""Which positions ranks take: slices of each step, or the rows of their own lanes."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.order.lanes import sorted_by_lane
from headrace.order.mixture import Stages
from headrace.order.shuffle import Shuffle
from headrace.order.steps import Steps
from headrace.order.stream import RowStream
from headrace.order.world import World
from tests.properties import examples

UNITS = st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any)


def stream_of(units: list[list[int] | None], lanes: int, seed: int = 0) -> RowStream:
    """Sources with these units; None is a source of 20 rows without units."""
    return RowStream(
        rows=tuple(20 if sizes is None else sum(sizes) for sizes in units),
        units=tuple(None if sizes is None else np.array(sizes, dtype=np.int64) for sizes in units),
        stages=Stages.of([1] * len(units)),
        shuffle=Shuffle(kind="units", lanes=lanes),
        seed=seed,
    )


def all_ranks(
    stream: RowStream | None,
    start: int,
    stop: int | None,
    batch_size: int,
    world_size: int,
    drop_last: bool = False,
) -> list[Steps]:
    return [
        Steps(
            start=start,
            stop=stop,
            batch_size=batch_size,
            world=World(rank, world_size),
            drop_last=drop_last,
            by_lane=None if stream is None else stream.by_lane,
        )
        for rank in range(world_size)
    ]


@examples(30)
@given(
    st.lists(st.one_of(UNITS, st.none()), min_size=1, max_size=3),
    *(st.integers(1, high) for high in (9, 5, 6)),
    st.tuples(st.integers(0, 60), st.integers(0, 60)),
    st.booleans(),
)
def test_the_ranks_of_a_step_have_exactly_its_rows_and_equally_many(
    units: list[list[int] | None],
    lanes: int,
    batch_size: int,
    world_size: int,
    span: tuple[int, int],
    drop_last: bool,
) -> None:
    start, stop = span[0], span[0] + span[1]
    ranks = all_ranks(stream_of(units, lanes), start, stop, batch_size, world_size, drop_last)
    plain = all_ranks(None, start, stop, batch_size, world_size, drop_last)
    assert len({steps.count for steps in ranks}) == 1
    for step in range(ranks[0].count or 0):
        taken = [steps.positions(step) for steps in ranks]
        contiguous = [steps.positions(step) for steps in plain]
        assert sorted(np.concatenate(taken).tolist()) == np.concatenate(contiguous).tolist()
        assert [len(each) for each in taken] == [len(each) for each in contiguous]
        assert all(each.tolist() == sorted(each.tolist()) for each in taken)


@examples(20)
@given(UNITS, st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
def test_ranks_take_the_lanes_of_a_step_from_first_to_last(
    units: list[int], lanes: int, batch_size: int, world_size: int
) -> None:
    stream = stream_of([units], lanes)
    ranks = all_ranks(stream, 0, None, batch_size, world_size)
    for step in range(3):
        everyone = np.arange(step * ranks[0].global_batch, (step + 1) * ranks[0].global_batch)
        by_hand = sorted(everyone.tolist(), key=lambda position: int(stream.lanes([position])[0]))
        for rank, steps in enumerate(ranks):
            own = by_hand[rank * batch_size : (rank + 1) * batch_size]
            assert steps.positions(step).tolist() == sorted(own)


@examples(40)
@given(UNITS, st.integers(1, 4), st.integers(1, 5), st.booleans(), st.data())
def test_several_steps_at_once_are_the_steps_one_by_one(
    units: list[int], batch_size: int, world_size: int, dealt: bool, data: st.DataObject
) -> None:
    stream = stream_of([units], 4) if dealt else None
    for steps in all_ranks(stream, 7, 64, batch_size, world_size):
        count = steps.count or 0
        first = data.draw(st.integers(0, count))
        chosen = range(first, data.draw(st.integers(first, count)))
        positions, sizes = steps.positions_of(chosen)
        alone = [steps.positions(step).tolist() for step in chosen]
        assert positions.tolist() == [position for batch in alone for position in batch]
        assert sizes.tolist() == [len(batch) for batch in alone]


def test_one_rank_takes_positions_as_they_come_and_nobody_asks_for_lanes() -> None:
    def refused(begins: object, rows: int, wanted: object) -> NDArray[np.int64]:
        raise AssertionError("a single rank has all lanes")

    steps = Steps(start=3, stop=None, batch_size=4, world=World(), drop_last=True, by_lane=refused)
    assert steps.are_contiguous
    assert steps.positions(2).tolist() == [11, 12, 13, 14]
    assert steps.described(2) == "rows 11 to 14 of the stream"


def test_the_example_in_the_module() -> None:
    by_lane = partial(sorted_by_lane, lambda positions: positions % 4)

    for rank, wanted in enumerate([[0, 1, 4, 5], [2, 3, 6, 7]]):
        steps = Steps(start=0, stop=8, batch_size=4, world=World(rank, 2), drop_last=False, by_lane=by_lane)
        assert steps.positions(0).tolist() == wanted
    assert steps.described(0) == "4 rows from 2 to 7 of the stream"


def test_a_batch_without_rows_and_a_single_row_are_described() -> None:
    ranks = all_ranks(stream_of([[3, 3]], 2), 0, 5, 2, 4)
    assert [steps.described(0) for steps in ranks][:1] == ["row 1 of the stream"]
    last = all_ranks(stream_of([[3, 3]], 2), 0, 9, 2, 4)
    assert {steps.described(1) for steps in last} == {"a batch without rows", "row 8 of the stream"}


def test_a_step_that_is_not_there_is_refused() -> None:
    for steps in all_ranks(stream_of([[5, 5]], 2), 0, 10, 2, 2):
        with pytest.raises(SettingsError, match="step=3: must be 0 to 2"):
            steps.positions(3)
