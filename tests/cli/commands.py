"""Running commands: as a process of their own, or in this one, which is quicker and gives the same words."""

import contextlib
import io
import subprocess
import sys
from typing import Any

from headrace.cli.main import main

Done = subprocess.CompletedProcess[str]


def run_command(*words: object, **options: Any) -> Done:
    """As a user's shell does."""
    command = [sys.executable, "-m", "headrace", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def run_here(*words: object) -> Done:
    """In this process: what a command would write, and its exit code."""
    given = [*map(str, words)]
    stdout, stderr = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main(given)
        except SystemExit as stop:
            code = stop.code or 0
    return subprocess.CompletedProcess(given, code, stdout.getvalue(), stderr.getvalue())
