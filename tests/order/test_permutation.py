import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingsError
from penstock.order.permutation import Permutation


@given(st.integers(0, 3000), st.integers(0, 2**64 - 1))
def test_every_number_comes_exactly_once(size: int, key: int) -> None:
    assert sorted(Permutation(size, key)(np.arange(size))) == list(range(size))


@given(st.integers(1, 2**48), st.integers(0, 2**64 - 1), st.data())
def test_any_position_of_a_huge_permutation_is_in_range_and_distinct(
    size: int, key: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    numbers = Permutation(size, key)(positions)
    assert len(set(numbers.tolist())) == len(positions)
    assert 0 <= numbers.min() <= numbers.max() < size


def test_a_batch_of_positions_is_the_same_as_one_at_a_time() -> None:
    order = Permutation(1000, 5)
    assert order(np.arange(1000)).tolist() == [int(order(position)) for position in range(1000)]


def test_another_key_gives_another_order_and_the_same_key_the_same() -> None:
    assert (
        Permutation(10_000, 1)(np.arange(10_000)) != Permutation(10_000, 2)(np.arange(10_000))
    ).mean() > 0.99
    assert np.array_equal(Permutation(100, 9)(np.arange(100)), Permutation(100, 9)(np.arange(100)))


def test_the_documented_example_holds() -> None:
    assert Permutation(10, key=1)(np.arange(10)).tolist() == [1, 4, 2, 6, 8, 0, 3, 9, 7, 5]


def test_neighbours_and_positions_are_as_independent_as_in_a_stored_shuffle() -> None:
    size = 100_000
    stored = np.random.default_rng(0).permutation(size)
    for key in range(5):
        numbers = Permutation(size, key)(np.arange(size))
        for shuffled in (numbers, stored):
            assert abs(np.corrcoef(shuffled[:-1], shuffled[1:])[0, 1]) < 0.02
            assert abs(np.corrcoef(np.arange(size), shuffled)[0, 1]) < 0.02


@pytest.mark.parametrize(("size", "key"), [(-1, 0), (2**48 + 1, 0), (5, -1), (5, 2**64)])
def test_impossible_sizes_and_keys_are_refused(size: int, key: int) -> None:
    with pytest.raises(SettingsError):
        Permutation(size, key)


def test_positions_outside_are_refused() -> None:
    with pytest.raises(SettingsError, match="permutation of 5"):
        Permutation(5, 0)([5])
