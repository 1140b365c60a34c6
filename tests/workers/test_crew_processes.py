"""The processes of a crew: what they inherit, how they end with whoever started them, and that nothing stays behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headrace.workers.crew import Crew
from tests.workers import crew_jobs
from tests.workers.left_behind import nothing_left_behind, things_here
from tests.workers.waiting import NEVER_SECONDS, PATIENCE_SECONDS, has_ended, wait_until, wait_until_gone

MakeCrew = Callable[..., Crew]
Start = Callable[..., "subprocess.Popen[str]"]


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
    crew = make_crew(crew_jobs.open_files, workers=2)
    for ticket in range(4):
        crew.put(ticket, ticket)
    for ticket in range(4):
        found = crew.get(ticket)
        assert len([name for name in found["own"] if name.startswith("socket:")]) == 1
        assert not [name for name in found["child"] if "socket:" in name or "memfd" in name]


def test_a_crew_that_is_dropped_closes_itself() -> None:
    with nothing_left_behind():
        before = things_here()
        crew = Crew(crew_jobs.filled, workers=2, timeout_seconds=NEVER_SECONDS, stage="map")
        for ticket in range(6):
            crew.put(ticket, (0, 1000))
        for ticket in range(5):
            crew.get(ticket)
        new = things_here() - before
        assert len([kind for kind, _, _ in new if kind == "process"]) == 2
        del crew
        assert things_here() - before == set(), "without a garbage collection"


def test_an_exception_in_the_consumer_leaves_nothing() -> None:
    def consume() -> None:
        crew = Crew(crew_jobs.nothing, workers=1, timeout_seconds=NEVER_SECONDS, stage="map")
        crew.put(0, 1000)
        raise RuntimeError("the consumer's own")

    with nothing_left_behind(), contextlib.suppress(RuntimeError):
        consume()


# Whole programs

SCRIPT = """\
import os, signal, sys, time
import numpy as np
from headrace.workers.crew import Crew

class Oops(Exception):
    pass

def square(task):
    if task == "sleep":
        time.sleep(600)
    if task == "oops":
        raise Oops("from the script")
    return {"x": np.arange(task) ** 2}

def start(workers=1):
    # Tests may run in the background, where Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return Crew(square, workers=workers, timeout_seconds=600, stage="script")

"""


def test_a_function_and_its_exceptions_may_come_from_the_users_script(start_program: Start) -> None:
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
    program = start_program(SCRIPT + textwrap.dedent(body), cwd="/")
    assert program.communicate(timeout=PATIENCE_SECONDS) == ("[0, 1, 4, 9]\nTrue from the script\n", "")


def test_a_script_without_a_guard_is_told_so(start_program: Start) -> None:
    program = start_program(SCRIPT + "crew = start(); crew.put(0, 4); crew.get(0)")
    assert 'under `if __name__ == "__main__":`' in program.communicate(timeout=PATIENCE_SECONDS)[1]


def test_an_interactive_function_is_refused() -> None:
    program = SCRIPT + "\ntry:\n    start()\nexcept ValueError as error:\n    print(error)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "defined interactively" in done.stdout
    assert "top level of a module" in done.stdout


BUSY = """
if __name__ == "__main__":
    crew = start(workers=2)
    for ticket in range(2):
        crew.put(ticket, 10)
    for ticket in range(2):
        crew.get(ticket)
    for ticket in range(2, 4):
        crew.put(ticket, "sleep")
    print(*crew.pids(), flush=True)
    crew.get(2)
"""


def _pids(program: "subprocess.Popen[str]") -> list[int]:
    """Those that it prints."""
    assert program.stdout is not None
    return [int(pid) for pid in program.stdout.readline().split()]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent_however_it_ends(sign: signal.Signals, start_program: Start) -> None:
    parent = start_program(SCRIPT + BUSY)
    pids = _pids(parent)
    assert len(pids) == 2
    assert all(psutil.pid_exists(pid) for pid in pids)
    if sign is signal.SIGINT:
        # As a terminal does: to the whole group.
        os.killpg(parent.pid, sign)
    else:
        parent.send_signal(sign)
    _, complaint = parent.communicate(timeout=PATIENCE_SECONDS)
    assert parent.returncode != 0
    wait_until_gone(pids)
    assert complaint.count("Traceback") == (sign is signal.SIGINT), "the workers say nothing of their own"


def test_a_fork_of_the_parent_neither_ends_the_crew_nor_keeps_it(start_program: Start) -> None:
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
            print(crew.get(0)["x"].tolist(), flush=True)
            child = os.fork()
            if child == 0:
                time.sleep(600)
            print(child, *crew.pids(), flush=True)
            crew.put(1, "sleep")
            crew.get(1)
    """
    parent = start_program(SCRIPT + textwrap.dedent(body))
    assert parent.stdout is not None
    assert "this is a fork of it" in parent.stdout.readline()
    assert parent.stdout.readline() == "[0, 1, 4]\n"
    child, *pids = _pids(parent)
    parent.kill()
    wait_until(lambda: has_ended(parent.pid), "the parent is dead")
    wait_until_gone(pids)
    assert not has_ended(child)
