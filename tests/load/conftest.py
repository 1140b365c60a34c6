"""What several files of tests use: crews that are closed, and programs that are ended, when their test is over."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.load.crew import Crew
from tests.load.left_behind import nothing_left_behind
from tests.load.waiting import NEVER_SECONDS, HeldClock


@pytest.fixture
def make_crew() -> Iterator[Callable[..., Crew]]:
    """Crews that are closed after the test, whatever their workers are doing, and have then left nothing behind."""
    usual = {"workers": 1, "slots": 4, "timeout_seconds": NEVER_SECONDS, "stage": "map"}
    crews: list[Crew] = []

    def make(work: Callable[[Any], Any], **settings: Any) -> Crew:
        crews.append(Crew(work, **{**usual, **settings}))
        return crews[-1]

    with nothing_left_behind():
        yield make
        while crews:
            crews.pop().close()


@pytest.fixture
def held_clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    return HeldClock(monkeypatch)


@pytest.fixture
def start_program(
    tmp_path: Path, child_environment: dict[str, str]
) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Runs a script that can import the tests' helpers, in a process group of its own."""
    programs = []

    def start(code: str, **options: Any) -> "subprocess.Popen[str]":
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        path = os.pathsep.join([str(Path(__file__).parents[2]), child_environment.get("PYTHONPATH", "")])
        program = subprocess.Popen(
            [sys.executable, "-W", "error", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**child_environment, "PYTHONPATH": path},
            start_new_session=True,
            **options,
        )
        programs.append(program)
        return program

    yield start
    for program in programs:
        if program.returncode is None:
            # Nobody has asked for its exit code, so that no other group can have its number.
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
