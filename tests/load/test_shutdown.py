"""However a loop ends, nothing is left: no threads, no processes, no open files, no shared memory with a name."""

import contextlib
import gc
import os
import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.load.loader import Loader
from tests.load import streams
from tests.workers.left_behind import named_memory, nothing_left_behind
from tests.workers.waiting import PATIENCE_SECONDS, loading_threads, wait_until_gone


@pytest.fixture
def nothing_left() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture
def threads() -> Callable[[], int]:
    """How many the test has now."""
    before = loading_threads()
    return lambda: len(loading_threads() - before)


def _tokens(**options: Any) -> Loader:
    return Loader(
        streams.token_dataset([8] * 400), **{"batch_size": 2, "seq_len": 8, "workers": 3, **options}
    )


@pytest.mark.usefixtures("nothing_left")
def test_threads_end_with_the_last_batch(threads: Callable[[], int]) -> None:
    loader = _tokens()
    batches = iter(loader)
    next(batches)
    assert 1 <= threads() <= 3
    for _ in batches:
        pass
    # Not only when the iteration is collected: a trainer may hold it for the rest of its life.
    assert threads() == 0
    assert next(batches, None) is None


@pytest.mark.usefixtures("nothing_left")
def test_threads_end_after_break_an_exception_and_close(threads: Callable[[], int]) -> None:
    loader = _tokens()
    for _ in loader:
        break
    gc.collect()
    assert threads() == 0
    with contextlib.suppress(RuntimeError):
        for _ in loader:
            raise RuntimeError("the step failed")
    gc.collect()
    assert threads() == 0
    batches: Any = iter(loader)
    next(batches)
    batches.close()
    assert threads() == 0
    assert list(batches) == []


@pytest.mark.usefixtures("nothing_left")
def test_threads_end_when_the_loader_is_forgotten(threads: Callable[[], int]) -> None:
    loader = _tokens(epochs=None)
    batches = iter(loader)
    held = next(batches)
    del loader, batches
    gc.collect()
    assert threads() == 0
    assert held.tokens.shape == (2, 8)


@pytest.mark.usefixtures("nothing_left")
def test_many_loops_left_early_leave_nothing_behind(threads: Callable[[], int]) -> None:
    loader = _tokens(epochs=None)
    for _ in range(50):
        next(iter(loader))
    assert threads() == 0


@pytest.mark.usefixtures("nothing_left")
def test_a_failing_stage_leaves_no_threads_while_its_error_is_held(threads: Callable[[], int]) -> None:
    loader = Loader(streams.Numbers(40), batch_size=4, shuffle=False, workers=2).map(streams.failing)
    error = None
    try:
        list(loader)
    except Exception as caught:
        error = caught
    assert error is not None
    assert threads() == 0


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

Program = subprocess.Popen[str]
Start = Callable[[str], Program]

PREAMBLE = """\
import os, signal, sys, time, warnings
import numpy as np
import psutil
from tests.load import streams
import headrace

def tokens(**options):
    data = streams.token_dataset([8] * 4000)
    return headrace.Loader(data, **{"batch_size": 2, "seq_len": 8, "epochs": None, "timeout_seconds": 600, **options})

def in_processes(count):
    return tokens().map(dict, per="batch", processes=count)

def children():
    return [child.pid for child in psutil.Process().children(recursive=True)]

def heed_ctrl_c():
    # Tests may run in the background, where it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""


@pytest.fixture
def start(start_program: Start) -> Start:
    return lambda code: start_program(PREAMBLE + textwrap.dedent(code))


def _line(program: Program) -> str:
    assert program.stdout is not None
    return program.stdout.readline()


def _numbers(program: Program) -> list[int]:
    return [int(word) for word in _line(program).split()]


def test_a_program_that_ends_in_the_middle_ends_without_a_word(start: Start) -> None:
    """Each of these is the end of a process of its own, forked before there are threads."""
    program = start(
        """
        def with_batches_held():
            globals()["held"] = [batch for _, batch in zip(range(5), tokens())]

        def with_an_iteration_held():
            globals()["batches"] = iter(tokens(workers=3))
            next(batches)

        def in_the_middle_of_a_loop():
            for batch in tokens():
                break

        def with_an_iteration_in_a_reference_cycle():
            cycle = [iter(tokens())]
            cycle.append(cycle)
            next(cycle[0])

        for end in (
            with_batches_held, with_an_iteration_held, in_the_middle_of_a_loop, with_an_iteration_in_a_reference_cycle
        ):
            pid = os.fork()
            if pid == 0:
                end()
                break
            _, status = os.waitpid(pid, 0)
            print(end.__name__, os.waitstatus_to_exitcode(status), flush=True)
        """
    )
    out, complaint = program.communicate(timeout=PATIENCE_SECONDS)
    assert complaint == ""
    assert out.splitlines() == [
        "with_batches_held 0",
        "with_an_iteration_held 0",
        "in_the_middle_of_a_loop 0",
        "with_an_iteration_in_a_reference_cycle 0",
    ]
    assert program.returncode == 0


def test_a_program_with_processes_that_ends_in_the_middle_ends_without_a_word(start: Start) -> None:
    program = start(
        """
        if __name__ == "__main__":
            batches = iter(in_processes(1))
            held = next(batches)
        """
    )
    assert program.communicate(timeout=PATIENCE_SECONDS) == ("", "")
    assert program.returncode == 0


@pytest.mark.parametrize("processes", [0, 2])
def test_ctrl_c_ends_a_program_with_its_usual_exception(processes: int, start: Start) -> None:
    program = start(
        f"""
        if __name__ == "__main__":
            heed_ctrl_c()
            for step, batch in enumerate(in_processes({processes})):
                if step == 3:
                    print(*children(), flush=True)
                time.sleep(0.001)
        """
    )
    pids = _numbers(program)
    assert len(pids) == processes
    # To the whole group, as a terminal does.
    os.killpg(program.pid, signal.SIGINT)
    _, complaint = program.communicate(timeout=PATIENCE_SECONDS)
    assert program.returncode == -signal.SIGINT
    assert complaint.rstrip().endswith("KeyboardInterrupt")
    assert complaint.count("Traceback (most recent call last)") == 1, complaint
    wait_until_gone(pids)


def test_ctrl_c_while_waiting_for_a_slow_batch_ends_a_program_too(start: Start) -> None:
    program = start(
        """
        import threading
        from headrace.workers.stacks import current_frames

        def main_thread_waits():
            return current_frames()[threading.main_thread().ident].f_code.co_name == "wait"

        def slow(sample):
            if main_thread_waits() and not told:
                told.append(print("it waits", flush=True))
            time.sleep(0.2)
            return sample

        told = []
        heed_ctrl_c()
        for batch in tokens(workers=1).map(slow):
            pass
        """
    )
    assert _line(program) == "it waits\n"
    os.killpg(program.pid, signal.SIGINT)
    _, complaint = program.communicate(timeout=PATIENCE_SECONDS)
    assert complaint.rstrip().endswith("KeyboardInterrupt")


def test_a_program_that_is_killed_leaves_nothing_and_its_next_start_works(start: Start) -> None:
    """Nothing with a name is left that a second run, or another user, could stumble over."""
    for _ in range(2):
        program = start(
            """
            if __name__ == "__main__":
                batches = iter(in_processes(2))
                print(next(batches)["tokens"].shape, flush=True)
                print(*children(), flush=True)
                time.sleep(600)
            """
        )
        assert _line(program) == "(2, 8)\n"
        pids = _numbers(program)
        assert len(pids) == 2
        assert [named_memory(pid) for pid in (program.pid, *pids)] == [set(), set(), set()]
        program.kill()
        _, complaint = program.communicate(timeout=PATIENCE_SECONDS)
        assert complaint == ""
        wait_until_gone(pids)


def test_a_program_that_forks_while_loading_goes_on_and_the_fork_is_told_to_begin_anew(start: Start) -> None:
    """The threads stayed in the parent: a fork that waited for them would wait for the timeout."""
    program = start(
        """
        # Newer Pythons warn of a fork beside threads.
        warnings.simplefilter("ignore")
        batches = iter(tokens(workers=2))
        next(batches)
        pid = os.fork()
        if pid == 0:
            try:
                next(batches)
            except headrace.HeadraceError as error:
                print(error, flush=True)
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        next(batches)
        print("the fork ended with", os.waitstatus_to_exitcode(status))
        """
    )
    out, complaint = program.communicate(timeout=PATIENCE_SECONDS)
    told, ended = out.splitlines()
    assert "after a fork, start a new one with iter(loader)" in told
    assert (ended, program.returncode, complaint) == ("the fork ended with 0", 0, "")
