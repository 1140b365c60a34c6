"""Threads that rest while a loop does nothing but ask, on a clock that the test holds: who makes what, and that the
results are the same."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import StageError
from headrace.observe.counting import Counters
from headrace.workers.prefetch import Prefetch
from headrace.workers.thread_count import ThreadCount
from tests.properties import examples

LONG = 10_000_000
"""Nanoseconds of a step in which something can be made."""


class Clock:
    """Nanoseconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Makes:
    """Notes which thread made which number."""

    def __init__(self, clock: Clock, takes: int = 0) -> None:
        self._clock, self._takes = clock, takes
        self.by: dict[int, threading.Thread] = {}

    def __call__(self, number: int) -> int:
        if threading.current_thread() is threading.main_thread():
            # Only the loop's clock is held: what threads take passes beside it.
            self._clock.now += self._takes
        self.by[number] = threading.current_thread()
        return number

    def made_here(self, numbers: range) -> bool:
        return all(self.by[number] is threading.main_thread() for number in numbers)


def resting(make: Any, clock: Callable[[], int], **options: Any) -> Prefetch:
    chosen = {
        "count": None,
        "depth": 4,
        "threads": ThreadCount(most=4),
        "timeout_seconds": 120,
        "stage": "load",
    }
    return Prefetch(make, **{**chosen, "may_rest": True, "clock": clock, **options})


def take(source: Prefetch, count: int) -> list[Any]:
    return [next(source) for _ in range(count)]


def test_a_loop_that_only_asks_makes_its_results_itself() -> None:
    clock = Clock()
    make = Makes(clock)
    counters = Counters()
    source = resting(make, clock, counters=counters)
    assert take(source, 100) == list(range(100))
    assert make.made_here(range(40, 100))
    assert counters.workers == 0
    source.close()


def test_when_long_steps_come_again_threads_work_ahead() -> None:
    clock = Clock()
    make = Makes(clock)
    counters = Counters()
    source = resting(make, clock, counters=counters)
    take(source, 200)
    for number in (200, 201):
        clock.now += LONG
        assert next(source) == number
    assert counters.workers == 1
    for number in range(202, 210):
        clock.now += LONG
        assert next(source) == number
        assert make.by[number] is not threading.main_thread()
    source.close()


def made_with_a_long_step_in(every: int, count: int) -> Makes:
    clock = Clock()
    make = Makes(clock)
    source = resting(make, clock)
    for number in range(count):
        clock.now += LONG if number % every == 0 else 0
        assert next(source) == number
    source.close()
    return make


def test_a_long_step_among_many_short_ones_wakes_nobody() -> None:
    assert made_with_a_long_step_in(100, count=1000).made_here(range(40, 1000))


def test_a_long_step_now_and_then_is_enough_to_keep_them_awake() -> None:
    make = made_with_a_long_step_in(8, count=100)
    assert not any(thread is threading.main_thread() for thread in make.by.values())


def test_what_takes_long_to_make_is_left_to_threads() -> None:
    clock = Clock()
    make = Makes(clock, takes=5_000_000)
    source = resting(make, clock)
    take(source, 200)
    # Seventeen are asked for before it shows again.
    here = sum(thread is threading.main_thread() for thread in make.by.values())
    assert 1 <= here <= 200 / 16 + 1
    source.close()


def test_threads_never_rest_where_it_was_not_allowed() -> None:
    clock = Clock()
    make = Makes(clock)
    source = resting(make, clock, may_rest=False)
    assert take(source, 100) == list(range(100))
    assert not any(thread is threading.main_thread() for thread in make.by.values())
    source.close()


@examples(60)
@given(
    steps=st.lists(st.sampled_from([0, 0, 0, 0, 100_000, LONG]), min_size=1, max_size=120),
    depth=st.integers(1, 9),
    at_once=st.integers(1, 4),
    takes=st.sampled_from([0, 5_000_000]),
)
def test_results_come_in_order_whoever_makes_them(
    steps: list[int], depth: int, at_once: int, takes: int
) -> None:
    clock = Clock()

    class Many(Makes):
        def many(self, numbers: range) -> list[int]:
            return [self(number) for number in numbers]

    source = resting(Many(clock, takes), clock, count=len(steps), depth=depth, at_once=at_once)
    found = []
    for step in steps:
        clock.now += step
        found.append(next(source))
    assert found == list(range(len(steps)))
    with pytest.raises(StopIteration):
        next(source)


def test_an_error_in_the_loop_is_named_like_one_in_a_thread() -> None:
    def make(number: int) -> int:
        if number == 50:
            raise ValueError("bad weather")
        return number

    source = resting(make, Clock())
    assert take(source, 50) == list(range(50))
    with pytest.raises(StageError, match="batch 50 could not be made: ValueError: bad weather"):
        next(source)
    with pytest.raises(StopIteration):
        next(source)


def test_ctrl_c_in_the_loop_ends_it_and_is_no_error_of_a_batch() -> None:
    def make(number: int) -> int:
        if number == 50:
            raise KeyboardInterrupt
        return number

    source = resting(make, Clock())
    take(source, 50)
    with pytest.raises(KeyboardInterrupt):
        next(source)
    with pytest.raises(StopIteration):
        next(source)


# How many threads


@pytest.mark.parametrize(("cores", "wanted"), [(4, 4), (1, 1)])
def test_as_many_threads_as_help_are_found(cores: int, wanted: int) -> None:
    """On a clock that moves while the loop waits: less, the more threads make something side by side."""
    clock, count = Clock(), ThreadCount(most=4)
    source = resting(lambda number: number, clock, threads=count, may_rest=False, depth=2)
    take_group = source._shared.take

    def wait(timeout_seconds: float) -> Any:
        clock.now += 100_000_000 // min(cores, count.count)
        return take_group(timeout_seconds)

    source._shared.take = wait  # type: ignore[method-assign]
    seen = []
    for number in range(600):
        assert next(source) == number
        seen.append(count.count)
    assert max(set(seen), key=seen.count) == wanted
    source.close()


def test_a_given_number_of_threads_stays() -> None:
    clock = Clock()
    source = resting(lambda number: clock.now, clock, threads=3, may_rest=False)
    for _ in range(50):
        clock.now += 10**9
        next(source)
    assert sum(thread.name.startswith("headrace-load") for thread in threading.enumerate()) == 3
    source.close()
