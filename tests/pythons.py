"""The core's tests on every Python from 3.11 to 3.14 that is on this machine.

    python -m tests.pythons
    python -m tests.pythons tests/load --versions 3.12 3.13

Each Python has an environment of its own in .venv-pythons/ with the core's dependencies only: tests that need torch,
JAX or a tokenizer library are skipped there. All others must pass.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.outcomes import ORDINARY, Outcome, environment_of_its_own, run_pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-pythons"
VERSIONS = ["3.11", "3.12", "3.13", "3.14"]
TEST_TOOLS = ["pytest", "hypothesis", "pytest-timeout", "pytest-xdist"]
NOT_IN_THE_CORE = ["torch", "jax", "tokenizers", "tiktoken", "gigatoken", "matplotlib"]

NEVER_SKIPPED = "tests.rows.test_buffers"
"""Buffers are used again when their reference counts say so, and those differ between versions of Python."""


def main() -> int:
    arguments = parse_arguments()
    found = {version: python for version in arguments.versions if (python := find_python(version))}
    lines, failed = [], not found
    for version, python in found.items():
        print(f"\n== Python {version}: {python}", flush=True)
        environment = make_environment(version, python)
        outcome = run_pytest(environment, ROOT, [*ORDINARY, "-p", "no:cacheprovider", *arguments.paths])
        problems = [*outcome.failed, *buffers_left_out(outcome, arguments.paths)]
        failed = failed or bool(problems)
        lines.append(f"Python {version} ({python}): {outcome}")
        lines += [f"  {problem}" for problem in problems]
    print("\n== Summary", *lines, sep="\n")
    for version in arguments.versions:
        if version not in found:
            print(f"Python {version}: not found")
    if not found:
        print("No Python was found, so nothing was tested.")
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.pythons",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=VERSIONS, help="those to look for")
    parser.add_argument("paths", nargs="*", default=["tests"], help="tests to run; all of them by default")
    return parser.parse_args()


def find_python(version: str) -> Path | None:
    """One of pyenv's, the newest, or one on the path. A shim of pyenv may be there and not run."""
    candidates = [folder / "bin" / "python" for folder in pyenv_folders(version)]
    on_path = shutil.which(f"python{version}")
    if on_path:
        candidates.append(Path(on_path))
    return next((python for python in candidates if runs_as(python, version)), None)


def pyenv_folders(version: str) -> list[Path]:
    root = os.environ.get("PYENV_ROOT")
    if not root and shutil.which("pyenv"):
        asked = subprocess.run(["pyenv", "root"], capture_output=True, text=True)
        root = asked.stdout.strip()
    if not root:
        return []
    folders = Path(root).glob(f"versions/{version}.*")
    # Not the free-threaded ones, such as 3.13.0t: they are another interpreter.
    released = [folder for folder in folders if re.fullmatch(r"[\d.]+", folder.name)]
    return sorted(released, key=lambda folder: int(folder.name.split(".")[2]), reverse=True)


def runs_as(python: Path, version: str) -> bool:
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        asked = subprocess.run([python, "-c", program], capture_output=True, text=True)
    except OSError:
        return False
    return asked.stdout.strip() == version


def make_environment(version: str, python: Path) -> Path:
    """An environment with the core's dependencies and what the tests are run with; returns its Python."""
    folder = ENVIRONMENTS / version
    inside = folder / "bin" / "python"
    if not runs_as(inside, version):
        _run(python, "-m", "venv", "--clear", folder)
    pip = [inside, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run(*pip, "install", "--editable", ROOT, *TEST_TOOLS, "--constraint", ROOT / "constraints.txt")
    program = f"from importlib.util import find_spec; print(*filter(find_spec, {NOT_IN_THE_CORE}))"
    surplus = _run(inside, "-c", program).strip()
    if surplus:
        raise SystemExit(f"{folder} is to have the core's dependencies only, and has {surplus}; remove it")
    return inside


def buffers_left_out(outcome: Outcome, paths: list[str]) -> list[str]:
    if paths != ["tests"]:
        return []
    ran = any(name.startswith(f"{NEVER_SKIPPED}::") for name in outcome.passed)
    problems = []
    for name, reason in outcome.skipped.items():
        if name.startswith(NEVER_SKIPPED) and "torch" not in reason:
            problems.append(f"skipped, and must not be: {name}: {reason}")
    return problems if ran else [*problems, f"{NEVER_SKIPPED} was not run"]


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment_of_its_own(), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
