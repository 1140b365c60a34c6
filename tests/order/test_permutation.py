import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingsError
from headrace.order.permutation import permute, unpermute
from tests.properties import examples


@examples(60)
@given(st.integers(0, 3000), st.integers(0, 2**64 - 1))
def test_every_number_comes_exactly_once(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key)) == list(range(size))


@examples(60)
@given(st.integers(1, 2**48), st.integers(0, 2**64 - 1), st.data())
def test_any_position_of_a_huge_permutation_is_in_range_and_distinct(
    size: int, key: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    numbers = permute(positions, size, key)
    assert len(set(numbers.tolist())) == len(positions)
    assert 0 <= numbers.min() <= numbers.max() < size


@examples(60)
@given(st.integers(1, 2**48), st.integers(0, 2**64 - 1), st.data())
def test_the_inverse_leads_back(size: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50))
    assert unpermute(permute(positions, size, key), size, key).tolist() == positions


@examples(50)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 2**64 - 1), st.integers(0)), min_size=1))
def test_each_position_may_have_a_permutation_of_its_own(cases: list[tuple[int, int, int]]) -> None:
    sizes, keys, positions = zip(
        *((size, key, position % size) for size, key, position in cases), strict=True
    )
    together = permute(positions, sizes, np.array(keys, dtype=np.uint64))
    alone = [
        int(permute(position, size, key)) for size, key, position in zip(sizes, keys, positions, strict=True)
    ]
    assert together.tolist() == alone
    assert unpermute(together, sizes, np.array(keys, dtype=np.uint64)).tolist() == list(positions)


def test_a_batch_of_positions_is_the_same_as_one_at_a_time() -> None:
    whole = permute(np.arange(1000), 1000, 5)
    assert whole.tolist() == [int(permute(position, 1000, 5)) for position in range(1000)]


def test_another_key_gives_another_order_and_the_same_key_the_same() -> None:
    assert (permute(np.arange(10_000), 10_000, 1) != permute(np.arange(10_000), 10_000, 2)).mean() > 0.99
    assert np.array_equal(permute(np.arange(100), 100, 9), permute(np.arange(100), 100, 9))


def test_the_documented_example_holds() -> None:
    assert permute(np.arange(10), 10, key=1).tolist() == [8, 4, 9, 0, 7, 2, 6, 5, 3, 1]


def test_neighbours_and_positions_are_as_independent_as_in_a_stored_shuffle() -> None:
    size = 100_000
    stored = np.random.default_rng(0).permutation(size)
    for key in range(5):
        numbers = permute(np.arange(size), size, key)
        for shuffled in (numbers, stored):
            assert abs(np.corrcoef(shuffled[:-1], shuffled[1:])[0, 1]) < 0.02
            assert abs(np.corrcoef(np.arange(size), shuffled)[0, 1]) < 0.02


@pytest.mark.parametrize(("size", "key"), [(-1, 0), (2**48 + 1, 0), (5, -1), (5, 2**64)])
def test_impossible_sizes_and_keys_are_refused(size: int, key: int) -> None:
    with pytest.raises(SettingsError):
        permute([], size, key)


def test_positions_outside_are_refused() -> None:
    with pytest.raises(SettingsError, match="permutation of size 5"):
        permute([5], 5, 0)
