"""What goes wrong in a dataset, a sampler or a worker is said in PyTorch's words, and the other batches come."""

import functools
import gc
import multiprocessing
import os
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

from headrace.torch import DataLoader
from tests.torch.dataloader import datasets, failures, samplers
from tests.torch.dataloader.failures import ERRORS, Failing
from tests.torch.dataloader.parity import (
    LOOP,
    ONE_OF_EACH,
    STAYING_PROCESSES,
    STAYING_THREADS,
    WAYS,
    assert_parity,
    assert_same_error,
    ours,
    outcome_of,
    steps,
    stock,
    ways,
    ways_named,
    ways_with,
)

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

PROCESSES_OR_THREADS = {name: WAYS[name] for name in ("2 processes", "2 threads")}


def failed(found: list[Any]) -> list[tuple[type, str]]:
    return [each for each in found if isinstance(each, tuple) and isinstance(each[0], type)]


# Exceptions in the user's code


# Only that of a process is sent, and must be made again.
@ways_with(
    "kind",
    {LOOP: ["value", "stop"], STAYING_PROCESSES: ERRORS, STAYING_THREADS: ["value", "stop", "two arguments"]},
)
def test_an_exception_of_the_dataset(kind: str, way: dict[str, Any]) -> None:
    """Its type and text, the original stack, and the batches after it."""
    items = datasets.Items(Failing(kind), 9)
    found = assert_parity(lambda make: steps(iter(make(items, batch_size=2, **way)), 6))
    (error, said), end = failed(found)
    assert found[2] == (error, said)
    assert found[5] == end == (StopIteration, "")
    if way:
        assert said.startswith(f"Caught {type(ERRORS[kind]()).__name__} in DataLoader worker process 0.\n")
        assert f'{failures.__file__}", line' in said
        assert "raise ERRORS[self.kind]()" in said
    assert issubclass(error, type(ERRORS[kind]())) or error is RuntimeError


@ways_named(LOOP, STAYING_PROCESSES)
def test_an_exception_with_a_cause(way: dict[str, Any]) -> None:
    items = datasets.Items(failures.fails_with_a_cause, 3)
    found = assert_parity(lambda make: steps(iter(make(items, **way)), 4))
    assert not way or "The above exception was the direct cause of the following exception" in found[2][1]


@ways(ONE_OF_EACH)
def test_the_next_epoch_has_its_own_exceptions_only(way: dict[str, Any]) -> None:
    items = datasets.Items(Failing("value", at=(4, 7)), 20)

    def scenario(make: Any) -> Any:
        loader = make(items, batch_size=2, shuffle=True, **way)
        # The first epoch is left while errors may be on their way.
        return [steps(iter(loader), count) for count in (1, 11, 11)]

    found = assert_parity(scenario)
    # Those of both indices, if they are not in one batch, and the end.
    assert all(len(failed(epoch)) in (2, 3) for epoch in found[1:])


@ways(ONE_OF_EACH)
def test_an_exception_of_collate_fn(way: dict[str, Any]) -> None:
    options = {"batch_size": 2, "collate_fn": failures.FailingOnBatch(), **way}
    found = assert_parity(lambda make: steps(iter(make(range(9), **options)), 6))
    assert "batch [4, 5] is bad" in found[2][1]
    assert found[3:5] == [[6, 7], [8]]


@ways_named(LOOP, STAYING_PROCESSES)
def test_an_exception_of_getitems(way: dict[str, Any]) -> None:
    items = failures.FailsAtOnce(datasets.number, 8)
    found = assert_parity(lambda make: steps(iter(make(items, batch_size=2, **way)), 5))
    assert found[2][0] is BufferError


@ways_named(LOOP, STAYING_PROCESSES)
def test_an_index_that_is_not_there(way: dict[str, Any]) -> None:
    words = {"a": 1, "b": 2}
    found = assert_parity(lambda make: steps(iter(make(words, sampler=["a", "x\ny", "b"], **way)), 4))
    assert found[1][0] is KeyError
    assert way == {} or "\nKeyError: 'x\\ny'" in found[1][1], "the text has lines, and is not a repr"


SAMPLERS = ["sampler", "batch_sampler"]


@ways_with(
    "batched",
    {
        LOOP: SAMPLERS,
        "2 processes": SAMPLERS,
        STAYING_PROCESSES: ["sampler"],
        "2 processes far ahead": ["sampler"],
        "2 threads, 1 ahead": ["sampler"],
        "1 thread in any order": ["sampler"],
    },
)
def test_an_exception_of_the_sampler(batched: str, way: dict[str, Any]) -> None:
    """It is the main process that asks it, as far ahead as workers are busy."""

    def scenario(make: Any) -> Any:
        indices = [[0, 1], [2, 3], [4, 5], [6]] if batched == "batch_sampler" else list(range(7))
        options = {"batch_size": 2} if batched == "sampler" else {}
        loader = make(range(7), **{batched: samplers.Broken(indices)}, **options, **way)
        try:
            iterator = iter(loader)
        except ValueError as error:
            return str(error)
        return steps(iterator, 7)

    assert "the sampler is broken" in str(assert_parity(scenario))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of PyTorch's iterator
@ways(ONE_OF_EACH)
def test_a_sampler_that_cannot_even_begin(way: dict[str, Any]) -> None:
    assert_same_error(
        lambda make: iter(make(range(7), sampler=failures.CannotBegin(), batch_size=None, **way)),
        LookupError,
        "there is nothing to iterate over",
    )


@ways(PROCESSES_OR_THREADS)
def test_an_exception_of_worker_init_fn(way: dict[str, Any]) -> None:
    """Comes from `iter`, as in torchdata; in PyTorch it comes with the first batch."""
    loader = DataLoader(range(9), worker_init_fn=failures.fails_to_begin, **way)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="worker 0 has no disk"):
        iter(loader)


@ways(PROCESSES_OR_THREADS)
@pytest.mark.parametrize(
    "stream",
    [datasets.Stream(failures.cannot_iterate), failures.WithoutIterator()],
    ids=["fails", "not an iterator"],
)
def test_an_iterable_that_cannot_begin(stream: Any, way: dict[str, Any]) -> None:
    found = assert_parity(lambda make: steps(iter(make(stream, **way)), 2))
    assert "Caught" in found[0][1]
    assert "Caught" in found[1][1]


@pytest.mark.parametrize("stream", [datasets.Stream(failures.cannot_iterate), failures.WithoutIterator()])
def test_without_workers_an_iterable_that_cannot_begin_fails_at_once(stream: Any) -> None:
    wanted, found = (outcome_of(lambda make: iter(make(stream)), make) for make in (stock, ours))
    assert wanted.error is not None
    assert found.error == wanted.error


@ways_with("batch_size", {LOOP: [None, 1, 2, 3], STAYING_PROCESSES: [None, 2, 3], STAYING_THREADS: [1]})
def test_a_stream_that_breaks_off(batch_size: int | None, way: dict[str, Any]) -> None:
    stream = datasets.Stream(failures.breaks_off)
    found = assert_parity(lambda make: steps(iter(make(stream, batch_size=batch_size, **way)), 8))
    assert len([said for kind, said in failed(found) if kind is ValueError]) == max(
        1, way.get("num_workers", 0)
    )


@ways(PROCESSES_OR_THREADS)
def test_after_an_exception_nothing_keeps_the_iterator(way: dict[str, Any]) -> None:
    """Nor its workers: PyTorch's wait for garbage to be collected."""
    iterator = iter(ours(datasets.Items(Failing("value"), 40), **way))
    with pytest.raises(ValueError, match="sample is bad"):
        list(iterator)
    gone = weakref.ref(iterator)
    gc.disable()
    try:
        del iterator
        assert gone() is None
    finally:
        gc.enable()


# What PyTorch hangs on, or crashes: ours alone


@pytest.mark.parametrize("way", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            failures.fails_locally,
            "Caught OnlyHereError in DataLoader worker process 0, which cannot be pickled",
        ),
        (
            failures.unpicklable,
            "in DataLoader worker process 0: the batch cannot be pickled to be sent to the loader",
        ),
        (failures.unopenable, "A batch from DataLoader worker process 0 cannot be unpickled: ValueError"),
    ],
)
def test_what_cannot_be_sent_or_made_again_is_an_error_and_the_loader_goes_on(
    function: Any, says: str, way: dict[str, Any]
) -> None:
    loader = ours(datasets.Items(function, 8), batch_size=2, collate_fn=datasets.as_it_came, **way)
    for _ in range(2):
        found = steps(iter(loader), 5)
        assert found[2][0] is RuntimeError
        assert says in found[2][1]
        assert (found[:2], found[3]) == ([[0, 1], [2, 3]], [6, 7])
        assert found[4][0] is StopIteration
    if function is failures.fails_locally:
        assert "OnlyHereError: of a class that no other process has" in found[2][1]
        assert f'{failures.__file__}", line' in found[2][1]


def test_threads_send_nothing_so_batches_may_be_anything() -> None:
    options = {"collate_fn": datasets.as_it_came, "num_workers": 2, "worker_kind": "thread"}
    found = list(ours(datasets.Items(failures.unpicklable, 8), batch_size=2, **options))
    assert found[2][0]() == 4
    found = steps(iter(ours(datasets.Items(failures.fails_locally, 8), batch_size=2, **options)), 5)
    assert found[2][0].__name__ == "OnlyHereError"


# Workers that end


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_leaves(persistent: bool) -> None:
    options = {"batch_size": None, "collate_fn": datasets.as_it_came, "persistent_workers": persistent}

    def scenario(make: Any) -> Any:
        return list(make(datasets.Items(failures.leaves, 20), num_workers=2, **options))

    for make in (stock, ours):
        found = outcome_of(scenario, make)
        assert found.error is not None
        assert found.error[0] is RuntimeError
        assert re.match(r"DataLoader worker \(pid(\(s\))? N\) exited unexpectedly", found.error[1])
    assert "with exit code 3. Details are lost due to multiprocessing" in found.error[1]


@pytest.mark.parametrize("function", [failures.leaves, failures.is_interrupted])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_leaves_is_named_and_the_next_iteration_has_another(
    function: Any, persistent: bool, tmp_path: Path
) -> None:
    tell = functools.partial(datasets.tell, str(tmp_path))
    options = {"num_workers": 2, "persistent_workers": persistent, "worker_init_fn": tell}
    loader = ours(datasets.Items(function, 20), batch_size=None, **options)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:
        list(iterator)
    pids = {line.split()[4] for line in (tmp_path / "calls").read_text().splitlines()}
    assert re.findall(r"\d+", str(raised.value))[0] in pids - {str(os.getpid())}
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(iterator)
    assert next(iter(loader)) == 0


def test_a_thread_that_would_end_the_process_says_where() -> None:
    loader = ours(datasets.Items(failures.leaves, 8), num_workers=2, worker_kind="thread")
    with pytest.raises(SystemExit, match="Caught SystemExit in DataLoader worker thread 0"):
        list(loader)


# Workers that take too long


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Iterator[Any]:
    gate = threading.Event() if request.param == "thread" else multiprocessing.get_context("fork").Event()
    yield gate
    gate.set()


@pytest.mark.parametrize(
    ("gate", "worker_kind"), [("process", "process"), ("thread", "thread")], indirect=["gate"]
)
def test_a_batch_that_takes_too_long_is_an_error_and_comes_later(gate: Any, worker_kind: str) -> None:
    options = {"batch_size": 2, "num_workers": 1, "timeout": 0.2, "worker_kind": worker_kind}
    too_late = (RuntimeError, "DataLoader timed out after 0.2 seconds")

    def scenario(make: Any) -> Any:
        gate.clear()
        iterator = iter(make(datasets.Items(failures.Waits(gate), 8), **options))
        found = _batches_that_come(iterator, 2, too_late)
        missed = steps(iterator, 1)
        gate.set()
        return found, missed, _batches_that_come(iterator, 2, too_late), steps(iterator, 1)

    if worker_kind == "thread":
        before, missed, after, end = scenario(ours)
    else:
        before, missed, after, end = assert_parity(scenario)
    assert missed == [too_late]
    assert [batch.tolist() for batch in before + after] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert end[0][0] is StopIteration


def _batches_that_come(iterator: Any, count: int, too_late: tuple[type, str]) -> list[Any]:
    """Asks again as long as they are late, as they may be on a machine that does other things too."""
    found: list[Any] = []
    while len(found) < count:
        (outcome,) = steps(iterator, 1)
        if isinstance(outcome, tuple):
            assert outcome == too_late
        else:
            found.append(outcome)
    return found


def test_time_enough_is_no_error() -> None:
    for way in ({"num_workers": 1}, {"num_workers": 2, "worker_kind": "thread"}):
        assert_parity(lambda make, way=way: list(make(range(9), batch_size=2, timeout=600, **way)))
