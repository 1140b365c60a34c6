"""However a loop ends, nothing is left: no threads, no processes, no open files, no shared memory with a name."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.load.loader import Loader
from tests.load import streams

SCRIPT_SECONDS = 60


def _shared_memory() -> set[str]:
    """Shared memory with a name; semaphores of multiprocessing belong to other tests that run beside this one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def _left() -> tuple[list[str], int, list[int], set[str]]:
    """Our threads, open files, child processes and named shared memory."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-")]
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    return threads, len(os.listdir("/proc/self/fd")), children, _shared_memory()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    gc.collect()
    before = _left()
    assert before[0] == [], "an earlier test left threads"
    yield
    gc.collect()
    assert _left() == before


def _threads() -> int:
    return sum(thread.name.startswith("penstock-") for thread in threading.enumerate())


def _tokens(**options: Any) -> Loader:
    return Loader(
        streams.token_dataset([8] * 400), **{"batch_size": 2, "seq_len": 8, "workers": 3, **options}
    )


@pytest.mark.usefixtures("nothing_left")
def test_threads_end_with_the_last_batch() -> None:
    loader = _tokens()
    batches = iter(loader)
    next(batches)
    assert 1 <= _threads() <= 3
    for _ in batches:
        pass
    # Not only when the iteration is collected: a trainer may hold it for the rest of its life.
    assert _threads() == 0
    assert next(batches, None) is None


@pytest.mark.usefixtures("nothing_left")
def test_threads_end_after_break_an_exception_and_close() -> None:
    loader = _tokens()
    for _ in loader:
        break
    gc.collect()
    assert _threads() == 0
    with contextlib.suppress(RuntimeError):
        for _ in loader:
            raise RuntimeError("the step failed")
    gc.collect()
    assert _threads() == 0
    batches: Any = iter(loader)
    next(batches)
    batches.close()
    assert _threads() == 0
    assert list(batches) == []


@pytest.mark.usefixtures("nothing_left")
def test_threads_end_when_the_loader_is_forgotten() -> None:
    loader = _tokens(epochs=None)
    batches = iter(loader)
    held = next(batches)
    del loader, batches
    gc.collect()
    assert _threads() == 0
    assert held.tokens.shape == (2, 8)


@pytest.mark.usefixtures("nothing_left")
def test_many_loops_left_early_leave_nothing_behind() -> None:
    loader = _tokens(epochs=None)
    for _ in range(50):
        next(iter(loader))
    assert _threads() == 0


@pytest.mark.usefixtures("nothing_left")
def test_a_failing_stage_leaves_no_threads_while_its_error_is_held() -> None:
    loader = Loader(streams.Numbers(40), batch_size=4, shuffle=False, workers=2).map(streams.failing)
    error = None
    try:
        list(loader)
    except Exception as caught:
        error = caught
    assert error is not None
    assert _threads() == 0


@pytest.mark.usefixtures("nothing_left")
def test_shards_are_unmapped_when_the_loader_is_gone(tmp_path: Path) -> None:
    path = streams.write_tokens(tmp_path / "data", [8] * 60)
    loader = Loader(path, batch_size=2, seq_len=8)
    list(loader)
    assert str(path) in Path("/proc/self/maps").read_text()
    del loader
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


# Whole programs

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, child_environment: dict[str, str]) -> Iterator[Start]:
    """Runs a script that can import the tests' helpers, in a process group of its own."""
    programs = []
    named = _shared_memory()

    def run(code: str) -> "subprocess.Popen[str]":
        script = tmp_path / "script.py"
        script.write_text(PREAMBLE + textwrap.dedent(code))
        path = os.pathsep.join([str(Path(__file__).parents[2]), child_environment.get("PYTHONPATH", "")])
        program = subprocess.Popen(
            [sys.executable, "-W", "error", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**child_environment, "PYTHONPATH": path},
            start_new_session=True,
        )
        programs.append(program)
        return program

    yield run
    for program in programs:
        if program.poll() is None:
            program.kill()
        program.communicate()
    assert _shared_memory() == named


PREAMBLE = """\
import os, signal, sys, time
import numpy as np
import psutil
from tests.load import streams
import penstock

def tokens(**options):
    data = streams.token_dataset([8] * 4000)
    return penstock.Loader(data, **{"batch_size": 2, "seq_len": 8, "epochs": None, **options})

def children():
    return [child.pid for child in psutil.Process().children(recursive=True)]

"""


def _first_line(program: "subprocess.Popen[str]") -> str:
    assert program.stdout is not None
    return program.stdout.readline()


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, f"processes outlived the program: {pids}"
        time.sleep(0.02)


ENDINGS = {
    "threads": "held = [batch for _, batch in zip(range(5), tokens())]",
    "an iteration that is still held": "batches = iter(tokens(workers=3)); next(batches)",
    "in the middle of a loop": "for batch in tokens(): break",
    "an iteration in a reference cycle": "c = [iter(tokens())]; c.append(c); next(c[0]); del c",
    "processes": """
        if __name__ == "__main__":
            batches = iter(tokens().map(dict, per="batch", processes=2)); held = next(batches)
        """,
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_that_ends_in_the_middle_ends_at_once_and_without_a_word(name: str, start: Start) -> None:
    program = start(ENDINGS[name])
    out, error = program.communicate(timeout=SCRIPT_SECONDS)
    assert (program.returncode, out, error) == (0, "", "")


@pytest.mark.parametrize("processes", [0, 2])
def test_ctrl_c_ends_a_program_at_once_with_its_usual_exception(processes: int, start: Start) -> None:
    program = start(
        f"""
        if __name__ == "__main__":
            loader = tokens()
            if {processes}:
                loader = loader.map(dict, per="batch", processes={processes})
            for step, batch in enumerate(loader):
                if step == 3:
                    print(*children(), flush=True)
                time.sleep(0.001)
        """
    )
    pids = list(map(int, _first_line(program).split()))
    assert len(pids) == processes
    started = time.monotonic()
    # To the whole group, as a terminal does.
    os.killpg(program.pid, signal.SIGINT)
    _, error = program.communicate(timeout=SCRIPT_SECONDS)
    assert time.monotonic() - started < 5
    assert program.returncode == -signal.SIGINT
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert error.count("Traceback (most recent call last)") == 1, error
    _wait_until_gone(pids)


def test_ctrl_c_while_waiting_for_a_slow_batch_ends_a_program_too(start: Start) -> None:
    program = start(
        """
        def slow(sample):
            time.sleep(1)
            return sample

        loader = tokens().map(slow)
        print("waiting", flush=True)
        next(iter(loader))
        """
    )
    assert _first_line(program) == "waiting\n"
    time.sleep(0.5)
    started = time.monotonic()
    os.killpg(program.pid, signal.SIGINT)
    _, error = program.communicate(timeout=SCRIPT_SECONDS)
    assert time.monotonic() - started < 8
    assert error.rstrip().endswith("KeyboardInterrupt")


def test_a_program_that_is_killed_leaves_no_processes(start: Start) -> None:
    program = start(
        """
        if __name__ == "__main__":
            batches = iter(tokens().map(dict, per="batch", processes=2))
            next(batches)
            print(*children(), flush=True)
            time.sleep(60)
        """
    )
    pids = list(map(int, _first_line(program).split()))
    assert len(pids) == 2
    program.kill()
    program.wait(SCRIPT_SECONDS)
    _wait_until_gone(pids)


def test_the_next_start_after_a_kill_works_at_once(start: Start) -> None:
    """Nothing with a name is left that a second run, or another user, could stumble over."""
    code = """
        if __name__ == "__main__":
            batch = next(iter(tokens().map(dict, per="batch", processes=1)))
            print(batch["tokens"].shape, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    for _ in range(2):
        out, error = start(code).communicate(timeout=SCRIPT_SECONDS)
        assert (out, error) == ("(2, 8)\n", "")


def test_a_program_that_forks_while_loading_is_not_held_up(start: Start) -> None:
    program = start(
        """
        import warnings
        warnings.simplefilter("ignore")
        batches = iter(tokens(workers=2))
        next(batches)
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        next(batches)
        print("child", os.waitstatus_to_exitcode(status))
        """
    )
    out, error = program.communicate(timeout=SCRIPT_SECONDS)
    assert (program.returncode, out, error) == (0, "child 0\n", "")


def test_an_iteration_taken_into_a_fork_says_so_at_once(start: Start) -> None:
    """Its threads stayed behind: to wait for them would be to wait for the timeout."""
    program = start(
        """
        import warnings
        warnings.simplefilter("ignore")
        batches = iter(tokens(timeout_seconds=6))
        next(batches)
        pid = os.fork()
        if pid == 0:
            started = time.monotonic()
            try:
                for _ in range(100):
                    next(batches)
            except penstock.PenstockError as error:
                print("fork" in str(error), time.monotonic() - started < 3, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        """
    )
    out, _ = program.communicate(timeout=SCRIPT_SECONDS)
    assert out == "True True\n"
