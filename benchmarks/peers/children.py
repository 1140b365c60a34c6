"""Starts a script with one peer, watches its memory, reads its lines, and makes a reason of what goes wrong."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machine import PeakMemory

ONE = Path(__file__).parent / "one.py"
MOST_SECONDS = 120
LATE_SECONDS = 10


class Failed(Exception):
    """A peer gave no figures, and why."""


def run_one(
    question: str,
    name: str,
    workers: int,
    folder: Path,
    *,
    scratch: Path,
    seconds: float,
    unmeasured: int,
    check: Path | None = None,
) -> dict[str, Any]:
    """One run; with `check` a trial: its memory is watched until it has been measured, then it is checked."""
    command = [question, name, str(workers), str(folder), "--seconds", str(seconds)]
    command += ["--unmeasured", str(unmeasured)]
    if not check:
        return lines(command, scratch, 1)[0][0]
    (report, checked), memory = lines([*command, "--check", str(check)], scratch, 2)
    return {**report, "checked": checked, "peak_memory_mb": memory}


def prepare(question: str, name: str, folder: Path, scratch: Path) -> None:
    lines([question, name, "0", str(folder), "--prepare"], scratch, 1)


def lines(
    command: list[str],
    scratch: Path,
    expected: int,
    *,
    script: Path = ONE,
    python: Path | str = sys.executable,
    environment: Mapping[str, str] | None = None,
    most_seconds: int = MOST_SECONDS,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """So many lines of a script; and if there are several, its memory until the first of them, which is a trial's.

    `environment` has variables of its own beside the usual ones. `python` is that of another environment.
    """
    errors = scratch / "errors.txt"
    # -u: nothing of what a library prints may stand in the same line as a report.
    started = [str(python), "-u", str(script), *command, "--started", repr(time.monotonic())]
    with (
        open(errors, "wb") as sink,
        subprocess.Popen(
            started,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            env={**_environment(scratch, most_seconds), **(environment or {})},
            start_new_session=True,
        ) as child,
    ):
        # Its alarm ends a peer that hangs, but not the workers of that peer, who keep its output open.
        late = threading.Timer(most_seconds + LATE_SECONDS, _kill, [child])
        late.start()
        try:
            return _read(child, expected)
        except Failed as failed:
            last = errors.read_text(errors="replace").strip().splitlines()[-1:]
            raise Failed(_without_paths(str(failed) or " ".join(last) or "ended without a word")) from None
        finally:
            late.cancel()
            _end(child)


def _read(child: Any, expected: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    found: list[dict[str, Any]] = []
    memory: dict[str, float] = {}
    # Only a trial is watched: reading a process's pages slows it down.
    if expected > 1:
        with PeakMemory(child.pid, 0.05) as peak:
            found.append(_report(child))
        memory = peak.mb
    while len(found) < expected:
        found.append(_report(child))
    return found, memory


def _report(child: Any) -> dict[str, Any]:
    """The next line that is a JSON object; libraries print as well. A peer that hangs is ended by its alarm."""
    for line in child.stdout:
        if line.startswith("{"):
            report: dict[str, Any] = json.loads(line)
            if "error" in report:
                raise Failed(report["error"])
            return report
    raise Failed("" if child.wait() >= 0 else f"ended by signal {-child.returncode}")


def _end(child: Any) -> None:
    """Its own session only. Most have ended by themselves; workers that linger are not waited for."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(20)
    _kill(child)


def _kill(child: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _environment(scratch: Path, most_seconds: int) -> dict[str, str]:
    """Nothing is fetched or left at home. OMP_NUM_THREADS: torch would share the copying of one batch between two
    threads. With neighbours on the machine that made HF datasets and litdata up to 18 and 9 times slower in some runs
    and was no clear gain in any; on an idle machine it has not been tried."""
    home = scratch / "home"
    home.mkdir(exist_ok=True)
    return {
        **os.environ,
        "HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(scratch),
        "HEADRACE_PEER_SECONDS": str(most_seconds),
    }


def _without_paths(reason: str) -> str:
    return re.sub(r"\w+://\S+|(/[\w.\-+]+){2,}", "...", reason)[:200]
