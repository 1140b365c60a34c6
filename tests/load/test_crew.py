"""A crew with real processes: its results, its memory, its failures, and what it leaves behind."""

import contextlib
import functools
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.errors import SettingsError, StageError, StageTimeoutError
from penstock.load import crew as crew_module
from penstock.load.crew import Crew
from tests.load import crew_jobs

MakeCrew = Callable[..., Crew]


@pytest.fixture
def make_crew() -> Iterator[MakeCrew]:
    """Crews that are closed after the test, which must then have left nothing."""
    before, crews = _left(), []

    def make(work: Callable[[Any], Any], **settings: Any) -> Crew:
        crews.append(
            Crew(work, **{"workers": 1, "slots": 4, "timeout_seconds": 30, "stage": "map", **settings})
        )
        return crews[-1]

    yield make
    while crews:
        started = time.monotonic()
        crews.pop().close()
        assert time.monotonic() - started < 1
    gc.collect()
    assert _left() == before


def _shared_memory() -> set[str]:
    """Shared memory with a name; semaphores of multiprocessing belong to other tests that run beside this one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def _left() -> tuple[int, list[int], set[str]]:
    """Open files, child processes (dead ones that nobody waited for too), and shared memory with a name."""
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    return len(os.listdir("/proc/self/fd")), children, _shared_memory()


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, "workers outlived the process that started them"
        time.sleep(0.01)


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


def test_a_worker_goes_on_with_the_tasks_that_wait_with_it_while_nobody_calls(
    make_crew: MakeCrew, tmp_path: Path
) -> None:
    crew = make_crew(crew_jobs.leave_a_mark, ahead=3, slots=6)
    marks = [tmp_path / str(number) for number in range(4)]
    crew.put(0, str(marks[0]))
    crew.get(0)
    for number in (1, 2, 3):
        crew.put(number, str(marks[number]))
    deadline = time.monotonic() + 10
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < deadline, "tasks wait for the next call"
        time.sleep(0.01)
    for number in (3, 1, 2):
        assert crew.get(number)["x"].shape == (8,)


def test_results_are_the_functions_in_whatever_order_they_are_asked_for(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.filled, workers=2)
    tickets = list(range(60))
    for ticket in tickets:
        crew.put(ticket, (ticket * 1000, ticket))
    random.Random(1).shuffle(tickets)
    for ticket in tickets:
        _assert_same(crew.get(ticket), crew_jobs.filled((ticket * 1000, ticket)))


def test_arrays_of_every_kind_and_shape_come_whole_by_socket_and_by_slot(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.everything)
    for seed in range(4):
        crew.put(seed, seed)
        _assert_same(crew.get(seed), crew_jobs.everything(seed))


def test_empty_results_are_results(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.nothing)
    for ticket in range(3):
        crew.put(ticket, None)
        assert crew.get(ticket) == {}


def test_results_may_grow_and_shrink(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.filled, workers=2, slots=3)
    kept = []
    for ticket, count in enumerate([10, 10, 1000, 50_000, 5, 0, 2_000_000, 2_100_000, 7, 300_000]):
        crew.put(ticket, (ticket, count))
        kept.append((ticket, count, crew.get(ticket)["x"]))
        for first, length, found in kept:
            np.testing.assert_array_equal(found, np.arange(first, first + length))


def test_kept_results_are_never_written_over(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.filled, workers=2, slots=3)
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
    crew = make_crew(crew_jobs.filled, workers=2, slots=2)
    for ticket in range(40):
        crew.put(ticket, (ticket * 5000, 5000))
    everything = [crew.get(ticket)["x"] for ticket in range(40)]
    crew.close()
    np.testing.assert_array_equal(np.concatenate(everything), np.arange(40 * 5000))
    everything[0][:] = 0
    assert everything[1][0] == 5000


def test_a_loop_that_lets_go_uses_the_same_memory_again(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.filled, workers=2, slots=5)

    def addresses(tickets: range) -> set[int]:
        found = set()
        for ticket in tickets:
            crew.put(ticket + 2, (ticket, 20_000))
            found.add(_address(crew.get(ticket)["x"]))
        return found

    crew.put(0, (0, 20_000))
    crew.put(1, (1, 20_000))
    addresses(range(10))
    files, mapped = len(os.listdir("/proc/self/fd")), _mapped()
    found = addresses(range(10, 210))
    assert len(found) <= 5
    low, high = (int(number, 16) for number in mapped[0].split()[0].split("-"))
    assert all(low <= address < high for address in found)
    assert (len(os.listdir("/proc/self/fd")), _mapped()) == (files, mapped)


def _mapped() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:penstock" in line]


def test_old_memory_is_given_back_when_larger_memory_takes_its_place(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.filled)
    for ticket, count in enumerate([1000, 1000, 100_000, 100_000, 1_000_000, 1_000_000]):
        crew.put(ticket, (0, count))
        crew.get(ticket)
    assert len(_mapped()) == 1


def test_an_exception_fails_its_ticket_and_no_other(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.picky, workers=2)
    for ticket in range(10):
        crew.put(ticket, ticket)
    for ticket in range(10):
        if ticket % 5 == 3:
            with pytest.raises(StageError) as caught:
                crew.get(ticket)
            for part in (
                "stage=map",
                f"ticket {ticket}",
                f"task={ticket}",
                "PickyError",
                "Traceback",
                "in picky",
            ):
                assert part in str(caught.value)
            assert caught.value.__cause__ is None
        else:
            assert crew.get(ticket)["x"][0] == ticket
    assert len(crew.pids()) == 2


@pytest.mark.parametrize(
    ("work", "cause", "said"),
    [
        (crew_jobs.fails_plainly, KeyError, "row 5"),
        (crew_jobs.leaves, SystemExit, "SystemExit in ticket 0"),
        (crew_jobs.a_list, TypeError, "returned list: must return a mapping"),
        (crew_jobs.unpicklable_value, object, "pickle"),
        (crew_jobs.cannot_be_opened, object, "cannot be unpickled here"),
    ],
)
def test_what_went_wrong_is_told_with_its_cause(
    work: Callable[[int], Any], cause: type, said: str, make_crew: MakeCrew
) -> None:
    crew = make_crew(work)
    crew.put(0, 5)
    with pytest.raises(StageError, match=said) as caught:
        crew.get(0)
    assert isinstance(caught.value.__cause__, cause)


def test_a_worker_that_exits_ends_the_crew_and_is_named(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.exits)
    for ticket in range(4):
        crew.put(ticket, ticket)
    assert crew.get(1)["x"][0] == 1
    pids = crew.pids()
    for ticket in (2, 3, 2):
        with pytest.raises(StageError, match=r"stage=map: .*exited with code 3 while working on ticket 2"):
            crew.get(ticket)
        assert crew.pids() == []
        assert not any(psutil.pid_exists(pid) for pid in pids)
    assert crew.get(0)["x"][0] == 0, "what had come before is still there"


def test_a_crash_is_named_by_its_signal(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.crashes, workers=2)
    crew.put(0, 0)
    with pytest.raises(StageError, match="SIGSEGV while working on ticket 0"):
        crew.get(0)


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_killed_from_outside_is_told_at_once(busy: bool, make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.sleeps)
    crew.put(0, 0)
    crew.get(0)
    if busy:
        crew.put(1, 1000)
    os.kill(crew.pids()[0], signal.SIGKILL)
    if not busy:
        time.sleep(0.05)
        crew.put(1, 0)
    started = time.monotonic()
    with pytest.raises(
        StageError, match="killed by SIGKILL while " + ("working on ticket 1" if busy else "")
    ):
        crew.get(1)
    assert time.monotonic() - started < 1


def test_a_dead_worker_is_noticed_though_a_child_of_it_lives(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.dies_but_leaves_a_child_with_its_socket)
    crew.put(0, 0)
    started = time.monotonic()
    with pytest.raises(StageError, match="exited with code 7"):
        crew.get(0)
    assert time.monotonic() - started < 3.5


def test_a_hang_is_a_timeout_that_shows_where(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.hangs, workers=2, timeout_seconds=0.5)
    crew.put(0, 0)
    crew.get(0)
    crew.put(1, 1)
    started = time.monotonic()
    with pytest.raises(StageTimeoutError, match="ticket 1 .*timeout_seconds=0.5") as caught:
        crew.get(1)
    assert 0.4 < time.monotonic() - started < 2.5
    assert "a_long_wait" in str(caught.value)
    assert "stage=map" in str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert crew.pids() == []


def test_a_worker_that_cannot_even_listen_is_killed(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.never_lets_go, timeout_seconds=0.5)
    crew.put(0, "a" * 50 + "b")
    with pytest.raises(StageTimeoutError, match="in never_lets_go"):
        crew.get(0)
    crew = make_crew(crew_jobs.never_lets_go)
    crew.put(0, "b")
    crew.get(0)
    # The fixture closes it in less than a second.
    crew.put(1, "a" * 50 + "b")


def test_only_the_time_a_task_takes_counts_against_its_deadline(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.sleeps, timeout_seconds=0.6)
    for ticket in range(4):
        crew.put(ticket, 0.25)
    assert crew.get(3) == {"slept": 0.25}


def test_a_consumer_that_was_away_longer_than_the_deadline_gets_its_results(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.filled, slots=1, timeout_seconds=1)
    kept = []
    for ticket in range(3):
        crew.put(ticket, (ticket, 2_000_000))
        if ticket < 2:
            kept.append(crew.get(ticket))
    # The only slot is kept, and a socket holds less than this: the worker cannot send all of it meanwhile.
    time.sleep(1.4)
    assert crew.get(2)["x"][-1] == 2_000_001


def test_an_interrupt_while_waiting_loses_nothing(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.sleeps)
    crew.put(0, 0)
    crew.get(0)
    crew.put(1, 0.4)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            crew.get(1)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert crew.get(1) == {"slept": 0.4}


def test_putting_never_waits_however_large_the_function_and_the_tasks(make_crew: MakeCrew) -> None:
    large = bytes(3_000_000)
    started = time.monotonic()
    crew = make_crew(functools.partial(crew_jobs.sizes, large), workers=2)
    for ticket in range(4):
        crew.put(ticket, large[ticket:])
    assert time.monotonic() - started < 1
    for ticket in range(4):
        assert crew.get(ticket) == {"sizes": (3_000_000, 3_000_000 - ticket)}


def test_where_memory_cannot_be_anonymous_it_is_an_unlinked_file(
    make_crew: MakeCrew, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    crew = make_crew(crew_jobs.filled)
    for ticket in range(5):
        crew.put(ticket, (ticket, 5000))
        _assert_same(crew.get(ticket), crew_jobs.filled((ticket, 5000)))
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_does_not_start_is_a_timeout(
    make_crew: MakeCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "START_SECONDS", 0.01)
    crew = make_crew(crew_jobs.nothing)
    crew.put(0, None)
    with pytest.raises(StageTimeoutError, match="did not start"):
        crew.get(0)


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


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"slots": 0}, {"timeout_seconds": 0}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], make_crew: MakeCrew) -> None:
    with pytest.raises(SettingsError, match=f"{next(iter(wrong))}=0: must be"):
        make_crew(crew_jobs.nothing, **wrong)


def test_tickets_are_put_once_and_got_once(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.nothing)
    crew.put(0, None)
    with pytest.raises(SettingsError, match="ticket=0: was put already"):
        crew.put(0, None)
    crew.get(0)
    for ticket in (0, 1):
        with pytest.raises(SettingsError, match=f"ticket={ticket}: was not put"):
            crew.get(ticket)
    crew.put(2, None)
    crew.close()
    crew.close()
    with pytest.raises(StageError, match="stage=map: its crew is closed"):
        crew.get(2)
    with pytest.raises(StageError, match="closed"):
        crew.put(3, None)


def test_workers_have_the_surroundings_of_the_process_that_started_them(
    make_crew: MakeCrew, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a file in the directory is not a module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    crew = make_crew(crew_jobs.surroundings)
    crew.put(0, None)
    assert crew.get(0) == {
        "cwd": str(tmp_path),
        "path": sys.path,
        "argv": sys.argv,
        "search": "somewhere",
        "main": "crew_worker.py",
    }


def test_a_worker_has_its_own_socket_only_and_passes_nothing_on(make_crew: MakeCrew) -> None:
    crew = make_crew(crew_jobs.open_files, workers=3)
    for ticket in range(6):
        crew.put(ticket, ticket)
    for ticket in range(6):
        found = crew.get(ticket)
        assert len([name for name in found["own"] if name.startswith("socket:")]) == 1
        assert not [name for name in found["child"] if "socket:" in name or "memfd" in name]


def test_a_crew_that_is_dropped_closes_itself() -> None:
    before = _left()
    crew = Crew(crew_jobs.filled, workers=2, slots=2, timeout_seconds=30, stage="map")
    for ticket in range(6):
        crew.put(ticket, (0, 1000))
    for ticket in range(5):
        crew.get(ticket)
    assert len(_left()[1]) == len(before[1]) + 2
    del crew
    assert _left() == before


def test_an_exception_in_the_consumer_leaves_nothing() -> None:
    def consume() -> None:
        crew = Crew(crew_jobs.sleeps, workers=2, slots=2, timeout_seconds=30, stage="map")
        crew.put(0, 1000)
        raise RuntimeError("the consumer's own")

    before = _left()
    with contextlib.suppress(RuntimeError):
        consume()
    assert _left() == before


SCRIPT = """
    import os, sys, time
    import numpy as np
    from penstock.load.crew import Crew

    class Oops(Exception):
        pass

    def square(task):
        if task == "sleep":
            time.sleep(1000)
        if task == "oops":
            raise Oops("from the script")
        return {"x": np.arange(task) ** 2}

    def start():
        return Crew(square, workers=2, slots=2, timeout_seconds=30, stage="script")
"""


def _run(tmp_path: Path, body: str, **options: Any) -> "subprocess.Popen[str]":
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def test_a_function_and_its_exceptions_may_come_from_the_users_script(tmp_path: Path) -> None:
    body = """
        if __name__ == "__main__":
            crew = start()
            crew.put(0, 4)
            crew.put(1, "oops")
            print(crew.get(0)["x"].tolist())
            try:
                crew.get(1)
            except Exception as error:
                print(type(error.__cause__) is Oops, error.__cause__)
    """
    out, complaint = _run(tmp_path, body, cwd="/").communicate(timeout=20)
    assert (out, complaint) == ("[0, 1, 4, 9]\nTrue from the script\n", "")


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    _, complaint = _run(tmp_path, "crew = start(); crew.put(0, 4); crew.get(0)").communicate(timeout=20)
    assert 'under `if __name__ == "__main__":`' in complaint


def test_an_interactive_function_is_refused() -> None:
    program = textwrap.dedent(SCRIPT) + "\ntry:\n    start()\nexcept ValueError as error:\n    print(error)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "defined interactively" in done.stdout
    assert "top level of a module" in done.stdout


BUSY = """
    if __name__ == "__main__":
        crew = start()
        crew.put(0, 10)
        crew.get(0)
        crew.put(1, "sleep")
        crew.put(2, "sleep")
        print(*crew.pids(), flush=True)
        crew.get(1)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent_however_it_ends(sign: signal.Signals, tmp_path: Path) -> None:
    parent = _run(tmp_path, BUSY)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(psutil.pid_exists(pid) for pid in pids)
    if sign is signal.SIGINT:
        # As a terminal does: to the whole group.
        os.killpg(parent.pid, sign)
    else:
        parent.send_signal(sign)
    _, complaint = parent.communicate(timeout=20)
    assert parent.returncode != 0
    _wait_until_gone(pids)
    assert complaint.count("Traceback") == (sign is signal.SIGINT), "the workers say nothing of their own"


def test_a_fork_of_the_parent_neither_ends_the_crew_nor_keeps_it(tmp_path: Path) -> None:
    body = """
        if __name__ == "__main__":
            crew = start()
            crew.put(0, 3)
            child = os.fork()
            if child == 0:
                try:
                    crew.get(0)
                except Exception as error:
                    print(error, flush=True)
                sys.exit()
            os.waitpid(child, 0)
            print(crew.get(0)["x"].tolist())
            if os.fork() == 0:
                time.sleep(6)
                os._exit(0)
            print(*crew.pids(), flush=True)
            crew.put(1, "sleep")
            crew.get(1)
    """
    parent = _run(tmp_path, body)
    assert parent.stdout is not None
    assert "this is a fork of it" in parent.stdout.readline()
    assert parent.stdout.readline() == "[0, 1, 4]\n"
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    started = time.monotonic()
    _wait_until_gone(pids)
    assert time.monotonic() - started < 4
    os.killpg(parent.pid, signal.SIGKILL)
    parent.communicate()
