"""A crew with real processes: its results, whatever they hold, and the memory that they come in."""

import functools
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import SettingsError, StageError
from headrace.workers.crew import Crew
from headrace.workers.process import WorkerProcess
from tests.workers import crew_jobs
from tests.workers.left_behind import named_memory, open_files
from tests.workers.waiting import NEVER_SECONDS, wait_for_file

MakeCrew = Callable[..., Crew]


@pytest.fixture(scope="module")
def shared_crew() -> Iterator[Crew]:
    """Does whatever function of `crew_jobs` a task names; each test takes what it has put."""
    crew = Crew(crew_jobs.perform, workers=2, timeout_seconds=NEVER_SECONDS, stage="map")
    yield crew
    assert crew.done == 0
    crew.close()


def _address(values: Any) -> int:
    return int(values.ctypes.data)


def _assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert type(found[name]) is type(value)
        if isinstance(value, np.ndarray):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(found[name], value)
            assert found[name].flags.writeable
        else:
            assert found[name] == value
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and not np.ma.isMaskedArray(value):
            assert found[name].flags.c_contiguous
            assert found[name].flags.aligned
            assert found[name].size == 0 or _address(found[name]) % 64 == 0


# Results


def test_results_are_the_functions_in_whatever_order_they_are_asked_for(shared_crew: Crew) -> None:
    tickets = list(range(60))
    for ticket in tickets:
        shared_crew.put(ticket, ("filled", (ticket * 1000, ticket)))
    random.Random(1).shuffle(tickets)
    for ticket in tickets:
        _assert_same(shared_crew.get(ticket), crew_jobs.filled((ticket * 1000, ticket)))


def test_empty_results_are_results(shared_crew: Crew) -> None:
    for ticket in range(3):
        shared_crew.put(ticket, ("nothing", None))
        assert shared_crew.get(ticket) == {}


def test_arrays_of_every_kind_and_shape_come_whole_by_socket_and_by_slot(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.everything)
    for seed in range(3):
        crew.put(seed, seed)
        _assert_same(crew.get(seed), crew_jobs.everything(seed))


def test_a_worker_goes_on_with_the_tasks_that_wait_with_it_while_nobody_calls(
    make_crew: MakeCrew, tmp_path: Path
) -> None:
    crew = make_crew(crew_jobs.leave_a_mark, ahead=3)
    marks = [tmp_path / str(number) for number in range(4)]
    crew.put(0, str(marks[0]))
    crew.get(0)
    for number in (1, 2, 3):
        crew.put(number, str(marks[number]))
    for mark in marks:
        wait_for_file(mark)
    for number in (3, 1, 2):
        assert crew.get(number)["x"].shape == (8,)


def test_putting_never_waits_however_large_the_function_and_the_tasks(
    make_crew: MakeCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = WorkerProcess._start

    def start_stopped(*arguments: Any) -> Any:
        process = start(*arguments)
        process.send_signal(signal.SIGSTOP)
        return process

    # Workers that read nothing: whoever waited for them to read would wait for good.
    monkeypatch.setattr(WorkerProcess, "_start", start_stopped)
    large = bytes(3_000_000)
    crew = make_crew(functools.partial(crew_jobs.sizes, large), workers=2)
    for ticket in range(4):
        crew.put(ticket, large[ticket:])
    for pid in crew.pids():
        os.kill(pid, signal.SIGCONT)
    for ticket in range(4):
        assert crew.get(ticket) == {"sizes": (3_000_000, 3_000_000 - ticket)}


def test_tickets_are_put_once_and_got_once(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.nothing)
    crew.put(0, None)
    with pytest.raises(SettingsError, match="ticket=0: is already queued"):
        crew.put(0, None)
    crew.get(0)
    for ticket in (0, 1):
        with pytest.raises(SettingsError, match=f"ticket={ticket}: was not queued"):
            crew.get(ticket)
    crew.put(2, None)
    crew.close()
    crew.close()
    with pytest.raises(StageError, match="^map: its worker processes have been closed"):
        crew.get(2)
    with pytest.raises(StageError, match="closed"):
        crew.put(3, None)


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"ahead": 0}, {"timeout_seconds": 0}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], make_crew: MakeCrew) -> None:
    with pytest.raises(SettingsError, match=f"{next(iter(wrong))}=0: must be"):
        make_crew(crew_jobs.nothing, **wrong)


# Memory


def test_results_may_grow_and_shrink(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.filled, workers=2)
    kept = []
    for ticket, count in enumerate([10, 10, 1000, 50_000, 5, 0, 2_000_000, 2_100_000, 7, 300_000]):
        crew.put(ticket, (ticket, count))
        kept.append((ticket, count, crew.get(ticket)["x"]))
        for first, length, found in kept:
            np.testing.assert_array_equal(found, np.arange(first, first + length))


def test_kept_results_are_never_written_over(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.filled, workers=2)
    kept, rng = {}, random.Random(2)
    for ticket in range(8):
        crew.put(ticket, (ticket * 10_000, 3000))
    for ticket in range(200):
        # A view of a view, as a user would keep: a slice, another type, a reversed row.
        kept[ticket] = crew.get(ticket)["x"].reshape(3, 1000)[1].view(np.uint64)[::-1]
        crew.put(ticket + 8, ((ticket + 8) * 10_000, 3000))
        while len(kept) > rng.choice([1, 3, 30]):
            kept.pop(rng.choice(list(kept)))
        for number, found in kept.items():
            assert found[0] == number * 10_000 + 1999
            assert found[-1] == number * 10_000 + 1000


def test_a_list_of_all_results_is_safe_and_outlives_the_crew(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.filled, workers=2)
    for ticket in range(40):
        crew.put(ticket, (ticket * 5000, 5000))
    everything = [crew.get(ticket)["x"] for ticket in range(40)]
    crew.close()
    np.testing.assert_array_equal(np.concatenate(everything), np.arange(40 * 5000))
    everything[0][:] = 0
    assert everything[1][0] == 5000


def test_a_loop_that_lets_go_uses_the_same_memory_again(make_crew: MakeCrew) -> None:
    others = _mapped()
    crew = make_crew(crew_jobs.filled, workers=2)

    def addresses(tickets: range) -> set[int]:
        found = set()
        for ticket in tickets:
            crew.put(ticket + 2, (ticket, 20_000))
            found.add(_address(crew.get(ticket)["x"]))
        return found

    crew.put(0, (0, 20_000))
    crew.put(1, (1, 20_000))
    addresses(range(10))
    files = open_files()
    found = addresses(range(10, 210))
    # Of each worker: one that is filled, one on its way, one in use here, and one that it has not been told of.
    new = [line for line in _mapped() if line not in others]
    assert len(new) <= 2 * 4
    assert len(found) <= 2 * 4
    assert open_files().items() <= files.items()


def _mapped() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:headrace" in line]


def test_old_memory_is_given_back_when_larger_memory_takes_its_place(make_crew: MakeCrew) -> None:
    others = _mapped()
    crew = make_crew(crew_jobs.filled)
    for ticket, count in enumerate([1000, 1000, 100_000, 100_000, 1_000_000, 1_000_000]):
        crew.put(ticket, (0, count))
        crew.get(ticket)
    assert len([line for line in _mapped() if line not in others]) == 1


def test_memory_has_no_name_that_could_be_left_behind(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.filled)
    before = named_memory(os.getpid())
    for ticket in range(3):
        crew.put(ticket, (0, 10_000))
        crew.get(ticket)
    assert _mapped()
    assert named_memory(os.getpid()) == before
    assert named_memory(crew.pids()[0]) == set()
