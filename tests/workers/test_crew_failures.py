"""What goes wrong in a crew: failures of tickets, deaths and hangs of workers, and how they are told."""

import functools
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.errors import SettingsError, StageError, StageTimeoutError
from headrace.workers.crew import Crew
from tests.workers import crew_jobs
from tests.workers.waiting import NEVER_SECONDS, HeldClock, has_ended, wait_for_file, wait_until_gone

MakeCrew = Callable[..., Crew]


# Exceptions


def test_an_exception_fails_its_ticket_and_no_other(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.picky, workers=2)
    for ticket in range(10):
        crew.put(ticket, ticket)
    for ticket in range(10):
        if ticket % 5 == 3:
            with pytest.raises(StageError) as caught:
                crew.get(ticket)
            assert str(caught.value) == f"map: failed on ticket {ticket}: PickyError: not this one: {ticket}"
            assert caught.value.__cause__ is None, "it cannot be unpickled"
            (note,) = caught.value.__notes__
            assert note.count("Traceback") == 1
            assert "in picky" in note
        else:
            assert crew.get(ticket)["x"][0] == ticket
    assert len(crew.pids()) == 2


def test_what_went_wrong_is_told_with_its_cause(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.perform)
    for ticket, (job, cause, said) in enumerate(
        [
            ("fails_plainly", KeyError, "row 5"),
            ("leaves", SystemExit, "failed on ticket 1: SystemExit: 5"),
            ("a_list", TypeError, "returned list; it must return a mapping"),
            ("unpicklable_value", object, "pickle"),
            ("cannot_be_opened", object, "cannot be unpickled here"),
        ]
    ):
        crew.put(ticket, (job, 5))
        with pytest.raises(StageError, match=said) as caught:
            crew.get(ticket)
        assert isinstance(caught.value.__cause__, cause)


def test_functions_that_cannot_be_sent_are_refused_with_a_remedy(make_crew: MakeCrew) -> None:
    def inner(task: Any) -> dict[str, Any]:
        return {}

    for work in (inner, lambda task: {}, functools.partial(crew_jobs.nothing, lambda: None)):
        with pytest.raises(SettingsError, match="top level of a module, or use threads"):
            make_crew(work)
    crew = make_crew(functools.partial(crew_jobs.nothing))
    with pytest.raises(SettingsError, match="cannot be pickled"):
        crew.put(0, lambda: None)
    crew.put(0, None)
    assert crew.get(0) == {}


# Deaths: they are told though the timeout is far away


def test_a_worker_that_exits_ends_the_crew_and_is_named(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.exits)
    for ticket in range(4):
        crew.put(ticket, ticket)
    assert crew.get(1)["x"][0] == 1
    pids = crew.pids()
    for ticket in (2, 3, 2):
        with pytest.raises(StageError, match=r"^map: .*exited with code 3 while working on ticket 2"):
            crew.get(ticket)
        assert crew.pids() == []
        assert not any(psutil.pid_exists(pid) for pid in pids)
    assert crew.get(0)["x"][0] == 0, "what had come before is still there"


def test_a_crash_is_named_by_its_signal(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.crashes)
    crew.put(0, 0)
    with pytest.raises(StageError, match="SIGSEGV while working on ticket 0"):
        crew.get(0)


def test_a_worker_killed_at_its_task_is_told(make_crew: MakeCrew, tmp_path: Path) -> None:
    crew = make_crew(crew_jobs.hangs)
    crew.put(0, "")
    crew.get(0)
    crew.put(1, str(tmp_path / "begun"))
    wait_for_file(tmp_path / "begun")
    os.kill(crew.pids()[0], signal.SIGKILL)
    with pytest.raises(StageError, match=r"killed by SIGKILL \(out of memory\?\) while working on ticket 1"):
        crew.get(1)


def test_a_worker_killed_while_it_had_nothing_to_do_is_told(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.nothing)
    crew.put(0, None)
    crew.get(0)
    pids = crew.pids()
    os.kill(pids[0], signal.SIGKILL)
    wait_until_gone(pids)
    crew.put(1, None)
    with pytest.raises(StageError, match=r"killed by SIGKILL \(out of memory\?\) while "):
        crew.get(1)


def test_a_dead_worker_is_noticed_though_a_child_of_it_lives(make_crew: MakeCrew, tmp_path: Path) -> None:
    crew = make_crew(crew_jobs.dies_but_leaves_a_child_with_its_socket)
    crew.put(0, str(tmp_path / "child"))
    with pytest.raises(StageError, match="exited with code 7"):
        crew.get(0)
    child = int((tmp_path / "child").read_text())
    assert not has_ended(child)
    os.kill(child, signal.SIGKILL)


# Hangs


def test_a_hang_is_a_timeout_that_shows_where(
    make_crew: MakeCrew, held_clock: HeldClock, tmp_path: Path
) -> None:
    crew = make_crew(crew_jobs.hangs, workers=2, timeout_seconds=20)
    crew.put(0, "")
    crew.get(0)
    held_clock.advance_when_there_is(tmp_path / "begun", 21)
    crew.put(1, str(tmp_path / "begun"))
    with pytest.raises(StageTimeoutError, match="ticket 1 .*timeout_seconds=20") as caught:
        crew.get(1)
    assert "in hangs" in str(caught.value)
    assert str(caught.value).startswith("map: ticket 1 took longer")
    assert isinstance(caught.value, TimeoutError)
    assert crew.pids() == []


def test_a_worker_that_cannot_even_listen_is_killed(
    make_crew: MakeCrew, held_clock: HeldClock, tmp_path: Path
) -> None:
    long_look = "a" * 50 + "b"
    crew = make_crew(crew_jobs.never_lets_go, workers=2, timeout_seconds=20)
    held_clock.advance_when_there_is(tmp_path / "begun", 21)
    for ticket in range(2):
        crew.put(ticket, (str(tmp_path / "begun"), long_look))
    pids = crew.pids()
    with pytest.raises(StageTimeoutError, match="in never_lets_go"):
        crew.get(0)
    assert not any(map(psutil.pid_exists, pids))


def test_closing_does_not_wait_for_a_worker_that_cannot_even_listen(
    make_crew: MakeCrew, tmp_path: Path
) -> None:
    crew = make_crew(crew_jobs.never_lets_go)
    crew.put(0, (str(tmp_path / "idle"), "b"))
    crew.get(0)
    crew.put(1, (str(tmp_path / "begun"), "a" * 50 + "b"))
    wait_for_file(tmp_path / "begun")
    pids = crew.pids()
    crew.close()
    assert not any(map(psutil.pid_exists, pids))


def test_only_the_time_a_task_takes_counts_against_its_deadline(
    make_crew: MakeCrew, held_clock: HeldClock, tmp_path: Path
) -> None:
    crew = make_crew(crew_jobs.leave_a_mark, timeout_seconds=20)
    marks = [tmp_path / str(ticket) for ticket in range(4)]
    for ticket, mark in enumerate(marks):
        held_clock.advance_when_there_is(mark, 15)
        crew.put(ticket, str(mark))
    assert crew.get(3)["x"].shape == (8,)
    assert held_clock() == 60


def test_a_consumer_that_was_away_longer_than_the_deadline_gets_its_results(
    make_crew: MakeCrew, held_clock: HeldClock
) -> None:
    crew = make_crew(crew_jobs.filled, timeout_seconds=20)
    crew.put(0, (0, 10))
    crew.get(0)
    crew.put(1, (1, 2_000_000))
    assert select.select([crew._workers[0].connection], [], [], NEVER_SECONDS)[0]
    held_clock.advance(1000)
    assert crew.get(1)["x"][-1] == 2_000_000


def test_a_worker_that_does_not_start_is_a_timeout_that_shows_where(
    make_crew: MakeCrew, held_clock: HeldClock, tmp_path: Path
) -> None:
    held_clock.advance_when_there_is(tmp_path / "begun", 301)
    crew = make_crew(crew_jobs.HangsWhenItIsLoaded(str(tmp_path / "begun")))
    crew.put(0, None)
    with pytest.raises(StageTimeoutError, match="did not start in 300 seconds") as caught:
        crew.get(0)
    assert "in hangs" in str(caught.value)


# Ctrl-C


def test_an_interrupt_while_waiting_loses_nothing(
    make_crew: MakeCrew, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    crew = make_crew(crew_jobs.waits_for_a_mark)
    crew.put(1, (str(tmp_path / "begun"), str(tmp_path / "may end")))
    real = crew._selector.select

    def select_interrupted(seconds: float) -> Any:
        if (tmp_path / "begun").exists():
            signal.raise_signal(signal.SIGINT)
        return real(seconds)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(crew._selector, "select", select_interrupted)
            with pytest.raises(KeyboardInterrupt):
                crew.get(1)
    finally:
        signal.signal(signal.SIGINT, before)
    (tmp_path / "may end").touch()
    assert crew.get(1)["x"].shape == (8,)
