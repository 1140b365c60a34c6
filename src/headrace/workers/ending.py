"""End processes, and describe how they ended."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable

_GRACE_SECONDS = 0.3
"""How long a worker has to exit by itself after its connection was closed."""
_KILLED_SECONDS = 60.0
"""How long a killed process may take to disappear; on a busy machine the kernel may need a while."""
_ENDING_SECONDS = 5.0
"""How long a process may take to exit after closing its socket; usually no time, unless the machine is busy."""


def how_it_ended(code: int) -> str:
    """An exit code in words, negative if a signal ended the process: "was killed by SIGSEGV"."""
    if code >= 0:
        return f"exited with code {code}"
    names = {sign.value: sign.name for sign in signal.Signals}
    said = f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"{said} (out of memory?)" if -code == signal.SIGKILL else said


def ending(process: "subprocess.Popen[bytes]") -> str:
    """How a process ended that has closed its connection."""
    try:
        return how_it_ended(process.wait(_ENDING_SECONDS))
    except subprocess.TimeoutExpired:
        return "closed its connection"


def end_all(processes: Iterable["subprocess.Popen[bytes]"], grace_seconds: float = _GRACE_SECONDS) -> None:
    """Give processes that were told to end a moment, kill those that are left, and reap them all."""
    processes = list(processes)
    deadline = time.monotonic() + grace_seconds
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
    deadline = time.monotonic() + _KILLED_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0))


def is_orphan(parent: int) -> bool:
    """Whether the process that started this one is gone."""
    return os.getppid() != parent
