"""Rows of several lanes in one sequence, against lists that are really merged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.order.evenly import Evenly
from tests.properties import examples

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any)
Merged = list[tuple[int, int]]


def merged(lanes: list[Merged]) -> Merged:
    """Halve, merge each half, and take an item of the first half wherever its whole share grows by one."""
    if len(lanes) == 1:
        return list(lanes[0])
    first, second = merged(lanes[: len(lanes) // 2]), merged(lanes[len(lanes) // 2 :])
    both: Merged = []
    size, part = len(first) + len(second), len(first)
    for place in range(size):
        grows = (place + 1) * part // size > place * part // size
        both.append(first.pop(0) if grows else second.pop(0))
    return both


def sequence(counts: list[int]) -> Merged:
    evenly = Evenly(np.array(counts))
    lanes, numbers = evenly.at(np.arange(evenly.rows))
    return list(zip(lanes.tolist(), numbers.tolist(), strict=True))


@examples(60)
@given(COUNTS)
def test_the_sequence_is_what_lists_give(counts: list[int]) -> None:
    lanes = [[(lane, number) for number in range(count)] for lane, count in enumerate(counts)]
    assert sequence(counts) == merged(lanes)


@examples(40)
@given(COUNTS, st.data())
def test_any_stretch_has_every_lane_in_its_share(counts: list[int], data: st.DataObject) -> None:
    found = [lane for lane, _ in sequence(counts)]
    begin = data.draw(st.integers(0, len(found)))
    stretch = found[begin : data.draw(st.integers(begin, len(found)))]
    for lane, count in enumerate(counts):
        # Each time that the lanes are halved, the share may be off by less than one row.
        halvings = len(counts).bit_length()
        assert abs(stretch.count(lane) - len(stretch) * count / len(found)) < 1 + halvings


@examples(80)
@given(COUNTS, st.data())
def test_ranges_in_the_order_of_their_lanes(counts: list[int], data: st.DataObject) -> None:
    evenly = Evenly(np.array(counts))
    places = data.draw(st.integers(1, evenly.rows))
    begins = data.draw(st.lists(st.integers(0, evenly.rows - places), max_size=3))
    wanted = data.draw(st.lists(st.integers(0, places - 1), max_size=6))
    found = evenly.by_lane(np.array(begins, dtype=np.int64), places, np.array(wanted, dtype=np.int64))
    assert found.shape == (len(begins), len(wanted))
    lanes = [lane for lane, _ in sequence(counts)]
    for begin, row in zip(begins, found.tolist(), strict=True):
        by_hand = sorted(range(begin, begin + places), key=lambda place: lanes[place])
        assert row == [by_hand[number] for number in wanted]


@examples(60)
@given(st.lists(st.integers(0, 2**47 // 20), min_size=2, max_size=20).filter(any), st.data())
def test_ranges_that_are_too_long_to_be_listed(counts: list[int], data: st.DataObject) -> None:
    """The n-th place by lanes is right if it is in the lane, and in the range, that have it by counting."""
    evenly = Evenly(np.array(counts))
    number = data.draw(st.integers(0, evenly.rows - 1))
    [[place]] = evenly.by_lane(np.array([0]), evenly.rows, np.array([number])).tolist()
    [lane], [before] = (each.tolist() for each in evenly.at(np.array([place])))
    assert sum(counts[:lane]) + before == number


def test_the_example_in_the_module() -> None:
    assert sequence([3, 1, 4]) == [(2, 0), (2, 1), (0, 0), (2, 2), (2, 3), (0, 1), (1, 0), (0, 2)]


@pytest.mark.parametrize("rows", [2**31, 2**40 + 1, 2**46 - 3])
def test_lanes_whose_products_exceed_64_bits_are_exact(rows: int) -> None:
    counts = [rows, rows + 12_345, 7]
    evenly = Evenly(np.array(counts))
    places = [0, 1, rows // 2, rows, 2 * rows - 5, evenly.rows - 1]
    places += np.random.default_rng(rows).integers(0, evenly.rows, 200).tolist()
    lanes, numbers = evenly.at(np.array(places))
    for place, lane, number in zip(places, lanes.tolist(), numbers.tolist(), strict=True):
        assert (lane, number) == by_whole_numbers(counts, place)


def by_whole_numbers(counts: list[int], place: int) -> tuple[int, int]:
    """The same with numbers of any size, one place at a time."""
    first, stop = 0, len(counts)
    while stop - first > 1:
        middle = (first + stop) // 2
        part, size = sum(counts[first:middle]), sum(counts[first:stop])
        before = place * part // size
        if (place + 1) * part // size > before:
            stop, place = middle, before
        else:
            first, place = middle, place - before
    return first, place
