"""Functions in worker processes: the same batches as with threads, and failures that say what happened."""

import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import headrace
from headrace.errors import SettingsError, StageError, StageTimeoutError
from headrace.load.loader import Loader
from tests.load import streams
from tests.workers.left_behind import nothing_left_behind
from tests.workers.waiting import HeldClock, wait_for_file


def _numbers(count: int = 20, **options: Any) -> Loader:
    return Loader(streams.Numbers(count), **{"batch_size": 4, "shuffle": False, **options})


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture
def children() -> Callable[[], set[int]]:
    """The processes of this test; those that a library keeps, a resource tracker for instance, are not of them."""
    before = _children()
    return lambda: _children() - before


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(("processes", "prefetch"), [(1, 0), (2, 8)])
def test_processes_give_the_batches_that_threads_give_and_kept_ones_stay_what_they_are(
    processes: int, prefetch: int
) -> None:
    options: dict[str, Any] = {"shuffle": True, "epochs": 2, "drop_last": False, "rank": 1, "world_size": 2}
    wanted = streams.take(_numbers(100, **options).map(streams.noisy))
    loader = _numbers(100, prefetch=prefetch, **options).map(streams.noisy_here, processes=processes)
    kept = [dict(batch) for batch in loader]
    workers = {pid for batch in kept for pid in batch.pop("process").tolist()}
    assert 1 <= len(workers) <= processes
    assert os.getpid() not in workers
    assert streams.same(kept, wanted)


def test_as_many_batches_as_asked_for_are_made_while_the_loop_is_busy(tmp_path: Path) -> None:
    leaving = functools.partial(streams.leaving_a_mark, str(tmp_path))
    for prefetch in (1, 3):
        batches = iter(_numbers(100, prefetch=prefetch).map(leaving, per="batch", processes=1))
        next(batches)
        # Nobody asks for these.
        for number in range(prefetch + 1):
            wait_for_file(tmp_path / str(4 * number))
        del batches
        for mark in tmp_path.iterdir():
            mark.unlink()


def test_every_kind_of_data_goes_to_processes(tmp_path: Path) -> None:
    path = streams.write_tokens(tmp_path / "data", [n % 13 + 1 for n in range(60)])
    ram = streams.token_dataset([5] * 12)
    mixture = headrace.mix({"disk": (headrace.open(path), 2), "ram": (ram, 1)})
    loader = Loader(mixture, batch_size=4, seq_len=10, drop_last=False)
    wanted = streams.take(loader.map(dict, per="batch"))
    assert streams.same(streams.take(loader.map(dict, per="batch", processes=1)), wanted)


def test_a_failure_in_a_process_has_the_name_the_row_and_the_cause(children: Callable[[], set[int]]) -> None:
    batches = iter(_numbers().map(streams.failing, processes=1))
    assert next(batches)["number"].tolist() == [0, 1, 2, 3]
    with pytest.raises(StageError) as caught:
        next(batches)
    assert str(caught.value) == _failure_in_a_thread(streams.failing)
    cause = caught.value.__cause__
    assert isinstance(cause, LookupError)
    (note,) = cause.__notes__
    assert "In the worker process" in note
    files = [line for line in note.splitlines() if line.startswith("  File")]
    assert len(files) == 1, "only the user's own code is shown"
    assert "streams.py" in files[0]
    assert next(batches, None) is None
    assert not children()


def _failure_in_a_thread(function: Any) -> str:
    with pytest.raises(StageError) as caught:
        list(_numbers().map(function))
    return str(caught.value)


def test_an_error_that_cannot_be_sent_is_told_with_the_row_and_its_traceback() -> None:
    with pytest.raises(StageError) as caught:
        list(_numbers().map(streams.failing_oddly, processes=1))
    assert str(caught.value) == _failure_in_a_thread(streams.failing_oddly)
    assert "in failing_oddly" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("function", "said"),
    [(streams.exiting, "exited with code 5"), (streams.killed, "was killed by SIGKILL")],
)
def test_a_function_that_ends_its_process_is_named(
    function: Any, said: str, children: Callable[[], set[int]]
) -> None:
    loader = _numbers().map(function, processes=1)
    with pytest.raises(
        StageError,
        match=rf"^map\({function.__name__}\): .*{said}.* while working on rows 4 to 7 of the stream$",
    ):
        list(loader)
    assert not children()
    assert loader.state_dict()["position"] == 4


def test_a_function_that_hangs_in_a_process_ends_with_a_timeout_that_shows_where(
    held_clock: HeldClock, tmp_path: Path, children: Callable[[], set[int]]
) -> None:
    hanging = functools.partial(streams.hanging, str(tmp_path / "begun"))
    held_clock.leap_once_there_is(tmp_path / "begun", 21)
    with pytest.raises(
        StageTimeoutError,
        match=r"^map\(partial\): rows 4 to 7 of the stream took .*timeout_seconds=20(.|\n)*in hanging",
    ):
        list(_numbers(timeout_seconds=20).map(hanging, processes=1))
    assert not children()


def test_a_timeout_in_a_thread_names_the_rows_in_the_same_way() -> None:
    release = threading.Event()

    def stuck(batch: dict[str, Any]) -> dict[str, Any]:
        release.wait()
        return batch

    with pytest.raises(StageTimeoutError, match=r"^map\(.*stuck\): rows 0 to 3 of the stream took longer"):
        next(iter(_numbers(timeout_seconds=0.1).map(stuck, per="batch")))
    release.set()


def test_results_that_do_not_fit_together_are_refused_with_the_function() -> None:
    for function, said in ((streams.uneven, "pad or crop"), (streams.listed, "must return a dict of fields")):
        with pytest.raises(StageError, match=rf"map\({function.__name__}\)(.|\n)*{said}"):
            list(_numbers().map(function, processes=1))


def test_a_function_that_cannot_be_sent_is_refused_with_a_remedy(children: Callable[[], set[int]]) -> None:
    def inner(sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    for function in (lambda sample: sample, inner):
        with pytest.raises(
            SettingsError,
            match=r"^map\(.*(<lambda>|inner)\): cannot be sent to a process.*top level of a module, or use threads",
        ):
            list(_numbers().map(function, processes=1))
    assert not children()


def test_data_that_cannot_be_sent_is_refused_with_a_remedy() -> None:
    class Local(streams.Numbers):
        pass

    with pytest.raises(SettingsError, match="cannot be sent to a process"):
        list(Loader(Local(8), batch_size=2).map(dict, processes=1))


def test_processes_go_with_the_iteration(children: Callable[[], set[int]]) -> None:
    loader = _numbers(40).map(dict, per="batch", processes=1)
    list(loader)
    assert not children(), "after the last batch"
    for _ in loader:
        assert len(children()) == 1
        break
    gc.collect()
    assert not children(), "after break"
    batches = iter(loader)
    held = next(batches)["number"]
    del batches, loader
    gc.collect()
    assert not children(), "after del"
    np.testing.assert_array_equal(held, np.arange(4, 8))


def test_a_dataset_rebuilt_before_the_processes_start_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    lengths = [8] * 20
    path = streams.write_tokens(tmp_path / "data", lengths)
    loader = Loader(path, batch_size=2, seq_len=8).map(dict, per="batch", processes=1)
    wanted = streams.take(Loader(path, batch_size=2, seq_len=8).map(dict, per="batch"))
    streams.write_tokens(path, lengths, first=1000, overwrite=True)
    # The version before is kept for readers that have it open, and for their workers.
    assert streams.same(streams.take(loader), wanted)
    streams.write_tokens(path, lengths, first=2000, overwrite=True)
    with pytest.raises(headrace.HeadraceError, match="rebuilt"):
        list(loader)
