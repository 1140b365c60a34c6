"""However the process of a DataLoader ends, its workers go with it, and what they shared."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

from tests.torch.leftovers import is_alive, shared_memory, wait_until

ROOT = Path(__file__).parents[3]
WRONG = ("Exception ignored", "resource_tracker", "Fatal Python error", "leaked")


def _by_itself(pid: int) -> None:
    """It ends without anyone's help."""


def _ctrl_c(pid: int) -> None:
    # As a terminal sends it: to the workers as well.
    os.killpg(pid, signal.SIGINT)


def _terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


ENDINGS: dict[str, tuple[str, Callable[[int], None], int]] = {
    "normal exit": ("none", _by_itself, 0),
    "exception": ("exception", _by_itself, 1),
    "sys.exit": ("sys.exit", _by_itself, 3),
    "Ctrl-C": ("signal", _ctrl_c, -signal.SIGINT),
    "SIGTERM": ("signal", _terminate, -signal.SIGTERM),
    "kill -9": ("signal", _kill, -signal.SIGKILL),
}


@pytest.fixture(scope="module")
def program(child_environment: dict[str, str]) -> Iterator[Any]:
    """One for all endings: each is a fork of it."""
    environment = dict(child_environment)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in [str(ROOT), *sys.path] if path)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.torch.dataloader.ending_processes"],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        yield program


# After an exception or sys.exit Python ends as it does normally, and SIGTERM ends it as SIGKILL does.
@pytest.mark.parametrize(
    ("ending", "persistent"),
    [
        *((ending, False) for ending in ENDINGS),
        *((ending, True) for ending in ("normal exit", "Ctrl-C", "kill -9")),
    ],
)
def test_however_the_process_ends_its_workers_and_memory_go(
    ending: str, persistent: bool, program: Any, tmp_path: Path
) -> None:
    _check_ending(program, tmp_path, ending, persistent=persistent)


@pytest.mark.parametrize("ending", ["normal exit", "Ctrl-C", "kill -9"])
def test_however_the_process_ends_with_threads(ending: str, program: Any, tmp_path: Path) -> None:
    _check_ending(program, tmp_path, ending, worker_kind="thread")


def test_workers_that_hang_go_with_the_process_that_is_killed(program: Any, tmp_path: Path) -> None:
    _check_ending(program, tmp_path, "kill -9", hangs=True)


def _check_ending(
    program: Any,
    folder: Path,
    ending: str,
    worker_kind: str = "process",
    persistent: bool = False,
    hangs: bool = False,
) -> None:
    shared = shared_memory()
    what, end, code = ENDINGS[ending]
    errors = folder / "stderr"
    told = {
        "ending": what,
        "worker_kind": worker_kind,
        "persistent": persistent,
        "hangs": hangs,
        "stderr": str(errors),
    }
    program.stdin.write(json.dumps(told) + "\n")
    program.stdin.flush()
    pid, *pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) == (2 if worker_kind == "process" else 0)
    end(pid)
    assert int(program.stdout.readline()) == code, errors.read_text()
    for wrong in WRONG:
        assert wrong not in errors.read_text()
    wait_until(
        lambda: not any(is_alive(worker) for worker in pids),
        lambda: "workers outlived the process that started them",
    )
    wait_until(lambda: shared_memory() <= shared, lambda: f"left: {shared_memory() - shared}")
