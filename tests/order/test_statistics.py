"""Is a permutation that is never stored as random as a shuffle? NumPy's shuffle stands beside it in every test.

All bounds are 5 sigma, which a fair shuffle exceeds once in three million times; keys and seeds are fixed, so a
test gives the same answer every time. Chi-square is brought to a normal distribution by its cube root (Wilson and
Hilferty): (chi2 / df)^(1/3) has nearly the mean 1 - 2 / (9 df) and the variance 2 / (9 df).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.order.permutation import permute

SIGMAS = 5
Numbers = NDArray[np.int64]
Shuffler = Callable[[int, int], Numbers]
"""(how many, size) -> that many permutations, one a line."""


def never_stored(many: int, size: int) -> Numbers:
    keys = np.repeat(np.arange(many, dtype=np.uint64), size)
    return permute(np.tile(np.arange(size), (many, 1)), size, keys)


def numpy_shuffle(many: int, size: int) -> Numbers:
    return np.random.default_rng(0).permuted(np.tile(np.arange(size), (many, 1)), axis=1)


def sigmas_of_chi2(observed: Numbers, expected: NDArray[np.float64] | float) -> float:
    """How far above a fair sample the counts lie, in standard deviations."""
    df = observed.size - 1
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    return float(((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df)))


def each_with(sizes: list[int]) -> list[Any]:
    """Both shufflers with every size."""
    return [pytest.param(shuffler, size) for shuffler in (never_stored, numpy_shuffle) for size in sizes]


both = pytest.mark.parametrize("shuffler", [never_stored, numpy_shuffle])


@pytest.mark.parametrize(("shuffler", "size"), each_with([2, 3, 4, 5, 8, 13, 16, 33]))
def test_every_number_comes_to_every_position_equally_often(shuffler: Shuffler, size: int) -> None:
    drawn = shuffler(20_000, size)
    for position in range(size):
        observed = np.bincount(drawn[:, position], minlength=size)
        assert sigmas_of_chi2(observed, len(drawn) / size) < SIGMAS


@pytest.mark.parametrize(("shuffler", "size"), each_with([3, 4, 5, 8, 13]))
def test_every_pair_of_numbers_comes_to_every_pair_of_positions_equally_often(
    shuffler: Shuffler, size: int
) -> None:
    drawn = shuffler(20_000, size)
    distinct = ~np.eye(size, dtype=bool).reshape(-1)
    for first in range(size):
        for second in range(first + 1, size):
            pairs = drawn[:, first] * size + drawn[:, second]
            observed = np.bincount(pairs, minlength=size * size)[distinct]
            assert sigmas_of_chi2(observed, len(drawn) / observed.size) < SIGMAS, (first, second)


@both
def test_all_permutations_of_four_come_equally_often(shuffler: Shuffler) -> None:
    drawn = shuffler(50_000, 4)
    _, observed = np.unique(drawn @ [64, 16, 4, 1], return_counts=True)
    assert len(observed) == 24
    assert sigmas_of_chi2(observed, len(drawn) / 24) < SIGMAS


@both
@pytest.mark.parametrize("lag", [1, 2, 7, 64])
def test_a_number_says_nothing_about_those_that_follow(shuffler: Shuffler, lag: int) -> None:
    for numbers in shuffler(3, 100_000):
        correlation = np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]
        assert abs(correlation) * math.sqrt(numbers.size) < SIGMAS


@both
def test_neighbours_fall_everywhere_in_a_grid(shuffler: Shuffler) -> None:
    for numbers in shuffler(3, 100_000):
        cells = numbers * 16 // numbers.size
        observed = np.bincount(cells[0::2] * 16 + cells[1::2], minlength=256)
        assert sigmas_of_chi2(observed, numbers.size / 2 / 256) < SIGMAS


@both
@pytest.mark.parametrize("size", [100, 1000])
def test_neighbouring_keys_agree_no_more_often_than_chance(shuffler: Shuffler, size: int) -> None:
    """Two unrelated permutations agree in about Poisson(1) positions, whatever their size."""
    drawn = shuffler(2000, size)
    agreements = (drawn[0::2] == drawn[1::2]).sum(axis=1)
    observed = np.bincount(np.minimum(agreements, 4), minlength=5)
    poisson = [math.exp(-1) / math.factorial(count) for count in range(4)]
    expected = np.array([*poisson, 1 - sum(poisson)]) * len(agreements)
    assert sigmas_of_chi2(observed, expected) < SIGMAS
    assert abs(agreements.mean() - 1) * math.sqrt(len(agreements)) < SIGMAS


@pytest.mark.parametrize("size", [5, 8, 13])
def test_the_tests_here_notice_a_bad_shuffle(size: int) -> None:
    rotated = (np.arange(size) + np.arange(20_000)[:, None]) % size
    pairs = np.bincount(rotated[:, 0] * size + rotated[:, 1], minlength=size * size)
    observed = pairs[~np.eye(size, dtype=bool).reshape(-1)]
    assert sigmas_of_chi2(observed, len(rotated) / observed.size) > SIGMAS
