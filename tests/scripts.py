"""Scripts in processes of their own that need not import everything again: see script_server.py."""

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

SERVER = Path(__file__).with_name("script_server.py")
COMMON = ("numpy", "headrace.load.loader")
"""What most scripts import."""
PLOTS = ("matplotlib.figure", "matplotlib.backends.backend_svg")
"""What scripts that draw import too."""


def skip_without(*packages: str) -> None:
    """Skip a test whose script needs a package that is not installed. Nothing is imported here: that takes long."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


class Scripts:
    """Runs scripts in forks of one process that has imported some modules already."""

    def __init__(self, modules: Sequence[str]) -> None:
        # A crash shows its stack, and no thread pools take address space.
        more = {"PYTHONFAULTHANDLER": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, SERVER, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **more},
        )

    def run(
        self, *arguments: object, code: str | None = None, folder: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """The script at the path that is the first argument, or `code` as `python -c` would run it."""
        requests, answers = self._server.stdin, self._server.stdout
        assert requests is not None
        assert answers is not None
        given = [*map(str, arguments)]
        with tempfile.TemporaryDirectory() as place:
            stdout, stderr = Path(place, "stdout"), Path(place, "stderr")
            asked = {"code": code, "arguments": given or ["-c"], "folder": str(folder or os.getcwd())}
            asked |= {"stdout": str(stdout), "stderr": str(stderr)}
            print(json.dumps(asked), file=requests, flush=True)
            exit_code = int(answers.readline())
            return subprocess.CompletedProcess(given, exit_code, stdout.read_text(), stderr.read_text())

    def end(self) -> None:
        self._server.terminate()
        self._server.communicate()


@functools.cache
def scripts_with(*modules: str) -> Scripts:
    """One server for all tests that want the same modules. PyTorch takes long to import, and long to end: only those
    that need it should ask for it."""
    found = Scripts([*COMMON, *modules])
    atexit.register(found.end)
    return found
