"""Stages are counted where they happen, without each other's time, by whichever thread or process does them."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.observe import counting
from headrace.observe.counting import Counters, Watch, counted_as, now, spent, working_for
from headrace.observe.stats import LoaderStats, StageStats, waiting_share
from tests.samples import negated


def test_nothing_is_counted_for_nobody() -> None:
    counters = Counters()
    with working_for(counters):
        pass
    spent("gather", now())
    with counted_as("read"):
        pass
    assert counters.stats() == LoaderStats()


class Clock:
    """Nanoseconds that pass when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 1_000
        monkeypatch.setattr(counting, "now", self)

    def __call__(self) -> int:
        return self._now

    def pass_seconds(self, seconds: int) -> None:
        self._now += seconds * 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_stage_does_not_count_what_was_counted_inside(clock: Clock) -> None:
    counters = Counters()
    with working_for(counters), counted_as("read"):
        clock.pass_seconds(1)
        begun = clock()
        clock.pass_seconds(3)
        spent("collate", begun)
        clock.pass_seconds(1)
    stats = counters.stats()
    assert (stats.seconds("collate"), stats.seconds("read")) == (3, 2)


def test_threads_are_added_up() -> None:
    counters = Counters()

    def work() -> None:
        with working_for(counters):
            for _ in range(1000):
                spent("gather", now())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.stats().stages["gather"].count == 4000


def test_what_fails_is_counted_too() -> None:
    counters = Counters()
    with pytest.raises(ValueError), working_for(counters), counted_as("read"):
        raise ValueError
    assert counters.stats().stages["read"].count == 1


def test_spans_go_from_one_process_to_another() -> None:
    there, here = Counters(spans=10), Counters(spans=100)
    for _ in range(3):
        with working_for(there), counted_as("read"):
            for _ in range(20):
                spent("collate", now())
        here.receive(there.take(), "worker 3")
    assert there.take() == ([], [], (0, 0, 0, 0))
    # Of the timeline only the latest are kept; of the sums nothing is lost.
    assert {span.lane for span in here.spans or ()} == {"worker 3"}
    assert len(here.spans or ()) == 30
    assert {name: stage.count for name, stage in here.stats().stages.items()} == {"read": 3, "collate": 60}


def test_threads_that_have_ended_are_kept_as_one() -> None:
    counters = Counters()
    for _ in range(20):
        thread = threading.Thread(target=lambda: counters.add("gather", 0, 10))
        thread.start()
        thread.join()
    assert counters.stats().stages["gather"].count == 20
    assert len(counters._tallies) <= 2
    assert counters.stats().stages["gather"].count == 20


def test_the_loop_waits_and_steps_in_turns(clock: Clock) -> None:
    counters = Counters()
    watch = Watch(counters)
    for _ in range(3):
        with watch:
            clock.pass_seconds(1)
        clock.pass_seconds(6)
    stats = counters.stats()
    assert (stats.batches, stats.stages["wait"].count, stats.stages["step"].count) == (3, 3, 2)
    assert (stats.seconds("wait"), stats.seconds("step")) == (3, 12)
    assert stats.wait_share == 3 / 15


def test_stats_of_an_interval() -> None:
    counters = Counters()
    watch = Watch(counters)
    with watch:
        pass
    counters.see_queue("ready", 0, 4)
    before = counters.stats()
    for waiting in (2, 4):
        with watch:
            pass
        counters.see_queue("ready", waiting, 4)
    between = counters.stats().since(before)
    assert between.batches == 2
    assert between.stages["wait"].count == 2
    assert (between.queues["ready"].mean, between.queues["ready"].empty_share) == (3.0, 0.0)
    assert counters.stats().queues["ready"].empty_share == 1 / 3


def test_no_batches_no_division() -> None:
    nothing = LoaderStats()
    assert nothing.wait_share == 0.0
    assert nothing.busiest is None
    assert "no batch" in str(nothing)


# Loaders


def _documents() -> Any:
    rng = np.random.default_rng(0)
    return headrace.from_arrays({"tokens": [rng.integers(0, 99, n).astype(np.uint16) for n in range(1, 400)]})


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_loader_of_tokens_counts_its_stages(prefetch: int) -> None:
    loader = headrace.Loader(_documents(), seq_len=128, batch_size=8, prefetch=prefetch, workers=2)
    batches = sum(1 for _ in loader)
    stats = loader.stats()
    assert (stats.batches, stats.rows) == (batches, 8 * batches)
    assert set(stats.stages) == {"start", "plan", "gather", "wait", "step"}
    assert stats.workers == (2 if prefetch else 0)
    assert ("ready" in stats.queues) == bool(prefetch)
    # All that the loop's own thread makes is inside its waiting.
    if not prefetch:
        assert stats.seconds("wait") >= stats.seconds("plan") + stats.seconds("gather")


@pytest.mark.parametrize("processes", [0, 1])
def test_functions_are_counted_apart_from_putting_together(processes: int) -> None:
    loader = headrace.Loader(_documents(), seq_len=128, batch_size=8, workers=2)
    loader = loader.map(negated, processes=processes)
    count = sum(1 for _ in loader)
    stats = loader.stats()
    assert stats.batches == count
    assert stats.stages["transform"].count == stats.stages["collate"].count == count
    assert ("transport" in stats.stages) == bool(processes)
    assert stats.workers == (processes or 2)


def test_users_own_samples_are_read_and_put_together() -> None:
    loader = headrace.Loader([{"x": np.zeros(3)} for _ in range(40)], batch_size=4)
    assert sum(1 for _ in loader) == 10
    assert {"read", "collate", "transform"} <= set(loader.stats().stages)


def test_a_copy_counts_for_itself() -> None:
    loader = headrace.Loader(_documents(), seq_len=128, batch_size=8)
    next(iter(loader))
    other = loader.map(negated)
    assert other.stats().batches == 0
    next(iter(other))
    assert loader.stats().batches == 1


def test_an_early_end_is_counted_as_far_as_it_went() -> None:
    loader = headrace.Loader(_documents(), seq_len=128, batch_size=8)
    for number, _ in enumerate(loader):
        if number == 2:
            break
    assert loader.stats().batches == 3
    list(loader)
    assert loader.stats().batches == len(loader)


@given(seen=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1))
def test_a_queue_never_holds_more_than_it_can(seen: list[tuple[int, int]]) -> None:
    """Its capacity changes with the number of threads, and the mean is over all times."""
    counters = Counters()
    for waiting, capacity in seen:
        counters.see_queue("ready", waiting, capacity)
    queue = counters.stats().queues["ready"]
    assert queue.latest <= queue.capacity
    assert queue.mean <= queue.capacity


def test_the_start_of_processes_is_not_blamed_on_a_stage() -> None:
    def verdict(**seconds: float) -> str:
        return LoaderStats(
            batches=4, stages={name: StageStats(4, spent) for name, spent in seconds.items()}
        ).verdict

    started = verdict(start=0.01, wait=3.0, step=0.1, transform=0.02)
    assert "transform" not in started
    assert "mostly while no batch was being made, as when workers start" in started
    assert "the busiest stage is 'transform'" in verdict(start=0.01, wait=3.0, step=0.1, transform=2.5)


@given(waited=st.floats(0, 1e6), stepped=st.floats(0, 1e6))
def test_waiting_is_a_share_of_waiting_and_steps(waited: float, stepped: float) -> None:
    share = waiting_share(waited, stepped)
    assert 0 <= share <= 1
    stages = {"start": StageStats(1, 0.0), "wait": StageStats(1, waited), "step": StageStats(1, stepped)}
    assert LoaderStats(batches=1, stages=stages).wait_share == share
