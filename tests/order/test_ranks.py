import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingsError
from headrace.order.ranks import count_steps, rows_of_step

ROWS = st.integers(0, 300)
SIZES = st.integers(1, 20)


def slices_of(rows: int, batch_size: int, world_size: int, drop_last: bool) -> list[list[range]]:
    """For each step, the rows of each rank."""
    return [
        [range(*rows_of_step(step, rows, batch_size, rank, world_size)) for rank in range(world_size)]
        for step in range(count_steps(rows, batch_size, world_size, drop_last))
    ]


@given(ROWS, SIZES, SIZES)
def test_all_ranks_together_read_every_row_once_and_in_order(
    rows: int, batch_size: int, world_size: int
) -> None:
    steps = slices_of(rows, batch_size, world_size, drop_last=False)
    assert [row for step in steps for held in step for row in held] == list(range(rows))
    assert all(len(held) <= batch_size for step in steps for held in step)


@given(ROWS, SIZES, SIZES)
def test_dropping_the_last_step_leaves_only_whole_batches(
    rows: int, batch_size: int, world_size: int
) -> None:
    kept = slices_of(rows, batch_size, world_size, drop_last=True)
    assert all(len(held) == batch_size for step in kept for held in step)
    assert rows - len(kept) * batch_size * world_size < batch_size * world_size
    assert kept == slices_of(rows, batch_size, world_size, drop_last=False)[: len(kept)]


@given(ROWS, SIZES, SIZES)
def test_an_incomplete_step_is_divided_evenly(rows: int, batch_size: int, world_size: int) -> None:
    for step in slices_of(rows, batch_size, world_size, drop_last=False):
        assert max(map(len, step)) - min(map(len, step)) <= 1


@given(ROWS, SIZES, SIZES, st.booleans())
def test_the_rows_of_a_step_depend_only_on_the_size_of_the_global_batch(
    rows: int, batch_size: int, world_size: int, drop_last: bool
) -> None:
    on_many = slices_of(rows, batch_size, world_size, drop_last)
    on_one = slices_of(rows, batch_size * world_size, 1, drop_last)
    assert [[row for held in step for row in held] for step in on_many] == [list(step[0]) for step in on_one]


def test_the_example_in_the_module() -> None:
    steps = slices_of(11, 2, 2, drop_last=False)
    assert [list(step[0]) for step in steps] == [[0, 1], [4, 5], [8]]
    assert [list(step[1]) for step in steps] == [[2, 3], [6, 7], [9, 10]]


def test_a_rank_may_have_nothing_to_do_in_the_last_step() -> None:
    assert [len(held) for held in slices_of(9, 2, 4, drop_last=False)[-1]] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ((0, -1, 1, 0, 1), "rows=-1"),
        ((0, 1, 0, 0, 1), "batch_size=0"),
        ((0, 1, 1, 0, 0), "world_size=0"),
        ((0, 8, 2, 2, 2), "rank=2"),
        ((0, 8, 2, -1, 2), "rank=-1"),
        ((2, 8, 2, 0, 2), "step=2: must be 0 to 1"),
        ((-1, 8, 2, 0, 2), "step=-1"),
        ((0, 0, 2, 0, 2), "step=0: there are no steps"),
    ],
)
def test_a_step_that_is_not_there_is_refused(case: tuple[int, int, int, int, int], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        rows_of_step(*case)
