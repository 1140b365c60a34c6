"""Shuffles in closed form against lists that are really shuffled."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingsError
from headrace.order.keys import derive
from headrace.order.permutation import permute
from headrace.order.shuffle import Shuffle, ShuffleKind
from tests.properties import examples

KEYS = st.integers(0, 2**64 - 1)
ROWS = st.integers(0, 400)
KINDS = st.sampled_from(ShuffleKind)
BLOCKS = st.one_of(st.integers(1, 40), st.just(2**70))


def epoch_of(shuffle: Shuffle, rows: int, key: int) -> list[int]:
    return list(shuffle.rows_at(np.arange(rows), rows, key).tolist())


def windows_by_hand(rows: int, block: int, window: int, key: int) -> list[list[int]]:
    """The rows of each window, not yet mixed: lists of lists, cut and put together."""
    stored = [list(range(rows))[start : start + block] for start in range(0, rows, block)]
    permuted = [stored[number] for number in permute(np.arange(len(stored)), len(stored), key)]
    groups = [permuted[start : start + window] for start in range(0, len(permuted), window)]
    return [[row for part in group for row in part] for group in groups]


def epoch_by_hand(rows: int, block: int, window: int, key: int) -> list[int]:
    epoch = []
    for number, group in enumerate(windows_by_hand(rows, block, window, key)):
        order = permute(np.arange(len(group)), len(group), int(derive(key, number)[0]))
        epoch += [group[place] for place in order]
    return epoch


@examples(60)
@given(ROWS, KINDS, BLOCKS, BLOCKS, KEYS)
def test_an_epoch_has_every_row_exactly_once(
    rows: int, kind: ShuffleKind, block: int, window: int, key: int
) -> None:
    assert sorted(epoch_of(Shuffle(kind=kind, block=block, window=window), rows, key)) == list(range(rows))


@examples(40)
@given(ROWS, BLOCKS, BLOCKS, KEYS)
def test_a_block_shuffle_is_what_lists_of_blocks_give(rows: int, block: int, window: int, key: int) -> None:
    shuffle = Shuffle(kind=ShuffleKind.BLOCK, block=block, window=window)
    assert epoch_of(shuffle, rows, key) == epoch_by_hand(rows, block, window, key)


@examples(50)
@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 12), KEYS)
def test_the_positions_of_a_window_read_only_its_own_blocks(
    rows: int, block: int, window: int, key: int
) -> None:
    epoch = epoch_of(Shuffle(kind=ShuffleKind.BLOCK, block=block, window=window), rows, key)
    start = 0
    for group in windows_by_hand(rows, block, window, key):
        read = epoch[start : start + len(group)]
        assert sorted(read) == sorted(group)
        assert len({row // block for row in read}) <= window
        start += len(group)


@examples(40)
@given(st.integers(1, 300), KINDS, st.integers(1, 40), st.integers(1, 12), st.data())
def test_positions_of_several_epochs_can_be_asked_for_at_once(
    rows: int, kind: ShuffleKind, block: int, window: int, data: st.DataObject
) -> None:
    shuffle = Shuffle(kind=kind, block=block, window=window)
    asked = data.draw(st.lists(st.tuples(st.integers(0, rows - 1), KEYS), min_size=1, max_size=20))
    positions, keys = zip(*asked, strict=True)
    together = shuffle.rows_at(positions, rows, np.array(keys, np.uint64))
    assert together.tolist() == [int(shuffle.rows_at(position, rows, key)) for position, key in asked]


@examples(50)
@given(st.integers(1, 2**48), st.integers(1, 2**48), st.integers(1, 2**48), KEYS, st.data())
def test_any_position_of_a_huge_epoch_is_in_range_and_distinct(
    rows: int, block: int, window: int, key: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=50, unique=True))
    shuffle = Shuffle(kind=ShuffleKind.BLOCK, block=block, window=window)
    numbers = shuffle.rows_at(positions, rows, key)
    assert len(set(numbers.tolist())) == len(positions)
    assert 0 <= numbers.min() <= numbers.max() < rows


@examples(30)
@given(ROWS, KEYS)
def test_a_global_shuffle_is_one_permutation_and_none_is_the_stored_order(rows: int, key: int) -> None:
    assert epoch_of(Shuffle(), rows, key) == permute(np.arange(rows), rows, key).tolist()
    assert epoch_of(Shuffle(kind=ShuffleKind.NONE), rows, key) == list(range(rows))


def test_every_epoch_brings_other_blocks_together() -> None:
    shuffle = Shuffle(kind=ShuffleKind.BLOCK, block=10, window=4)
    firsts = {
        tuple(sorted({row // 10 for row in shuffle.rows_at(np.arange(40), 10_000, key).tolist()}))
        for key in range(100)
    }
    assert len(firsts) == 100


@pytest.mark.parametrize("kind", ShuffleKind)
def test_rows_come_in_the_shape_of_the_positions(kind: ShuffleKind) -> None:
    shuffle = Shuffle(kind=kind, block=3, window=2)
    table = shuffle.rows_at(np.arange(20).reshape(4, 5), 20, 1)
    assert (table.shape, table.dtype.name) == ((4, 5), "int64")
    assert table.reshape(-1).tolist() == epoch_of(shuffle, 20, 1)
    one_key_each = np.full((4, 5), 1, np.uint64)
    assert shuffle.rows_at(np.arange(20).reshape(4, 5), 20, one_key_each).tolist() == table.tolist()


def test_the_example_in_the_module() -> None:
    shuffle = Shuffle(kind=ShuffleKind.BLOCK, block=3, window=2)
    assert epoch_of(shuffle, 8, 2) == [6, 7, 5, 4, 3, 0, 2, 1]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, "global"),
        (False, "none"),
        (None, "none"),
        ("global", "global"),
        ("block", "block"),
        ("units", "units"),
        ("none", "none"),
    ],
)
def test_a_shuffle_can_be_given_in_short(value: Any, kind: str) -> None:
    assert Shuffle.parse(value) == Shuffle(kind=ShuffleKind(kind))


def test_a_shuffle_may_name_its_kind_as_text() -> None:
    kind: Any = "block"
    shuffle = Shuffle(kind=kind, block=7)
    assert shuffle.kind is ShuffleKind.BLOCK
    assert Shuffle.parse(shuffle) is shuffle


@pytest.mark.parametrize("value", ["full", "", 1, 0, 2.5, ["global"], {}])
def test_another_value_is_refused_with_the_choices(value: Any) -> None:
    with pytest.raises(SettingsError, match="shuffle=.*global, block, units, none"):
        Shuffle.parse(value)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "full"},
        {"kind": None},
        {"block": 0},
        {"window": -1},
        {"block": True},
        {"window": 1.5},
        {"block": "8"},
        {"lanes": 0},
        {"lanes": 2**16 + 1},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"{next(iter(settings))}=.*must be"):
        Shuffle(**settings)


@pytest.mark.parametrize("kind", ShuffleKind)
@pytest.mark.parametrize(("positions", "rows"), [([-1], 5), ([5], 5), ([0], 0), ([], -1), ([], 2**48 + 1)])
def test_positions_outside_the_epoch_are_refused(kind: ShuffleKind, positions: list[int], rows: int) -> None:
    with pytest.raises(SettingsError, match="rows"):
        Shuffle(kind=kind).rows_at(positions, rows, 0)


@pytest.mark.parametrize("kind", [ShuffleKind.GLOBAL, ShuffleKind.BLOCK])
@pytest.mark.parametrize("key", [-1, 2**64, [1, 2, 3]])
def test_keys_that_cannot_work_are_refused(kind: ShuffleKind, key: Any) -> None:
    with pytest.raises(SettingsError, match="must be"):
        Shuffle(kind=kind).rows_at([0, 1], 5, key)
