"""The order by units against lists of units that are really permuted, divided into lanes and merged."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingsError
from headrace.order.keys import derive
from headrace.order.lanes import UnitOrder
from headrace.order.permutation import permute
from headrace.rows import kernel
from tests.order.test_evenly import merged
from tests.properties import examples

KEYS = st.integers(0, 2**64 - 1)
ALIKE = st.builds(lambda size, count, last: [size] * count + [last], *[st.integers(1, 30)] * 3)
"""Units of the same size, as most are, and a last one."""
SIZES = st.one_of(st.lists(st.integers(0, 12), max_size=60), ALIKE)
LANES = st.one_of(st.integers(1, 9), st.just(128))


def epoch_of(sizes: list[int], lanes: int, key: int) -> list[int]:
    order = UnitOrder(np.array(sizes, dtype=np.int64), lanes, key)
    rows: list[int] = order.rows_at(np.arange(sum(sizes))).tolist()
    return rows


def lanes_by_hand(sizes: list[int], lanes: int, key: int) -> list[list[int]]:
    """The rows of each lane: lists of whole units."""
    units, first = [], 0
    for size in sizes:
        units.append(list(range(first, first + size)))
        first += size
    slots = [units[number] for number in permute(np.arange(len(sizes)), len(sizes), key).tolist()]
    starts = [0]
    for slot in slots:
        starts.append(starts[-1] + len(slot))
    rows = []
    for number, slot in enumerate(slots):
        places = permute(np.arange(len(slot)), len(slot), int(derive(key, number)[0])).tolist()
        rows += [slot[place] for place in places]
    edges = []
    for lane in range(lanes + 1):
        share = Fraction(lane * len(rows), lanes)
        edges.append(min(starts, key=lambda start: (abs(start - share), start)))
    held = [rows[begin:end] for begin, end in zip(edges, edges[1:], strict=False)]
    return [lane for lane in held if lane]


def opening_by_hand(lanes: int, unit: int) -> list[int]:
    """How many rows each lane gives in the opening."""
    counts = [unit] * lanes
    pairs = lanes // 2
    for number in range(pairs):
        lead = unit * (2 * number + 1) // (4 * pairs)
        counts[2 * number] += lead
        counts[2 * number + 1] -= lead
    return counts


def epoch_by_hand(sizes: list[int], lanes: int, key: int) -> list[int]:
    held = lanes_by_hand(sizes, lanes, key)
    if not held:
        return []
    unit = sum(sizes) // sum(size > 0 for size in sizes)
    epoch = []
    if min(map(len, held)) >= 3 * unit:
        opening = opening_by_hand(len(held), unit)
        epoch += spread([lane[:count] for lane, count in zip(held, opening, strict=True)])
        held = [lane[count:] for lane, count in zip(held, opening, strict=True)]
        while min(map(len, held)) > unit:
            epoch += [lane.pop(0) for lane in held]
    return epoch + spread(held)


def spread(lanes: list[list[int]]) -> list[int]:
    return [row for _, row in merged([[(0, row) for row in lane] for lane in lanes])]


@examples(120)
@given(SIZES.filter(any), LANES, KEYS, st.data())
def test_ranges_in_the_order_of_their_lanes(
    sizes: list[int], lanes: int, key: int, data: st.DataObject
) -> None:
    order = UnitOrder(np.array(sizes, dtype=np.int64), lanes, key)
    rows = data.draw(st.one_of(st.integers(1, order.rows), st.integers(1, min(40, order.rows))))
    begins = data.draw(st.lists(st.integers(0, order.rows - rows), max_size=5))
    wanted = data.draw(st.lists(st.integers(0, rows - 1), max_size=6))
    found = order.by_lane(np.array(begins, dtype=np.int64), rows, np.array(wanted, dtype=np.int64))
    lane_of = order.lanes_at(np.arange(order.rows)).tolist()
    for begin, row in zip(begins, found.tolist(), strict=True):
        by_hand = sorted(range(begin, begin + rows), key=lambda position: lane_of[position])
        assert row == [by_hand[number] for number in wanted]


@examples(80)
@given(SIZES, LANES, KEYS)
def test_an_epoch_is_what_lists_of_units_give(sizes: list[int], lanes: int, key: int) -> None:
    epoch = epoch_of(sizes, lanes, key)
    assert epoch == epoch_by_hand(sizes, lanes, key)
    assert sorted(epoch) == list(range(sum(sizes)))


@examples(40)
@given(SIZES, LANES, KEYS)
def test_every_position_has_the_lane_whose_unit_it_reads(sizes: list[int], lanes: int, key: int) -> None:
    order = UnitOrder(np.array(sizes, dtype=np.int64), lanes, key)
    lane_of = {row: lane for lane, rows in enumerate(lanes_by_hand(sizes, lanes, key)) for row in rows}
    positions = np.arange(order.rows)
    found = order.lanes_at(positions).tolist()
    assert found == [lane_of[row] for row in order.rows_at(positions).tolist()]
    assert order.lanes == len(set(found)) <= lanes


@examples(40)
@given(SIZES.filter(any), LANES, KEYS, st.data())
def test_positions_can_be_asked_for_in_any_order_and_with_a_faster_permutation(
    sizes: list[int], lanes: int, key: int, data: st.DataObject
) -> None:
    epoch = epoch_of(sizes, lanes, key)
    asked = data.draw(st.lists(st.integers(0, len(epoch) - 1), max_size=20))
    fast = UnitOrder(np.array(sizes), lanes, np.uint64(key), kernel.permute)
    assert fast.rows_at(np.array(asked, dtype=np.int64)).tolist() == [epoch[position] for position in asked]


def test_one_lane_reads_one_unit_after_another() -> None:
    epoch = np.array(epoch_of([5] * 8, 1, 3)).reshape(8, 5)
    assert all(len(set(rows.tolist())) == 1 for rows in epoch // 5)


def test_at_any_time_no_more_units_are_in_use_than_there_are_lanes() -> None:
    sizes = np.random.default_rng(0).integers(1, 40, 500)
    epoch = epoch_of(sizes.tolist(), 16, 9)
    units = np.repeat(np.arange(500), sizes)[epoch]
    positions = np.arange(len(units))
    first, last = np.full(500, len(units)), np.zeros(500, dtype=int)
    np.minimum.at(first, units, positions)
    np.maximum.at(last, units, positions)
    in_use = np.bincount(first, minlength=len(units)) - np.bincount(last + 1, minlength=len(units) + 1)[:-1]
    assert np.cumsum(in_use).max() == 16


def test_the_example_in_the_module() -> None:
    assert epoch_of([4] * 6, 2, 0) == [
        *(4, 3, 5, 2, 1, 6, 0, 9),
        *(11, 7, 8, 13, 10, 12),
        *(15, 14, 19, 22, 17, 20, 23, 16, 21, 18),
    ]


def test_every_key_has_other_units_in_other_lanes() -> None:
    firsts = {tuple(sorted({row // 10 for row in epoch_of([10] * 400, 8, key)[:8]})) for key in range(50)}
    assert len(firsts) == 50


def test_huge_units_are_in_range_and_distinct() -> None:
    sizes = np.array([2**45 - 1, 2**46, 5, 0, 2**44 + 7])
    order = UnitOrder(sizes, 3, 1)
    positions = np.random.default_rng(0).integers(0, order.rows, 500)
    rows = order.rows_at(positions)
    assert len(set(rows.tolist())) == len(set(positions.tolist()))
    assert 0 <= rows.min() <= rows.max() < sizes.sum()


@pytest.mark.parametrize("positions", [[-1], [60], [0, 60]])
def test_positions_outside_the_epoch_are_refused(positions: list[int]) -> None:
    order = UnitOrder(np.full(6, 10), 2, 0)
    for function in (order.rows_at, order.lanes_at):
        with pytest.raises(SettingsError, match="must be inside the 60 rows"):
            function(np.array(positions))


@pytest.mark.parametrize(
    ("sizes", "said"), [([4, -1], "one has -1 rows"), ([2**47] * 3, "more than 2^48 rows")]
)
def test_sizes_that_cannot_be_are_refused(sizes: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said.replace("^", ".")):
        UnitOrder(np.array(sizes), 2, 0)
