"""Results in order from threads that run ahead: how far, what failures look like, and what is left behind."""

import gc
import random
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptError, StageError, StageTimeoutError
from headrace.observe.counting import Counters
from headrace.workers.prefetch import Prefetch
from tests.properties import examples
from tests.workers.waiting import (
    NEVER_SECONDS,
    PATIENCE_SECONDS,
    loading_threads,
    wait_until,
    wait_until_nothing_moves,
)

_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Whatever a test does, its threads are gone soon after."""
    _others.clear()
    _others.update(loading_threads())
    yield
    if running():
        gc.collect()
    wait_until(lambda: not running(), "no threads are left behind")


def running() -> set[threading.Thread]:
    """The threads of this test."""
    return loading_threads() - _others


def prefetch(make: Any, **options: Any) -> Prefetch:
    chosen = {"count": 20, "depth": 4, "threads": 2, "timeout_seconds": NEVER_SECONDS, "stage": "load"}
    return Prefetch(make, **{**chosen, **options})


def everything(source: Prefetch) -> list[Any]:
    results = []
    while True:
        try:
            results.append(next(source))
        except StopIteration:
            return results


class Many:
    """Makes groups in one go, and notes them."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.groups: list[range] = []
        self.ahead_calls = 0
        self._fails_at = fails_at

    def __call__(self, number: int) -> int:
        if number == self._fails_at:
            raise ValueError(f"number {number}")
        return number

    def many(self, numbers: range) -> list[int]:
        self.groups.append(numbers)
        return [self(number) for number in numbers]

    def ahead(self) -> None:
        self.ahead_calls += 1


# Order


@examples(25)
@given(st.integers(0, 60), st.integers(1, 24), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_results_come_in_order_whatever_the_threads_do(
    count: int, depth: int, threads: int, seed: int, grouped: bool
) -> None:
    rng = random.Random(seed)
    # The threads overtake each other.
    delays = [rng.choice([0, 0, 0, 0.0005, 0.002]) for _ in range(count)]

    class Make(Many):
        def __call__(self, number: int) -> int:
            time.sleep(delays[number])
            return number

    make = Make()
    source = prefetch(make if grouped else make.__call__, count=count, depth=depth, threads=threads)
    assert everything(source) == list(range(count))
    assert everything(source) == [], "an exhausted iterator stays exhausted"


def test_without_a_count_it_runs_on() -> None:
    source = prefetch(lambda number: number, count=None)
    assert [next(source) for _ in range(500)] == list(range(500))
    source.close()
    assert everything(source) == []


@pytest.mark.parametrize("result", [None, False, StopIteration(), ValueError("a result")])
def test_any_object_is_a_result(result: Any) -> None:
    assert everything(prefetch(lambda _: result, count=3)) == [result] * 3


def test_several_numbers_are_made_in_one_go_once_it_runs() -> None:
    make = Many()
    assert everything(prefetch(make, count=100, depth=16, threads=2)) == list(range(100))
    assert max(map(len, make.groups)) == 4
    assert make.ahead_calls > 0


# How far ahead


@pytest.mark.parametrize(("depth", "threads"), [(1, 1), (2, 2), (4, 2), (16, 2), (9, 3)])
@pytest.mark.parametrize("grouped", [True, False])
def test_never_more_than_depth_and_one_group_ahead(depth: int, threads: int, grouped: bool) -> None:
    lock = threading.Lock()
    handed, begun, worst = 0, 0, 0
    group = max(1, depth // (2 * threads))

    class Make(Many):
        def __call__(self, number: int) -> int:
            nonlocal begun, worst
            with lock:
                begun = max(begun, number + 1)
                worst = max(worst, begun - handed)
            return number

    make = Make()
    source = prefetch(make if grouped else make.__call__, count=150, depth=depth, threads=threads)
    for number in range(150):
        if number % 50 == 20:
            wait_until_nothing_moves(running())
        assert next(source) == number
        with lock:
            handed = number + 1
    # One more: the number is handed over a moment before this test counts it.
    assert worst <= depth + group + 1
    source.close()


def test_when_nobody_takes_results_it_stops_at_depth() -> None:
    made: list[int] = []
    source = prefetch(made.append, count=None, depth=6, threads=3)
    wait_until(lambda: len(made) >= 6, "as much is made as there is room for")
    wait_until_nothing_moves(running())
    assert sorted(made) == list(range(6))
    source.close()


def test_results_that_were_handed_over_are_not_kept() -> None:
    class Result:
        alive = 0

        def __init__(self, _: int) -> None:
            Result.alive += 1

        def __del__(self) -> None:
            Result.alive -= 1

    source = prefetch(Result, count=None, depth=2, threads=1)
    for _ in range(20):
        next(source)
    wait_until_nothing_moves(running())
    assert Result.alive <= 3
    source.close()
    assert Result.alive == 0


# Failures


@examples(40)
@given(st.integers(0, 30), st.integers(1, 16), st.integers(1, 3), st.booleans())
def test_an_error_comes_after_the_good_results_before_it(
    fails_at: int, depth: int, threads: int, grouped: bool
) -> None:
    make = Many(fails_at)
    source = prefetch(make if grouped else make.__call__, count=40, depth=depth, threads=threads)
    assert [next(source) for _ in range(fails_at)] == list(range(fails_at))
    with pytest.raises(StageError, match=rf"batch {fails_at} .*ValueError: number {fails_at}") as caught:
        next(source)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    shown = "".join(traceback.format_exception(caught.value))
    assert "in __call__" in shown
    assert 'raise ValueError(f"number {number}")' in shown
    assert everything(source) == []


def test_an_error_of_our_own_comes_as_it_is() -> None:
    def make(number: int) -> None:
        raise CorruptError("a.hdrc: damaged")

    with pytest.raises(CorruptError, match="^a.hdrc: damaged$"):
        next(prefetch(make))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_unusual_exceptions_of_a_thread_arrive_too(kind: type[BaseException]) -> None:
    def make(number: int) -> int:
        if number == 3:
            raise kind
        return number

    source = prefetch(make)
    assert [next(source) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StageError, match=kind.__name__):
        next(source)


def test_a_group_that_fails_as_a_whole_is_made_one_by_one() -> None:
    class Make(Many):
        def many(self, numbers: range) -> list[int]:
            raise MemoryError

    assert everything(prefetch(Make(), count=50, depth=16)) == list(range(50))


def test_a_failure_while_preparing_ahead_is_left_to_the_batch_it_belongs_to() -> None:
    class Make(Many):
        def ahead(self) -> None:
            raise CorruptError("a.hdrc: damaged")

    assert everything(prefetch(Make(), count=50)) == list(range(50))


def test_an_unusual_exception_in_a_group_does_not_leave_the_consumer_waiting() -> None:
    class Make(Many):
        def many(self, numbers: range) -> list[int]:
            raise SystemExit(3)

    source = prefetch(Make(), count=50, depth=16, timeout_seconds=PATIENCE_SECONDS)
    try:
        everything(source)
    except StageTimeoutError:
        raise
    except StageError:
        pass


def test_a_batch_that_takes_too_long_names_the_stage_and_shows_where_it_stands() -> None:
    release = threading.Event()

    def stuck_in_here(number: int) -> int:
        if number == 2:
            release.wait()
        return number

    source = prefetch(stuck_in_here, timeout_seconds=0.1, stage="decode", depth=3)
    # The first two are there and the third one hangs before anyone asks.
    wait_until_nothing_moves(running())
    assert [next(source), next(source)] == [0, 1]
    with pytest.raises(StageTimeoutError, match=r"decode: batch 2 .* timeout_seconds=0\.1") as caught:
        next(source)
    assert "stuck_in_here" in str(caught.value)
    assert "headrace-decode-" in str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    release.set()
    assert everything(source) == []


@pytest.mark.parametrize(("at_once", "groups", "most"), [(1, 7, 4), (2, 5, 5)])
def test_a_queue_can_hold_as_many_as_it_says(at_once: int, groups: int, most: int) -> None:
    """Those that are made ahead, and the rest of the group that was taken."""
    counters, make = Counters(), Many()
    source = prefetch(make, count=None, depth=4, threads=1, at_once=at_once, counters=counters)
    assert [next(source) for _ in range(3)] == [0, 1, 2]
    wait_until(lambda: make.ahead_calls == groups, "all that there is room for is made")
    next(source)
    queue = counters.stats().queues["ready"]
    assert queue.latest == queue.capacity == most
    source.close()


# What is left behind


def test_the_last_result_leaves_no_threads() -> None:
    source = prefetch(lambda number: number)
    assert running()
    everything(source)
    assert not running()


def test_closing_leaves_no_threads_and_may_be_done_twice() -> None:
    source = prefetch(lambda number: number, count=None)
    next(source)
    source.close()
    assert not running()
    source.close()
    with pytest.raises(StopIteration):
        next(source)


def test_closing_ends_the_wait_of_a_consumer_in_another_thread() -> None:
    release = threading.Event()
    source = prefetch(lambda _: release.wait())
    outcome: list[type[BaseException]] = []

    def consume() -> None:
        try:
            next(source)
        except BaseException as error:
            outcome.append(type(error))

    consumer, closer = threading.Thread(target=consume), threading.Thread(target=source.close)
    consumer.start()
    wait_until_nothing_moves([consumer])
    closer.start()
    consumer.join(PATIENCE_SECONDS)
    in_time = not consumer.is_alive()
    release.set()
    consumer.join()
    closer.join()
    assert in_time
    assert outcome == [StopIteration]


def test_an_error_leaves_no_threads() -> None:
    source = prefetch(Many(fails_at=3))
    with pytest.raises(StageError):
        everything(source)
    assert not running()


def test_an_iterator_that_is_dropped_stops_its_threads() -> None:
    source = prefetch(lambda number: number, count=None)
    next(source)
    del source
    assert not running()


def test_an_iterator_in_a_cycle_stops_its_threads_when_it_is_collected() -> None:
    source: Any = prefetch(lambda number: number, count=None)
    source.itself = source
    del source
    gc.collect()
    assert not running()


def test_a_consumer_that_fails_leaves_no_threads() -> None:
    def consume() -> None:
        source = prefetch(lambda number: number, count=None)
        next(source)
        raise RuntimeError("the training step")

    with pytest.raises(RuntimeError, match="training step"):
        consume()
    gc.collect()
    assert not running()


def test_many_iterators_one_after_the_other_and_side_by_side() -> None:
    for _ in range(20):
        sources = [prefetch(lambda number: number, count=9) for _ in range(3)]
        for _ in range(4):
            assert len({next(source) for source in sources}) == 1
        del sources[0]
        assert all(everything(source) == [4, 5, 6, 7, 8] for source in sources)
    assert not running()


# Whole programs

SCRIPT = """\
import signal, sys, threading, time
from headrace.observe.counting import Counters
from headrace.workers.prefetch import Prefetch
from headrace.workers.stacks import current_frames
# Tests may run in the background, where Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def main_thread_waits():
    return current_frames()[threading.main_thread().ident].f_code.co_name == "wait"

def quick(number):
    time.sleep(0.001)
    return number

def slow(number):
    if number == 0:
        while not main_thread_waits():
            time.sleep(0.01)
        print("it waits", flush=True)
    time.sleep(0.5)
    return number

def prefetch(make):
    return Prefetch(make, count=None, depth=4, threads=2, timeout_seconds=600, stage="load")

"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.mark.parametrize(
    "rest", ["next(source)", "next(source); sys.exit()", "keep = [source]; source.me = source"]
)
def test_a_program_may_end_with_threads_running(start_program: Start, rest: str) -> None:
    program = start_program(f"{SCRIPT}source = prefetch(quick)\n{rest}\n")
    out, complaint = program.communicate(timeout=PATIENCE_SECONDS)
    assert (program.returncode, out, complaint) == (0, "", "")


@pytest.mark.parametrize(
    ("make", "first"), [("slow", "it waits"), ("quick", "it runs")], ids=["while it waits", "between results"]
)
def test_an_interrupt_ends_a_program(start_program: Start, make: str, first: str) -> None:
    loop = "for number in iter(source.__next__, None):\n    if number == 9: print('it runs', flush=True)\n"
    program = start_program(f"{SCRIPT}source = prefetch({make})\n{loop}")
    assert program.stdout is not None
    assert program.stdout.readline() == f"{first}\n"
    program.send_signal(signal.SIGINT)
    _, complaint = program.communicate(timeout=PATIENCE_SECONDS)
    assert program.returncode == -signal.SIGINT
    assert complaint.rstrip().endswith("KeyboardInterrupt")
