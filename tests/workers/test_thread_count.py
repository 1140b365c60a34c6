"""How many threads help: on machines that are formulas, where trying everything tells the best number."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.thread_count import Stretch, ThreadCount
from tests.properties import examples

SECOND = 10**9


def judged(count: ThreadCount, rate: Callable[[int], float], asked: float, stretches: int = 60) -> list[int]:
    """The numbers of threads of a loop that could use `asked` batches a second, on a machine that makes rate(n)."""
    seen = []
    for _ in range(stretches):
        made = rate(count.count)
        got = min(made, asked)
        waited = max(0.0, 1 - made / asked)
        count.judge(Stretch(round(1000 * got), 1000 * SECOND, round(1000 * waited * SECOND)))
        seen.append(count.count)
    return seen


def test_a_function_that_waits_gets_as_many_threads_as_there_may_be() -> None:
    seen = judged(ThreadCount(most=13), lambda n: 10.0 * n, asked=1000)
    assert seen[:4] == [2, 4, 8, 13]
    assert seen[-1] == 13


def test_a_function_that_holds_the_lock_keeps_one_thread() -> None:
    seen = judged(ThreadCount(most=8), lambda n: 10.0, asked=1000)
    assert seen[-1] == 1
    assert set(seen) == {1, 2}
    assert seen.count(2) <= 4, "it goes on trying what did not help"


def test_a_loop_that_does_not_wait_keeps_one_thread() -> None:
    assert set(judged(ThreadCount(most=8), lambda n: 10.0 * n, asked=9)) == {1}


def test_two_cores_get_two_threads() -> None:
    assert judged(ThreadCount(most=8), lambda n: 100.0 * min(n, 2), asked=1000)[-1] == 2


def test_what_was_found_out_is_looked_at_again_after_a_while() -> None:
    count = ThreadCount(most=4)
    assert judged(count, lambda n: 10.0, asked=1000)[-1] == 1
    assert judged(count, lambda n: 10.0 * n, asked=1000, stretches=600)[-1] == 4


@examples(200)
@given(
    gains=st.lists(st.floats(0.7, 2.0), min_size=7, max_size=7),
    asked=st.floats(5, 500),
)
def test_it_climbs_as_far_as_each_thread_helps_and_no_further(gains: list[float], asked: float) -> None:
    rates = [10.0]
    for gain in gains:
        rates.append(rates[-1] * gain)
    seen = judged(ThreadCount(most=8), lambda n: rates[n - 1], asked)
    # A number that stays for three stretches was not on trial.
    found = next(a for a, b, c in zip(seen, seen[1:], seen[2:], strict=False) if a == b == c)
    assert found == 8 or not waits(rates[found - 1], asked) or not helps(found, rates, asked)
    assert min(rates[found - 1], asked) >= min(rates[0], asked), "fewer would have been better"


def waits(rate: float, asked: float) -> bool:
    return rate < 0.9 * asked


def helps(threads: int, rates: list[float], asked: float) -> bool:
    """Whether one more brings a quarter of what each of those brings."""
    return min(rates[threads], asked) >= rates[threads - 1] * (1 + 0.25 / threads)


def test_a_stretch_tells_something_when_it_is_long_enough() -> None:
    assert Stretch(8, SECOND, 0).tells
    assert not Stretch(7, SECOND, 0).tells
    assert not Stretch(1000, SECOND // 10, 0).tells
